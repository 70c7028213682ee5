"""Gated DeltaNet kernels in plain torch, for devices without flash-linear-attention.

They take flash-linear-attention's arguments, so that the layer calls either alike. Sequences packed one after the other
(`cu_seqlens`) stay apart in the convolution and in the recurrent state: Megatron-Core's own torch rule refuses packed
input, and transformers' leaks over the boundaries.

Shapes: B batch, T tokens, N sequences, H value heads, G key heads, K key dim, V value dim, C chunks, L chunk length,
D channels, W taps.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64  # tokens solved at once; 64 is what flash-linear-attention uses, larger ones lose precision to the decay
STEP = 16  # chunks of shorter sequences are a multiple of this


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Scales the last dimension to length one; `eps` is added to the squared length, as flash-linear-attention does."""
    x_float = x.float()
    return (x_float * torch.rsqrt(x_float.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """Depthwise causal convolution along T, with an optional SiLU.

    Args:
        x: [B, T, D].
        weight: [D, W]; the last tap sees the present token.
        bias: [D].
        activation: None, `silu` or `swish`.
        cu_seqlens: [N + 1] borders of packed sequences, B must be 1.

    Returns:
        ([B, T, D], None), None standing for the state that training does not need.
    """
    assert activation in (None, "silu", "swish"), f"unknown activation {activation}"
    taps = weight.shape[-1]
    if cu_seqlens is None:
        y_BDT = functional.conv1d(
            x.transpose(1, 2).to(weight.dtype), weight.unsqueeze(1), bias, padding=taps - 1, groups=x.shape[-1]
        )
        y = y_BDT[..., : x.shape[1]].transpose(1, 2)
    else:
        # Shifted copies, masked where the shift would reach into the sequence before. Summed in fp32, as conv1d does.
        position_T = _position_in_sequence(cu_seqlens, x.shape[1])
        y = x.float() * weight[:, -1].float()
        for shift in range(1, taps):
            shifted = functional.pad(x, (0, 0, shift, 0))[:, : x.shape[1]].float()  # also of rows shorter than the taps
            inside = (position_T >= shift).to(shifted.dtype)[None, :, None]
            y = y + shifted * inside * weight[:, taps - 1 - shift].float()
        if bias is not None:
            y = y + bias.float()
    if activation is not None:
        y = functional.silu(y)
    return y.to(x.dtype), None


RAW_INPUTS = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
"""What tells flash-linear-attention's rule that its inputs are as projected."""


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor | None = None,
    **inputs: bool,
) -> tuple[Tensor, None]:
    """The gated delta rule of what a layer projects and convolves: queries and keys are scaled to length one, the decay
    is exp(-exp(A_log) * softplus(g + dt_bias)), the write strength sigmoid(beta).

    Args:
        q, k: [B, T, G, K]; each of the G key heads serves H / G neighbouring value heads.
        v: [B, T, H, V].
        g, beta: [B, T, H].
        A_log, dt_bias: [H].
        cu_seqlens: as in `gated_delta_rule`.
        inputs: `RAW_INPUTS`.

    Returns:
        ([B, T, H, V], None), None standing for the final state that training does not need.
    """
    assert inputs == RAW_INPUTS, "inputs that are prepared go to gated_delta_rule"
    decay = -A_log.float().exp() * functional.softplus(g.float() + dt_bias.float())
    shared = v.shape[2] // q.shape[2]
    q, k = (l2norm(x).repeat_interleave(shared, dim=2) for x in (q, k))
    return gated_delta_rule(q, k, v, decay, torch.sigmoid(beta.float()), cu_seqlens), None


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None = None
) -> Tensor:
    """o_t = S_t^T q_t / sqrt(K), S_t = R + beta_t k_t (v_t - R^T k_t)^T, R = exp(g_t) S_{t-1}.

    Computed chunk by chunk (Yang et al., Gated Delta Networks, arXiv 2412.06464): inside a chunk one triangular solve
    gives all corrected values, between chunks the state is carried. Everything in fp32.

    Args:
        q, k: [B, T, H, K], already normalised.
        v: [B, T, H, V].
        g: [B, T, H], the logarithm of the decay, <= 0.
        beta: [B, T, H], the write strength.
        cu_seqlens: [N + 1] borders of packed sequences, B must be 1; the state starts empty at each.

    Returns:
        [B, T, H, V].
    """
    tensors = [x.float() for x in (q * q.shape[-1] ** -0.5, k, v, g, beta)]
    if cu_seqlens is None:
        tokens, chunk = q.shape[1], _chunk_of(q.shape[1])
        out = _rule([_pad_tokens(x, -(-tokens // chunk) * chunk) for x in tensors], chunk)[:, :tokens]
    else:
        # Each sequence becomes a row of a batch, padded with tokens that neither write (beta 0) nor decay (g 0).
        row_T, column_T, rows, longest = _unpacked_index(cu_seqlens, q.shape[1])
        chunk = _chunk_of(longest)
        grids = []
        for x in tensors:
            grid = x.new_zeros(rows, -(-longest // chunk) * chunk, *x.shape[2:])
            grids.append(grid.index_put((row_T, column_T), x[0]))
        out = _rule(grids, chunk)[row_T, column_T].unsqueeze(0)
    return out.to(v.dtype)


def _chunk_of(tokens: int) -> int:
    """Length of the chunks that sequences of up to so many tokens are cut into."""
    return min(CHUNK, -(-tokens // STEP) * STEP)


def _rule(tensors: list[Tensor], chunk: int) -> Tensor:
    """The rule over whole chunks; tensors as in `gated_delta_rule`, q scaled, T a multiple of `chunk`."""
    batch, tokens, heads = tensors[3].shape
    chunks = tokens // chunk
    q, k, v, g, beta = (
        x.view(batch, chunks, chunk, heads, *x.shape[3:]).transpose(2, 3).transpose(1, 2) for x in tensors
    )  # [B, H, C, L, ...]
    decay = g.cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=g.device).tril()
    # Above the diagonal the difference is positive and exp would overflow: mask before, not after.
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).masked_fill(~lower, float("-inf")).exp()
    k_beta = k * beta.unsqueeze(-1)
    system = (k_beta @ k.transpose(-1, -2)) * between
    within = (q @ k.transpose(-1, -2)) * between
    right = v * beta.unsqueeze(-1)
    if chunks > 1:
        right = torch.cat((right, k_beta * decay.exp().unsqueeze(-1)), -1)
    # unitriangular: the solver takes the diagonal as ones and does not read it.
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = within @ solved if chunks == 1 else _carried(q, k, decay, within, solved)
    return out.transpose(1, 3).transpose(1, 2).reshape(batch, tokens, heads, v.shape[-1])


def _carried(q: Tensor, k: Tensor, decay: Tensor, within: Tensor, solved: Tensor) -> Tensor:
    """Outputs [B, H, C, L, V] of several chunks, the state of each carried to the next; `solved` holds values corrected
    inside their chunk, and what a chunk's values lose to the state before it."""
    values, reads = solved.split((solved.shape[-1] - k.shape[-1], k.shape[-1]), -1)
    q_state = q * decay.exp().unsqueeze(-1)
    k_state = (k * (decay[..., -1:] - decay).exp().unsqueeze(-1)).transpose(-1, -2)
    keep = decay[..., -1].exp()[..., None, None]
    chunks = q.shape[2]
    corrected = values[:, :, 0]
    out, state = [within[:, :, 0] @ corrected], k_state[:, :, 0] @ corrected
    for c in range(1, chunks):
        corrected = values[:, :, c] - reads[:, :, c] @ state
        out.append(q_state[:, :, c] @ state + within[:, :, c] @ corrected)
        if c + 1 < chunks:
            state = state * keep[:, :, c] + k_state[:, :, c] @ corrected
    return torch.stack(out, 2)


def _pad_tokens(x: Tensor, length: int) -> Tensor:
    return functional.pad(x, (0, 0) * (x.dim() - 2) + (0, length - x.shape[1]))


def _position_in_sequence(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[T] index of every token in its own sequence."""
    index_T = torch.arange(tokens, device=cu_seqlens.device)
    sequence_T = torch.bucketize(index_T, cu_seqlens[1:-1].to(index_T.dtype), right=True)
    return index_T - cu_seqlens[sequence_T]


def _unpacked_index(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor, int, int]:
    """Row and column of every packed token in a grid of a row a sequence, how many rows, and the longest's tokens."""
    index_T = torch.arange(tokens, device=cu_seqlens.device)
    sequence_T = torch.bucketize(index_T, cu_seqlens[1:-1].to(index_T.dtype), right=True)
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    return sequence_T, index_T - cu_seqlens[sequence_T], cu_seqlens.numel() - 1, longest
