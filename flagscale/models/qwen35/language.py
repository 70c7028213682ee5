"""The Qwen3.5 language model on Megatron-Core's GPTModel.

Shapes: B samples, S tokens of a sample (S_local on this rank: S / TP with sequence parallelism, else S), D width,
V visual rows, W vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from flagscale.config.schema import ModelConfig
from flagscale.models.qwen35 import spec
from flagscale.models.qwen35.attention import PackedSequences
from flagscale.models.qwen35.experts import BalancedRouter, RoutedTokens, SampleTokens
from flagscale.models.qwen35.rope import InterleavedMRope


@dataclass(frozen=True, slots=True)
class VisualRows:
    """Visual embeddings and where they go, for this rank's tokens of one microbatch.

    Targets count rows of the flattened [S_local, B, D] embedding: row = s_local * B + b. Placeholders elsewhere on
    other ranks (sequence parallelism, other stages) have no entry. Target S_local * B drops its row, which lets lists
    of any length be padded to one shape. The gradient of `embeddings_VD` is complete on every tensor parallel rank
    without sequence parallelism, and covers this rank's tokens only with it.

    Attributes:
        embeddings_VD: rows of the vision encoder.
        decoder_source, decoder_target: embeddings_VD[source[i]] replaces row target[i] of the decoder's input.
        mtp_source, mtp_target: the same for the embedding of the next token, which the MTP layer takes.
    """

    embeddings_VD: Tensor
    decoder_source: Tensor
    decoder_target: Tensor
    mtp_source: Tensor
    mtp_target: Tensor


class LanguageModel(GPTModel):
    """One pipeline stage of the language model, with its MTP layer on the last stage.

    GPTModel's modules, its own forward pass: upstream's `process_mtp_loss` divides by token counts of one microbatch,
    drops the loss mask of other ranks and reports through globals, and its forward knows neither visual rows in the
    MTP layer nor interleaved positions. Megatron-Core's global parallel state must hold the language layout (its MTP
    block asks there which stage it is on).
    """

    def __init__(self, model: ModelConfig, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        pp_rank, last = groups.pp.rank(), groups.pp.size() - 1
        super().__init__(
            config=config,
            transformer_layer_spec=spec.language_block(config, pp_rank),
            vocab_size=model.vocab_size,
            max_sequence_length=model.max_position_embeddings,
            pre_process=pp_rank == 0,
            post_process=pp_rank == last,
            share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
            position_embedding_type="none",  # the rotary embedding is this project's, set below
            mtp_block_spec=spec.mtp_block(config) if config.mtp_num_layers else None,
            pg_collection=groups,
        )
        self.rotary_pos_emb = InterleavedMRope(
            model.kv_channels, model.rotary_percent, model.rotary_base, list(model.mrope_section)
        )
        if self.mtp_process and self.share_embeddings_and_output_weights and not self.pre_process:
            # The MTP stage holds a copy of the embedding, which serves as output weight too. Upstream still allocates
            # an output weight there; it never gets a gradient, and overlapped gradient reduction then fails.
            self.output_layer.weight = None
        self._routers = [module for module in self.modules() if isinstance(module, BalancedRouter)]

    def forward(
        self,
        input_ids_BS: Tensor,
        position_ids_3BS: Tensor,
        labels_BS: Tensor | None = None,
        visual: VisualRows | None = None,
        packed: PackedSequences | None = None,
        attention_mask_BS: Tensor | None = None,
        with_predictions: bool = False,
        num_tokens: tuple[int, ...] = (),
    ) -> Tensor | tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
        """Runs this stage; `set_input_tensor` has given a later stage its hidden states.

        Args:
            input_ids_BS: token ids, placeholders at visual tokens.
            position_ids_3BS: time, height and width position of every token, on every stage.
            labels_BS: id of the next token; None returns logits.
            visual: rows to lay over the text embeddings, None when this microbatch has none here.
            packed: borders of samples packed into one row (B = 1).
            attention_mask_BS: bool, True at real tokens; only needed when padding is on the left.
            with_predictions: with labels, also return the most probable next token at every position, [B, S].
            num_tokens: tokens of each sample, from the start of its row or of its part of a packed row; empty when
                there is no padding. What is left of a row does not count in the balancing loss of experts.

        Returns:
            Hidden states [S_local, B, D] before the last stage. On it, with labels: losses of the next token and of
            the one after it (None without MTP), [B, S] fp32, not masked, not reduced; the last two columns of the
            second predict nothing. Without labels: logits [B, S, W], complete on every rank.
        """
        rotary = self.rotary_pos_emb(position_ids_3BS)
        if self._routers and self.training and torch.is_grad_enabled():
            self._count_tokens(input_ids_BS, num_tokens, () if packed is None else packed.lengths)
        decoder_input = self._embed(input_ids_BS, visual) if self.pre_process else None
        shared = {"attention_mask": attention_mask_BS, "rotary_pos_emb": rotary, "packed_seq_params": packed}
        hidden = self.decoder(hidden_states=decoder_input, **shared)
        if not self.post_process:
            return hidden
        if labels_BS is None:
            logits_BSW = self._logits(hidden).transpose(0, 1)
            return gather_from_tensor_model_parallel_region(logits_BSW.contiguous(), group=self.tp_group)
        if not self.mtp_process:
            return self._losses(hidden, None, labels_BS, with_predictions)
        next_embedding = self._embed(input_ids_BS.roll(-1, dims=1), visual, for_mtp=True)
        both = self.mtp(
            input_ids=input_ids_BS,
            position_ids=position_ids_3BS,
            hidden_states=hidden,
            embedding=next_embedding,
            **shared,
        )
        return self._losses(*both.chunk(2), labels_BS, with_predictions)

    def take_balance(self) -> Tensor:
        """Balancing losses of this rank's share of the tokens, not weighted, since they were last taken.

        A sum over the layers of this stage and over samples, 0 without experts; the sum over all ranks is the job's.
        """
        none = torch.zeros((), device=next(self.parameters()).device)
        return sum((router.take_balance() for router in self._routers), none)

    def _count_tokens(self, input_ids_BS: Tensor, num_tokens: tuple[int, ...], lengths: tuple[int, ...]) -> None:
        """Tells the routers which of this rank's tokens count."""
        shape = (input_ids_BS.shape[0], input_ids_BS.shape[1])
        shard = (self.tp_group.rank(), self.tp_group.size()) if self.config.sequence_parallel else (0, 1)
        samples = SampleTokens.of(shape, num_tokens, lengths)
        of_decoder, of_mtp = (
            RoutedTokens.of(which, shape=shape, shard=shard, device=input_ids_BS.device)
            for which in (samples, samples.with_next())
        )
        for router in self._routers:
            router.tokens = of_mtp if router.is_mtp_layer else of_decoder

    def _losses(
        self, hidden: Tensor, mtp_hidden: Tensor | None, labels_BS: Tensor, with_predictions: bool
    ) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
        mtp_loss_BS = None
        if mtp_hidden is not None:
            mtp_loss_BS = self.compute_language_model_loss(labels_BS.roll(-1, dims=1), self._logits(mtp_hidden))
        logits = self._logits(hidden)
        # Before the loss, which overwrites fp32 logits.
        predictions_BS = parallel_argmax(logits, self.tp_group).transpose(0, 1) if with_predictions else None
        losses = self.compute_language_model_loss(labels_BS, logits), mtp_loss_BS
        return losses if predictions_BS is None else (*losses, predictions_BS)

    def _embed(self, input_ids_BS: Tensor, visual: VisualRows | None, for_mtp: bool = False) -> Tensor:
        """[S_local, B, D] embeddings, visual rows in place of their placeholders."""
        text_SBD = self.embedding(input_ids=input_ids_BS, position_ids=None)
        if visual is None:
            return text_SBD
        source = visual.mtp_source if for_mtp else visual.decoder_source
        target = visual.mtp_target if for_mtp else visual.decoder_target
        # Not skipped when empty: the encoder must stay in the graph, or ranks disagree on which gradients exist.
        rows = visual.embeddings_VD.index_select(0, source).to(text_SBD.dtype)
        flat = torch.cat([text_SBD.flatten(0, 1), text_SBD.new_zeros(1, text_SBD.shape[-1])])
        return flat.index_copy_(0, target, rows)[:-1].view_as(text_SBD)

    def _logits(self, hidden_SBD: Tensor) -> Tensor:
        """[S, B, W / TP]."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(hidden_SBD, weight=weight)[0]


def parallel_argmax(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Index of the largest logit over the whole vocabulary, the lowest among equals; the last dimension is split."""
    value, index = logits.max(dim=-1)
    best = value.clone()
    dist.all_reduce(best, op=dist.ReduceOp.MAX, group=group)
    width = logits.shape[-1]
    index = torch.where(value == best, index + width * group.rank(), width * group.size())
    dist.all_reduce(index, op=dist.ReduceOp.MIN, group=group)
    return index
