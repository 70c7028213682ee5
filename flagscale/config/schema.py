"""Every key a user can set: its type, default, unit, meaning and home section.

The dataclasses below are the whole configuration surface. They are frozen and hold no logic: `loading.py` fills
them from YAML, `rules.py` checks them, `flagscale.plan` derives from them. Key names follow Megatron-LM and FlagScale.
"""

# ruff: noqa: RUF009 - `key` and `section` return `dataclasses.field`, which is meant to be called in a class body.

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


def key(
    default: Any,
    meaning: str,
    *,
    unit: str = "",
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    path: bool = False,
) -> Any:
    """A configuration field.

    Args:
        default: value when neither YAML nor the command line sets the key; `REQUIRED` when there is none.
        meaning: one sentence for `action=explain`.
        unit: of the value, empty for pure numbers and switches.
        choices: the values allowed, empty for any.
        minimum: the smallest number allowed.
        path: the value names a file or folder; a relative one is made absolute when it is loaded (`paths.py`).
    """
    metadata = {"meaning": meaning, "unit": unit, "choices": choices, "minimum": minimum, "path": path}
    if default is REQUIRED:
        return dataclasses.field(metadata=metadata)
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(cls: type) -> Any:
    """A nested section, built with its own defaults."""
    return dataclasses.field(default_factory=cls)


