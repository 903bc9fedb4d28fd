"""Options of what is trained on and for how long: batch, data, iterations."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.option import All, Area, option
from megatron_lite.config.system import DTYPE_ALIASES, DTYPES

# The architectures of Hugging Face that models come from and go out as.
MODEL_TYPES = ("llama", "mistral", "gpt2", "gpt_bigcode", "starcoder2", "qwen2", "qwen3")


@dataclass
class BatchConfig(Area):
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
    batch_size_schedule: tuple[str, ...] = option(
        (),
        'in place of batch_size, iteration:size: "0:32 1000:64" is 32 samples in each of the first 1000 iterations, '
        "then 64; batch_size becomes the largest",
    )
    allow_nondivisible_batch_size: bool = option(
        False, "fill a batch that does not divide into micro-batches up with padding, which does not count in any way"
    )
    eval_micro_batch_size: int | None = option(
        None,
        "samples per rank and forward pass of a validation or test",
        minimum=1,
        unset="micro_batch_size",
        idle_unless="validation_iters or test_iters",
    )
    sequence_length: int = option(2048, "tokens per sample", minimum=1, basic=True, aliases=("seq_length",))


@dataclass
class DataConfig(Area):
    """Data"""

    dataset_source: str = option(
        "list", "list: the files of data_path; random: made-up tokens", choices=("list", "random"), basic=True
    )
    data_path: tuple[str, ...] = option(
        (),
        "prefixes of .bin/.idx pairs, or weight prefix weight prefix ...",
        basic=True,
        idle_unless="dataset_source!=random",
    )
    split: tuple[float, ...] = option(
        (969.0, 30.0, 1.0),
        "documents for training, validation and test, as proportions",
        minimum=0.0,
        basic=True,
        idle_unless="dataset_source!=random",
    )
    cross_document_attention: bool = option(
        True,
        "attention crosses the borders of the documents of a sample; 0: each document attends to itself alone "
        "(positions still count from the sample's beginning; a random sample is one document)",
    )
    tokenizer_file: str | None = option(
        None, "tokenizer.json, copied into exports", unset="none", idle_unless="export_interval or sample_interval"
    )
    num_workers: int = option(
        2,
        "processes per rank that read training data",
        minimum=0,
        maximum=1024,
        basic=True,
        idle_unless="dataset_source!=random",
    )
    prefetch_factor: int | None = option(
        None, "batches each worker prepares ahead", minimum=1, unset="2", idle_unless="num_workers"
    )
    multiprocessing_context: str = option(
        "spawn",
        "how workers start",
        choices=("spawn", "fork", "forkserver"),
        idle_unless="dataset_source!=random and num_workers",
    )
    data_sample_warn_time_ms: float = option(
        1000.0, "warn when reading one sample takes longer", above=0.0, idle_unless="dataset_source!=random"
    )
    data_batch_warn_time_ms: float = option(1000.0, "warn when waiting for a batch takes longer", above=0.0)


@dataclass
class TrainingConfig(Area):
    """Training"""

    train_iters: int = option(0, "iterations of the whole run", minimum=0, basic=True)
    logit_z_loss: float = option(
        0.0, "weight of the z-loss, mean(logsumexp(logits)^2), in the training loss", minimum=0.0
    )
    loss_reduction: str = option(
        "token",
        "mean over all tokens of a batch, or over the means of its micro-batches (the same but for padding)",
        choices=("token", "micro_mean"),
    )
    validation_iters: int | All = option(
        0,
        "batches of batch_size samples per validation; all: every sample of the validation data once",
        minimum=0,
        basic=True,
        aliases=("eval_iters",),
    )
    validation_at_start: bool = option(
        False, "validate before the first iteration as well", aliases=("eval_at_start",), idle_unless="validation_iters"
    )
    validation_interval: int = option(
        1000,
        "iterations between validations",
        minimum=1,
        basic=True,
        aliases=("eval_interval",),
        idle_unless="validation_iters",
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
    checkpoint_offset: int = option(0, "shift of checkpoint_interval", minimum=0, idle_unless="checkpoint_interval")
    max_checkpoints: int | None = option(
        None, "newest checkpoints kept", minimum=1, unset="all", basic=True, idle_unless="experiment_dir"
    )
    export_interval: int | None = option(None, "iterations between exports", minimum=1, unset="no exports", basic=True)
    export_format: str = option(
        "huggingface",
        "what an export is: a model folder, or a resumable checkpoint",
        choices=("huggingface", "distributed"),
        idle_unless="export_interval",
    )
    export_weights: str = option(
        "raw",
        "weights of a Hugging Face export: as trained, or their running average",
        choices=("raw", "average"),
        idle_unless="export_interval",
    )
    export_model_type: str | None = option(
        None,
        "architecture of a Hugging Face export",
        choices=MODEL_TYPES,
        unset="that of the pretrained folder, else the simplest that can express the model",
    )
    export_dtype: str | None = option(
        None,
        "dtype of the weights of a Hugging Face export",
        choices=tuple(DTYPES),
        value_aliases=DTYPE_ALIASES,
        unset="training_dtype",
        idle_unless="export_interval",
    )
    export_shard_size: str = option(
        "5GB",
        "largest file of a Hugging Face export, as 5GB, 500MB, 2GiB or bytes",
        idle_unless="export_interval and export_format=huggingface",
    )
    export_callback_script: str = option(
        "", "program that is run with every export's folder as its argument", idle_unless="export_interval"
    )
    export_callback_env: str = option(
        "",
        "environment variables for it, a JSON object of texts; only their names are kept",
        secret=True,
        idle_unless="export_callback_script",
    )
    sample_interval: int | None = option(
        None,
        "iterations between samples, texts that the model writes: a pass through all stages for each prompt, and one "
        "for each further token of 8 texts",
        minimum=1,
        unset="no samples",
    )
    sample_prompts: str | None = option(None, "text file with the prompts of samples, one a line", unset="none")
    sample_tokens: int = option(
        64, "tokens of a sample behind its prompt", minimum=1, maximum=65536, idle_unless="sample_interval"
    )
    sample_temperature: float = option(0.0, "temperature of samples; 0: the most probable token", minimum=0.0)
    sample_top_k: int | None = option(None, "samples draw from this many tokens", minimum=1, unset="all")
    sample_top_p: float = option(
        1.0, "samples draw from the fewest tokens whose probabilities add up to this", above=0.0, maximum=1.0
    )
    stop_interval: int | None = option(None, "save and stop at multiples of this iteration", minimum=1, unset="no stop")
    stop_offset: int = option(0, "shift of stop_interval", minimum=0, idle_unless="stop_interval")

    @property
    def inference(self) -> bool:
        """Whether nobody needs gradients or optimizer state: nothing is trained, and no export would hold them."""
        resumable_exports = self.export_interval is not None and self.export_format == "distributed"
        return self.train_iters == 0 and not resumable_exports
