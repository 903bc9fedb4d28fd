"""Options of what is trained on and for how long: batch, data, optimizer, iterations."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.option import option


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
    cross_document_attention: bool = option(
        True,
        "attention crosses the borders of the documents of a sample; 0: each document attends to itself alone "
        "(positions still count from the sample's beginning; a random sample is one document)",
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