REQUIRED = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """What the launched processes execute."""

    type: str = key("train", "kind of task", choices=("train",))
    backend: str = key("megatron", "training engine", choices=("megatron",))
    entrypoint: str = key(
        "./flagscale/train/megatron/train_qwen35.py", "script that torchrun starts on every rank", path=True
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmConfig:
    """What a Slurm job asks for; used by runner.type slurm."""

    partition: str | None = key(None, "partition; null leaves it to the cluster")
    account: str | None = key(None, "account that is charged; null leaves it to the cluster")
    qos: str | None = key(None, "quality of service; null leaves it to the cluster")
    time_limit: int | None = key(None, "longest time of one start; null is the partition's", unit="minutes", minimum=1)
    gpus_per_node: int | None = key(None, "GPUs asked for on each node; null asks for none", minimum=1)
    cpus_per_task: int | None = key(None, "CPU cores of a node; null leaves it to the cluster", minimum=1)
    requeue: bool = key(
        True, "queue the job again when its time ends or a node fails; it resumes from the newest checkpoint"
    )
    signal_before: int = key(
        120, "time before the limit at which the run saves a checkpoint and leaves", unit="s", minimum=1
    )
    options: list[str] = key([], "further sbatch options, such as [--constraint=h200, --exclusive]")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerConfig:
    """How the processes are started."""

    type: str = key("local", "where the job runs", choices=("local", "ssh", "slurm"))
    nnodes: int = key(1, "machines in the job", minimum=1)
    nproc_per_node: int = key(4, "processes (ranks) on each machine", minimum=1)
    master_addr: str = key("127.0.0.1", "address of this machine for its ranks; ssh and slurm take the first node's")
    master_port: int | None = key(None, "port of the rendezvous; null takes a free one", minimum=1)
    hostfile: str | None = key(None, "machines of runner.type ssh, one a line: [user@]host[:port] [slots=N]", path=True)
    ssh_options: list[str] = key([], "options of every ssh command, such as [-i, /home/me/key]")
    no_shared_fs: bool = key(
        False, "exp_dir is a folder of each host: the plan is copied there, metrics and sentences come back"
    )
    max_restarts: int = key(
        0, "times a job is started again, from the newest whole checkpoint, after a rank or a host died", minimum=0
    )
    min_nnodes: int | None = key(
        None, "fewest machines a restart goes on with after hosts are lost (ssh); null is nnodes", minimum=1
    )
    detach: bool = key(False, "start in the background and return at once")
    stop_grace: float = key(8.0, "time between SIGTERM and SIGKILL when a job is ended", unit="s", minimum=0)
    slurm: SlurmConfig = section(SlurmConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class CmdsConfig:
    """Shell text that every node runs around the job, in the job's folder and environment."""

    before_start: str = key("", "before the processes start, such as `module load cuda`; a failure ends the job")
    after_stop: str = key("", "after they ended, also when they failed; the job's exit code stays")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig:
    """Iterations that are profiled: a Chrome trace a rank and a timeline in exp_dir/profile."""

    start: int | None = key(None, "first profiled iteration; null profiles none", unit="iterations", minimum=1)
    stop: int | None = key(None, "last profiled iteration", unit="iterations", minimum=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentConfig:
    """One run: its name, its folder, and how it is launched."""

    exp_name: str = key("qwen35_mimo", "name of the run in logs and trackers")
    exp_dir: str = key("./outputs/qwen35_mimo", "folder that receives everything the run writes", path=True)
    task: TaskConfig = section(TaskConfig)
    runner: RunnerConfig = section(RunnerConfig)
    cmds: CmdsConfig = section(CmdsConfig)
    envs: dict[str, Any] = key({}, "environment variables of the launched processes; null unsets one")
    node_envs: dict[str, Any] = key({}, "variables of single hosts, above envs: {host: {NAME: value}} (ssh)")
    profile: ProfileConfig = section(ProfileConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Saving and resuming."""

    save_interval: int | None = key(
        None, "iterations between checkpoints; null saves at the end only", unit="iterations", minimum=1
    )
    keep: int = key(2, "newest checkpoints kept; older ones are removed", minimum=1)
    pretrained: str | None = key(
        None, "weights to start from: a Hugging Face folder, or a checkpoint (an iter_ folder); null: random", path=True
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig:
    """What is reported and to whom."""

    log_interval: int = key(1, "iterations between progress lines on the terminal", unit="iterations", minimum=1)
    tensorboard: bool = key(True, "write TensorBoard event files to exp_dir/tensorboard")
    wandb: bool = key(True, "write a Weights & Biases run to exp_dir/wandb; offline unless WANDB_API_KEY is set")
    wandb_project: str = key("flagscale", "Weights & Biases project")


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemConfig:
    """The machine and the bookkeeping around training."""

    platform: str = key(
        "auto",
        "device and kernels; auto: cuda when every process has a GPU of its own, else cpu",
        choices=("auto", "cpu", "cuda"),
    )
    bf16: bool = key(False, "compute in bfloat16 with fp32 master weights; false computes in fp32")
    cuda_graph: bool = key(
        True, "on GPUs without pipeline stages, replay a microbatch of the language model as one CUDA graph"
    )
    peak_tflops: float | None = key(
        None, "dense bf16 peak that `mfu` is a share of; null takes the device's, by its name", unit="TFLOP/s a GPU",
        minimum=0.001,
    )  # fmt: skip
    gradient_accumulation_fusion: bool = key(
        True, "with Transformer Engine, let matrix products add to the fp32 gradients; false adds afterwards"
    )
    overlap_grad_reduce: bool | None = key(
        None, "reduce gradients while others are still computed; null: on GPUs"
    )
    overlap_param_gather: bool | None = key(
        None, "gather updated parameters beside the next step's first computations; null: on GPUs"
    )
    ddp_bucket_size: int | None = key(
        None, "parameters whose gradients are reduced together; null: 40 million, more with many replicas", minimum=1
    )
    threads_per_rank: int | None = key(None, "CPU threads of a rank; null divides the cores by the ranks", minimum=1)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    logging: LoggingConfig = section(LoggingConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = key(1e-3, "peak learning rate", minimum=0)
    min_lr: float = key(0.0, "learning rate at the end of the decay", minimum=0)
    lr_warmup_iters: int = key(0, "length of the linear warm-up", unit="iterations", minimum=0)
    lr_decay_iters: int | None = key(
        None,
        "iteration at which the decay reaches min_lr; null decays to the end of the run",
        unit="iterations",
        minimum=1,
    )
    lr_decay_style: str = key("cosine", "shape of the decay", choices=("cosine", "linear", "constant"))
    weight_decay: float = key(0.01, "AdamW weight decay of all parameters but no_weight_decay", minimum=0)
    no_weight_decay: list[str] = key(
        ["*.bias", "*norm*", "*.A_log", "*.dt_bias"],
        "Hugging Face names of parameters without weight decay, wildcards * and ? allowed; the default: all vectors",
    )
    adam_beta1: float = key(0.9, "AdamW first-moment decay", minimum=0)
    adam_beta2: float = key(0.95, "AdamW second-moment decay", minimum=0)
    adam_eps: float = key(1e-8, "AdamW denominator offset", minimum=0)
    clip_grad: float = key(1.0, "largest global gradient norm over both modules; 0 turns clipping off", minimum=0)
    max_skipped_steps: int = key(
        10, "steps skipped in a row, since gradients were not finite, that end the run; 0 ends it never", minimum=0
    )
    vision_lr_mult: float = key(1.0, "factor on the learning rate of the vision encoder without its merger", minimum=0)
    merger_lr_mult: float = key(1.0, "factor on the learning rate of the vision merger", minimum=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The network, its parallel layout, the batch, and the length of training."""

    name: str = key("qwen35", "model family, a folder of flagscale/models", choices=("qwen35",))
    # --- language model
    num_layers: int = key(REQUIRED, "decoder layers", minimum=1)
    hidden_size: int = key(REQUIRED, "width of the residual stream", minimum=1)
    ffn_hidden_size: int = key(0, "width of the gated MLP; 0 in a model with experts", minimum=0)
    num_experts: int = key(0, "routed experts of a layer; 0: a dense model", minimum=0)
    moe_router_topk: int = key(0, "routed experts that a token goes to", minimum=0)
    moe_ffn_hidden_size: int = key(0, "width of a routed expert", minimum=0)
    moe_shared_expert_intermediate_size: int = key(0, "width of the gated expert that every token goes to", minimum=0)
    moe_aux_loss_coeff: float = key(
        0.001, "weight of the load-balancing loss of a layer (transformers' is moe_router_topk times it)", minimum=0
    )
    num_attention_heads: int = key(REQUIRED, "query heads of a full-attention layer", minimum=1)
    num_query_groups: int = key(REQUIRED, "key/value heads of a full-attention layer", minimum=1)
    kv_channels: int = key(256, "dimension of an attention head", minimum=1)
    full_attention_interval: int = key(4, "every n-th layer is full attention, the others Gated DeltaNet", minimum=1)
    linear_num_key_heads: int = key(16, "key heads of a Gated DeltaNet layer", minimum=1)
    linear_num_value_heads: int = key(REQUIRED, "value heads of a Gated DeltaNet layer", minimum=1)
    linear_key_head_dim: int = key(128, "dimension of a Gated DeltaNet key head", minimum=1)
    linear_value_head_dim: int = key(128, "dimension of a Gated DeltaNet value head", minimum=1)
    linear_conv_kernel_dim: int = key(4, "width of the causal convolution of Gated DeltaNet", minimum=1)
    vocab_size: int = key(248320, "rows of the embedding table", minimum=1)
    max_position_embeddings: int = key(262144, "largest position the model is made for", unit="tokens", minimum=1)
    norm_epsilon: float = key(1e-6, "epsilon of RMSNorm", minimum=0)
    rotary_base: float = key(1e7, "theta of the rotary embedding", minimum=1)
    rotary_percent: float = key(0.25, "share of a head's channels that is rotated", minimum=0)
    mrope_section: list[int] = key([11, 11, 10], "rotary frequencies given to time, height and width")
    untie_embeddings_and_output_weights: bool = key(False, "give the output layer weights of its own")
    mtp_num_layers: int = key(1, "multi-token-prediction layers, 0 or 1", minimum=0)
    mtp_loss_scaling_factor: float = key(0.1, "weight of the multi-token-prediction loss", minimum=0)
    init_method_std: float = key(0.02, "standard deviation of the initial weights", minimum=0)
    # --- vision encoder
    vision_num_layers: int = key(REQUIRED, "blocks of the vision encoder", minimum=1)
    vision_hidden_size: int = key(REQUIRED, "width of the vision encoder", minimum=1)
    vision_ffn_hidden_size: int = key(REQUIRED, "width of the vision MLP", minimum=1)
    vision_num_attention_heads: int = key(REQUIRED, "attention heads of the vision encoder", minimum=1)
    vision_patch_size: int = key(16, "side of a patch", unit="pixels", minimum=1)
    vision_temporal_patch_size: int = key(2, "frames in a patch", minimum=1)
    vision_spatial_merge_size: int = key(2, "patches a side merged into one token", minimum=1)
    vision_num_position_embeddings: int = key(2304, "rows of the learned position table, a square number", minimum=1)
    vision_norm_epsilon: float = key(1e-6, "epsilon of the vision LayerNorm", minimum=0)
    vision_rotary_base: float = key(1e4, "theta of the vision rotary embedding", minimum=1)
    # --- token ids
    image_token_id: int = key(248056, "placeholder of one merged image patch", minimum=0)
    video_token_id: int = key(248057, "placeholder of one merged video patch", minimum=0)
    vision_start_token_id: int = key(248053, "token before an image", minimum=0)
    vision_end_token_id: int = key(248054, "token after an image", minimum=0)
    # --- layout
    use_mimo: bool = key(
        True, "give the vision encoder a layout of its own (colocated); false: one layout for both (unified)"
    )
    tensor_model_parallel_size: int = key(1, "tensor parallel ranks of the language model", minimum=1)
    pipeline_model_parallel_size: int = key(1, "pipeline stages of the language model", minimum=1)
    expert_model_parallel_size: int = key(
        1, "ranks that the experts of a layer are dealt to, out of tensor x data parallel ranks", minimum=1
    )
    sequence_parallel: bool = key(
        False, "split activations along the sequence over the language model's tensor parallel ranks"
    )
    vision_tensor_model_parallel_size: int = key(1, "tensor parallel ranks of the vision encoder", minimum=1)
    vision_balance: str = key(
        "world",
        "how far an image may travel from its language replica to even the encoder load",
        choices=("none", "replica", "node", "world"),
    )
    vision_recompute: bool = key(False, "recompute vision activations in the backward pass instead of keeping them")
    # --- batch
    micro_batch_size: int = key(1, "samples of a microbatch on each language replica", unit="samples", minimum=1)
    global_batch_size: int = key(1, "samples of an optimizer step", unit="samples", minimum=1)
    vision_micro_batch_size: int = key(
        1, "samples whose images a vision replica encodes in one forward", unit="samples", minimum=1
    )
    seq_length: int = key(2048, "tokens of a sample, padded", unit="tokens", minimum=1)
    # --- training
    train_iters: int = key(1, "optimizer steps of the run", unit="iterations", minimum=1)
    eval_interval: int | None = key(
        None, "iterations between validations; null validates never", unit="iterations", minimum=1
    )
    eval_iters: int = key(1, "global batches of a validation", minimum=1)
    seed: int = key(1234, "seed of initial weights and of the sample order")
    freeze_vision: bool = key(False, "keep the vision encoder without its merger unchanged")
    freeze_merger: bool = key(False, "keep the vision merger unchanged")
    freeze_language: bool = key(False, "keep the language model unchanged")
    optimizer: OptimizerConfig = section(OptimizerConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig:
    """Text to token ids."""

    type: str = key(
        "builtin",
        "builtin: the demo's character tokenizer; hf: a Hugging Face tokenizer folder",
        choices=("builtin", "hf"),
    )
    path: str | None = key(None, "folder of a Hugging Face tokenizer, for type hf", path=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where samples come from and how they become tensors."""

    train_path: str | None = key(
        None, "training samples: a JSON(L) or Parquet file, or a folder of Parquet or WebDataset files", path=True
    )
    valid_path: str | None = key(None, "held-out samples, likewise; null: no validation", path=True)
    sources: dict[str, Any] = key(
        {}, "training sources in place of train_path, {name: {path, weight}}; weight: a number or [[step, weight], ..]",
        path=True,
    )  # fmt: skip
    media_root: str | None = key(
        None, "folder that relative names of images and videos count from; null: that of the samples' file", path=True
    )
    cache_path: str | None = key(None, "folder of sample indexes; null: .flagscale beside each data file", path=True)
    min_pixels: int = key(65536, "smallest image area after resizing", unit="pixels", minimum=1)
    max_pixels: int = key(16777216, "largest image area after resizing", unit="pixels", minimum=1)
    video_fps: float = key(2.0, "frames taken of a second of video", unit="frames/s", minimum=0.001)
    video_min_frames: int = key(4, "fewest frames taken of a video that has as many", unit="frames", minimum=1)
    video_max_frames: int = key(768, "most frames taken of a video", unit="frames", minimum=1)
    video_max_pixels: int = key(
        134217728, "largest area of all frames of a video together, after resizing", unit="pixels", minimum=1
    )
    packing: str = key(
        "none",
        "none: a padded row a sample; in_batch: a row a microbatch; length_budget: rows filled up to seq_length",
        choices=("none", "in_batch", "length_budget"),
    )
    language_balance: bool = key(
        False, "with packing, deal the samples of a macro batch to the language replicas by cost, not by order"
    )
    on_bad_sample: str = key(
        "raise",
        "raise: end at the first sample that cannot be used; skip: leave them out and list them in bad_samples.jsonl",
        choices=("raise", "skip"),
    )
    on_too_long: str = key(
        "raise",
        "samples over seq_length: raise, skip, or cut text at the end (never images)",
        choices=("raise", "skip", "truncate_text"),
    )
    prefetch: int = key(2, "macro batches kept ready in the background; 0 reads in the training loop", minimum=0)
    workers: int = key(0, "processes a rank that read ahead; 0 reads in a thread of the trainer", minimum=0)
    tokenizer: TokenizerConfig = section(TokenizerConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A whole configuration."""

    experiment: ExperimentConfig = section(ExperimentConfig)
    system: SystemConfig = section(SystemConfig)
    model: ModelConfig = dataclasses.field()
    data: DataConfig = dataclasses.field()
    action: str = key(
        "run", "what run.py does", choices=("run", "dryrun", "test", "stop", "query", "explain", "auto_tune")
    )
