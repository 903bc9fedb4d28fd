"""Every option of the program: name, type, default, bounds and help, once.

The dataclasses below are the only place where an option is described: `arguments.py` makes the flat `--flags` from
them, `docs/flags.md` is generated from them, and the rest of the program receives them as frozen values. `None` means
"derived": `validation.resolve` fills it in. This module imports no torch, so that `--help` answers at once.

Options of Fast-LLM's flat-flag era that this program does not have (yet) stand in `refused.py` with the reason.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from megatron_lite.option import Auto, debug_level, option

DTYPES = ("fp32", "bf16", "fp16")
DTYPE_ALIASES = {
    "float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16",
}  # fmt: skip
ACTIVATIONS = ("gelu", "gelu_exact", "silu", "relu", "squared_relu", "identity")
ACTIVATION_ALIASES = {"gelu_tanh": "gelu", "swiglu": "silu"}
RECOMPUTE_LEVELS = ("none", "activation", "full")


@dataclass(frozen=True)
class ModelConfig:
    """Model"""

    num_layers: int = option(12, "transformer blocks", minimum=1, basic=True)
    hidden_size: int = option(1024, "width of the residual stream", minimum=1, basic=True)
    num_attention_heads: int = option(8, "query heads", minimum=1, basic=True)
    head_groups: int | None = option(
        None,
        "key/value heads (1: multi-query)",
        minimum=1,
        unset="num_attention_heads",
        basic=True,
        aliases=("num_query_groups",),
    )
    kv_channels: int | None = option(None, "channels of one head", minimum=1, unset="hidden_size / num_attention_heads")
    ffn_hidden_size: int | None = option(
        None, "width of the MLP (of each half when gated)", minimum=1, unset="4 * hidden_size", basic=True
    )
    vocab_size: int = option(49152, "entries of the vocabulary", minimum=2, basic=True)
    max_position_embeddings: int | None = option(
        None, "learned positions (and the length an export states)", minimum=1, unset="max(2048, sequence_length)"
    )
    use_position_embeddings: bool | None = option(None, "learned absolute positions", unset="not use_rotary_embeddings")
    use_rotary_embeddings: bool = option(False, "rotary positions (RoPE)", basic=True)
    rotary_embedding_scale: float = option(
        -math.log(10000.0), "minus the logarithm of the rotary base", below=0.0, minimum=-100.0
    )
    tie_word_embeddings: bool = option(True, "one matrix for input embedding and output head", basic=True)
    add_linear_biases: bool = option(True, "biases in the linear layers", basic=True)
    gated: bool = option(False, "gated MLP: activation(gate) * up", basic=True)
    activation_type: str | None = option(
        None,
        "MLP activation; gelu is the tanh form",
        choices=ACTIVATIONS,
        value_aliases=ACTIVATION_ALIASES,
        unset="silu if gated, else gelu",
        basic=True,
    )
    normalization_type: str = option("layer_norm", "normalization", choices=("layer_norm", "rms_norm"), basic=True)
    layer_norm_eps: float = option(
        1e-5, "added to the variance", above=0.0, maximum=1.0, aliases=("norm_epsilon", "layernorm_epsilon")
    )
    window_size: int | None = option(
        None, "sliding attention window in tokens", minimum=1, unset="full causal attention"
    )
    attention_dropout: float = option(0.0, "dropout on attention probabilities", minimum=0.0, below=1.0)
    hidden_dropout: float = option(0.0, "dropout on embeddings and on each residual branch", minimum=0.0, below=1.0)
    init_method_std: float | None = option(
        None, "standard deviation of initial weights", minimum=0.0, unset="hidden_size ** -0.5"
    )
    init_method_std_embed: float | None = option(None, "the same, embeddings", minimum=0.0, unset="init_method_std")
    init_method_std_qkv: float | None = option(
        None, "the same, query, key and value", minimum=0.0, unset="init_method_std"
    )
    init_method_std_attn_proj: float | None = option(
        None, "the same, attention output", minimum=0.0, unset="init_method_std / sqrt(2 * num_layers)"
    )
    init_method_std_mlp_1: float | None = option(
        None, "the same, first MLP layer", minimum=0.0, unset="init_method_std"
    )
    init_method_std_mlp_2: float | None = option(
        None, "the same, second MLP layer", minimum=0.0, unset="init_method_std / sqrt(2 * num_layers)"
    )
    layer_norm_init_range: float = option(
        0.0, "initial norm weights are uniform in 1 +- this", minimum=0.0, maximum=1.0
    )
    random_bias_init: bool = option(False, "biases start like their layer's weights instead of at zero")
    cross_entropy_splits: int | None = option(
        None,
        "cut the loss of a micro-batch into this many chunks",
        minimum=1,
        unset="chunks of 256 tokens (CPU), 1024 (GPU)",
    )
    mlp_recompute_level: str = option(
        "none", "what backward computes again in MLPs to save memory", choices=RECOMPUTE_LEVELS, basic=True
    )

    @property
    def rotary_base(self) -> float:
        """exp(-rotary_embedding_scale), rounded to the nearest integer when within 1e-9 of it."""
        base = math.exp(-self.rotary_embedding_scale)
        return float(round(base)) if abs(base - round(base)) <= 1e-9 * base else base


@dataclass(frozen=True)
class BatchConfig:
    """Batch"""

    batch_size: int | None = option(
        None,
        "samples per iteration, over all ranks",
        minimum=1,
        unset="derived",
        basic=True,
        aliases=("global_batch_size", "train_batch_size"),
    )
    micro_batch_size: int | None = option(
        None, "samples per rank and forward pass", minimum=1, unset="derived", basic=True
    )
    depth_first_micro_batches: int | None = option(
        None,
        "gradient accumulation: forward and backward of one micro-batch after the other",
        minimum=1,
        unset="all of sequential_micro_batches",
    )
    breadth_first_micro_batches: int | None = option(
        None, "gradient accumulation: all micro-batches through one stage after the other", minimum=1, unset="1"
    )
    sequential_micro_batches: int | None = option(
        None, "depth_first_micro_batches * breadth_first_micro_batches", minimum=1, unset="derived"
    )
    sequence_length: int = option(2048, "tokens per sample", minimum=1, basic=True, aliases=("seq_length",))


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer"""

    lr: float = option(1e-4, "peak learning rate", minimum=0.0, basic=True, aliases=("learning_rate",))
    min_lr: float = option(0.0, "learning rate at the end of the decay", minimum=0.0, basic=True)
    lr_warmup_iters: int = option(
        0, "iterations of linear warmup; the first update uses lr / this", minimum=0, basic=True
    )
    lr_decay_style: str = option(
        "constant", "shape of the decay", choices=("constant", "linear", "power", "cosine"), basic=True
    )
    lr_decay_iters: int | None = option(
        None, "iteration at which the decay ends", minimum=1, unset="train_iters", basic=True
    )
    lr_decay_power: float = option(1.0, "exponent on the remaining fraction of the decay", above=0.0)
    weight_decay: float = option(0.01, "decoupled weight decay (norms and biases are exempt)", minimum=0.0, basic=True)
    adam_beta1: float = option(0.9, "decay of the first moment", minimum=0.0, below=1.0, basic=True)
    adam_beta2: float = option(0.999, "decay of the second moment", minimum=0.0, below=1.0, basic=True)
    adam_eps: float = option(1e-8, "added to the root of the second moment", above=0.0)
    clip_grad: float = option(1.0, "largest global gradient norm; 0 turns clipping off", minimum=0.0, basic=True)
    default_lr_scale: float = option(1.0, "factor on every learning rate", minimum=0.0)
    lr_scales: tuple[str, ...] = option(
        (), "pattern:scale of a learning rate, as in embedding:0.1 *.bias:2; the last that fits counts, 0 freezes"
    )
    freeze: tuple[str, ...] = option((), "weights that stay as they are: patterns (blocks.0, *.bias) on their names")
    loss_scale: float | None = option(
        None, "constant loss scale", minimum=2.0**-100, maximum=2.0**100, unset="dynamic for fp16, 1 otherwise"
    )
    initial_loss_scale: float = option(2.0**16, "first dynamic loss scale (fp16)", minimum=2.0**-100, maximum=2.0**100)
    min_loss_scale: float = option(1.0, "smallest dynamic loss scale (fp16)", minimum=2.0**-100, maximum=2.0**100)
    loss_scale_window: int = option(1000, "good updates before the loss scale doubles (fp16)", minimum=1)
    hysteresis: int = option(2, "overflows before the loss scale halves (fp16)", minimum=1)


@dataclass(frozen=True)
class MultiStageConfig:
    """ZeRO and stages"""

    zero_stage: int | Auto | None = option(
        None,
        "1: shard optimizer state; 2: and gradients; 3: and weights; auto: the lowest that fits the device",
        minimum=1,
        maximum=3,
        unset="1",
        basic=True,
    )
    layers_per_stage: float | Auto = option(
        1.0,
        "transformer blocks per stage, the unit of gather and reduce; auto: until a collective is worth its latency",
        minimum=1.0,
        why="a stage is the unit of gather and reduce, and no layer is cut; write 1, and set the number of buffers",
    )
    num_weight_buffers: int | None = option(
        None, "full weight buffers: 1 saves memory, 2 overlap", minimum=1, unset="one per stage; 2 for zero_stage 3"
    )
    num_grad_buffers: int | None = option(
        None, "full gradient buffers, likewise", minimum=1, unset="one per stage; 2 for zero_stage 2 and 3"
    )
    full_precision_gradients: bool = option(True, "accumulate and reduce gradients in fp32")
    store_frozen_weights_in_optimization_precision: bool = option(
        True, "shards of frozen weights are fp32, too; 0: they have the training dtype"
    )
    split_master_weights: bool = option(
        False, "bf16 training: keep only what the bf16 weight lacks of the master (2 bytes less per weight of a shard)"
    )
    stages_per_pipeline_stage: int = option(
        1,
        "stages of one rank of a pipeline",
        minimum=1,
        maximum=1,
        why="there is no pipeline parallelism; leave it out",
    )
    pipeline_delay: float = option(0.0, "steps that data need to go around the pipeline; unused: there is no pipeline")
    throttle_cpu: bool = option(
        True, "GPU: the host waits for earlier steps of the schedule instead of running far ahead"
    )
    throttle_cpu_rate: int = option(1, "record an event, and wait, every this many steps of the schedule", minimum=1)
    throttle_cpu_delay: int = option(1, "wait for the event of this many recordings ago", minimum=0)


@dataclass(frozen=True)
class DistributedConfig:
    """Distributed"""

    device: str = option("auto", "device to run on", choices=("auto", "cuda", "cpu"), basic=True)
    training_dtype: str = option(
        "fp32", "dtype of weights and activations", choices=DTYPES, value_aliases=DTYPE_ALIASES, basic=True
    )
    seed: int = option(1234, "seed of weights, data order and dropout", minimum=0, maximum=2**63 - 1, basic=True)
    deterministic: bool = option(False, "only deterministic GPU algorithms (slower)")
    distributed_timeout: float = option(60.0, "seconds before a step's collective is given up", above=0.0, maximum=1e6)
    startup_timeout: float = option(3600.0, "the same for start-up, data preparation and saves", above=0.0, maximum=1e6)
    dry_run: bool = option(False, "print memory, traffic and batch arithmetic, run nothing", basic=True)
    world_size: int | None = option(
        None, "ranks of a dry run", minimum=1, maximum=2**24, unset="as many as torchrun starts"
    )


@dataclass(frozen=True)
class DataConfig:
    """Data"""

    dataset_source: str = option(
        "list", "list: the files of data_path; random: made-up tokens", choices=("list", "random"), basic=True
    )
    data_path: tuple[str, ...] = option(
        (), "prefixes of .bin/.idx pairs, or weight prefix weight prefix ...", basic=True
    )
    split: tuple[float, ...] = option(
        (969.0, 30.0, 1.0), "documents for training, validation and test, as proportions", minimum=0.0, basic=True
    )
    tokenizer_file: str | None = option(None, "tokenizer.json, copied into exports", unset="none")
    num_workers: int = option(2, "processes per rank that read training data", minimum=0, maximum=1024, basic=True)
    prefetch_factor: int | None = option(None, "batches each worker prepares ahead", minimum=1, unset="2")
    multiprocessing_context: str = option("spawn", "how workers start", choices=("spawn", "fork", "forkserver"))
    data_sample_warn_time_ms: float = option(1000.0, "warn when reading one sample takes longer", above=0.0)
    data_batch_warn_time_ms: float = option(1000.0, "warn when waiting for a batch takes longer", above=0.0)


@dataclass(frozen=True)
class TrainingConfig:
    """Training"""

    train_iters: int = option(0, "iterations of the whole run", minimum=0, basic=True)
    validation_iters: int = option(0, "batches per validation", minimum=0, basic=True, aliases=("eval_iters",))
    validation_interval: int = option(
        1000, "iterations between validations", minimum=1, basic=True, aliases=("eval_interval",)
    )
    test_iters: int = option(0, "batches of the test after training", minimum=0)
    checkpoint_interval: int | None = option(
        None,
        "iterations between checkpoints",
        minimum=1,
        unset="only the last iteration",
        basic=True,
        aliases=("save_interval",),
    )
    checkpoint_offset: int = option(0, "shift of checkpoint_interval", minimum=0)
    max_checkpoints: int | None = option(None, "newest checkpoints kept", minimum=1, unset="all", basic=True)
    export_interval: int | None = option(None, "iterations between exports", minimum=1, unset="no exports", basic=True)
    export_format: str = option(
        "huggingface",
        "what an export is: a model folder, or a resumable checkpoint",
        choices=("huggingface", "distributed"),
    )
    stop_interval: int | None = option(None, "save and stop at multiples of this iteration", minimum=1, unset="no stop")
    stop_offset: int = option(0, "shift of stop_interval", minimum=0)

    @property
    def inference(self) -> bool:
        """Whether nobody needs gradients or optimizer state: nothing is trained, and no export would hold them."""
        resumable_exports = self.export_interval is not None and self.export_format == "distributed"
        return self.train_iters == 0 and not resumable_exports


@dataclass(frozen=True)
class RunConfig:
    """Run and monitoring"""

    experiment_dir: str | None = option(None, "where the run leaves its files", unset="nothing is written", basic=True)
    experiment_name: str | None = option(None, "name of the run", unset="name of experiment_dir")
    log_interval: int = option(100, "iterations between log lines", minimum=1, basic=True)
    log_offset: int = option(1, "first logged iteration (0: multiples of log_interval only)", minimum=0)
    log_timestamps: bool = option(False, "begin log lines with the time")
    enable_all_loggers: bool = option(False, "every rank prints to the console")
    log_communication: bool = option(False, "log what each step sends, by kind, and the time on the wire")
    debug_layer_outputs: int = debug_level("the output of each layer")
    debug_layer_gradients: int = debug_level("the gradient of each layer's input")
    debug_param_init: int = debug_level("each parameter after initialization")
    debug_param_gradients: int = debug_level("each gradient shard after reduction")
    debug_all_param_gradients: int = debug_level("each parameter's gradient after reduction")
    debug_param_update: int = debug_level("each parameter after the update")
    debug_global_tensors: bool = option(True, "put the tensors of all ranks together before they are logged (slow)")
    debug_activation_memory: bool = option(False, "log the memory in use after each layer")
    debug_tensor_parallel: bool = option(False, "compare tensor-parallel copies; there are none to compare")
    save_tensor_logs: bool = option(False, "save logged tensors in runs/<k>/artifacts of experiment_dir")
    show_tensor_logs: bool = option(True, "print logged tensors")
    tensor_logs_show_elements: int = option(8, "samples of a tensor that are printed", minimum=0)
    peak_tflops: float | None = option(
        None, "dense peak of one device for mfu, in TFLOP/s", above=0.0, unset="known for common GPUs"
    )
    wandb_entity_name: str | None = option(None, "Weights & Biases user or team; turns it on", unset="off")
    wandb_project_name: str = option("megatron_lite", "Weights & Biases project")
    wandb_group_name: str = option("default", "Weights & Biases group")
    wandb_status_interval: int | None = option(
        None, "iterations between Weights & Biases alerts with metrics", minimum=1, unset="none"
    )
    wandb_post_alerts: bool | None = option(
        None, "post Weights & Biases alerts when the run starts, ends or fails", unset="on with wandb_status_interval"
    )


@dataclass(frozen=True)
class Config:
    """All options of one run. Each is reached as `config.<area>.<name>`; names are unique over the areas."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    batch: BatchConfig = dataclasses.field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    multi_stage: MultiStageConfig = dataclasses.field(default_factory=MultiStageConfig)
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    run: RunConfig = dataclasses.field(default_factory=RunConfig)


AREAS: dict[str, type] = {
    "model": ModelConfig, "batch": BatchConfig, "optimizer": OptimizerConfig, "multi_stage": MultiStageConfig,
    "distributed": DistributedConfig, "data": DataConfig, "training": TrainingConfig, "run": RunConfig,
}  # fmt: skip


def flatten(config: Config) -> dict[str, Any]:
    """All options as one flat {name: value}, in the order of this file."""
    return {
        field.name: getattr(getattr(config, area), field.name)
        for area, kind in AREAS.items()
        for field in dataclasses.fields(kind)
    }


def unflatten(values: dict[str, Any]) -> Config:
    """The inverse of `flatten`; absent names take their default.

    Raises:
        KeyError: if a name is not an option.
    """
    left = dict(values)
    areas = {
        area: kind(**{field.name: left.pop(field.name) for field in dataclasses.fields(kind) if field.name in left})
        for area, kind in AREAS.items()
    }
    if left:
        raise KeyError(f"not options: {sorted(left)}")
    return Config(**areas)
