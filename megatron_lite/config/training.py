"""Options of batch, data and iterations."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from megatron_lite.config.option import (
    SAVED,
    All,
    Area,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Rule,
    idle_unless,
    option,
    optional,
)
from megatron_lite.config.system import DTYPE_ALIASES, DTYPES

# Hugging Face architectures to import and export.
MODEL_TYPES = tuple(
    """
    llama mistral gpt2 gpt_bigcode starcoder2 qwen2 qwen3
    nemotron stablelm gpt_neox phi3 glm4 olmo2 olmo3 exaone4 seed_oss smollm3 gemma gemma2 gemma3_text granite mixtral
    qwen3_moe olmoe granitemoe gpt_oss glm4_moe cohere2
    """.split()
)

# Options that have no effect unless another one has this value.
file_option = idle_unless("dataset_source!=random")
shuffled_option = idle_unless("dataset_source!=random and shuffle!=none and truncate_documents")
worker_option = idle_unless("dataset_source!=random and num_workers")
fim_option = idle_unless("fim_rate")
export_option = idle_unless("export_interval or keep_best")
interval_option = idle_unless("export_interval")
SAMPLED = Rule("sample_interval", "no samples are written")
TEMPERED = Rule(
    "sample_temperature", "temperature 0 draws nothing at random", when="sample_interval"
)
LISTED = Rule(
    "dataset_source=file",
    "the data sets must be on the command line",
    when="data_path",
    fix="write --dataset_source=list",
)
validation_option = idle_unless("validation_iters")


# Phase -> the option for its batches, in the order of --split.
ITERATIONS = MappingProxyType(
    {"training": "train_iters", "validation": "validation_iters", "test": "test_iters"}
)
NO_MASK = "none"  # in --loss_mask: every token of that data set counts
# Option -> the name of its data sets in the banner.
PATH_FLAGS = MappingProxyType(
    {"data_path": "data", "valid_data_path": "valid", "test_data_path": "test"}
)
# phase -> its own data
OWN_DATA = MappingProxyType({"validation": "valid_data_path", "test": "test_data_path"})


@dataclass
class BatchConfig(Area):
    """Batch"""

    batch_size: PositiveInt = optional(
        "samples per iteration, over all ranks",
        "derived",
        basic=True,
        aliases="global_batch_size train_batch_size",
    )
    micro_batch_size: PositiveInt = optional(
        "samples per rank in one forward pass",
        "derived",
        basic=True,
        aliases="per_device_train_batch_size",
    )
    depth_first_micro_batches: PositiveInt = optional(
        "depth-first micro-batches: forward and backward of one before the next",
        "sequential_micro_batches",
    )
    breadth_first_micro_batches: PositiveInt = optional(
        "breadth-first micro-batches: all of them pass one stage before the next", "1"
    )
    sequential_micro_batches: PositiveInt = optional(
        "depth-first * breadth-first micro-batches", "derived"
    )
    batch_size_schedule: tuple[str, ...] = option(
        (),
        'batch sizes by iteration, instead of batch_size: "0:32 1000:64" is 32 samples in each of the first 1000 '
        "iterations, then 64; sets batch_size to the largest",
    )
    allow_nondivisible_batch_size: bool = option(
        False, "pad a batch that does not divide evenly into micro-batches; padding never counts"
    )
    eval_micro_batch_size: PositiveInt | None = optional(
        "micro_batch_size for validation and test",
        "micro_batch_size",
        idle_unless="validation_iters or test_iters",
    )
    sequence_length: PositiveInt = option(
        2048, "tokens per sample", basic=True, aliases="seq_length seq_len"
    )


@dataclass
class DataConfig(Area):
    """Data"""

    dataset_source: str = option(
        "list",
        "list: read the files of data_path; file: read those of a JSON list made by scripts/concatenate_dataset.py; "
        "random: draw random tokens",
        choices=("list", "file", "random"),
        basic=True,
    )
    data_path: tuple[str, ...] = file_option(
        (),
        ".bin/.idx prefixes, or text to prepare once (folders, .jsonl, parquet, patterns), each optionally after a "
        "weight",
        basic=True,
        aliases="train_data_path",
    )
    valid_data_path: tuple[str, ...] = option(
        (),
        "separate validation data, written like data_path, which is then used for training only unless split is given; "
        "each of several sets also has a loss of its own",
        idle_unless="dataset_source!=random and validation_iters",
    )
    test_data_path: tuple[str, ...] = option(
        (),
        "separate test data, written like valid_data_path",
        idle_unless="dataset_source!=random and test_iters",
    )
    dataset_cache: str = file_option(
        "",
        "folder for tokens of text and copies of remote files, shared by runs (default: experiment_dir/dataset_cache)",
        may_differ=True,
    )
    split: tuple[NonNegativeFloat, ...] = file_option(
        (969.0, 30.0, 1.0), "proportions of documents for training, validation and test", basic=True
    )
    data_weights_schedule: tuple[str, ...] = file_option(
        (),
        'training weights of data_path by iteration: "1000:0.5/0.5 2000:0/1" is half of each of two data sets after '
        "1000 iterations, and only the second after 2000; validation keeps the initial weights",
        excludes=(LISTED,),
    )
    skip_samples: tuple[str, ...] = file_option(
        (),
        'leave these samples of the training order out, as in "51200-76799 90000-90999": numbers as in bad_step.json, '
        "from 0; a run keeps them in its checkpoints; to leave out what it has already read, also go back with "
        "resume_iteration",
    )
    shuffle: str = file_option(
        "epoch",
        "order of training samples. epoch: reshuffle every epoch; full: shuffle max_epochs epochs together; "
        "skip_first_epoch: as epoch, but the first one in file order; none: file order",
        choices=("epoch", "full", "skip_first_epoch", "none"),
        value_aliases={"disabled": "none"},
        needs=(
            Rule("max_epochs", "its order depends on the number of epochs", when="shuffle=full"),
        ),
    )
    shuffle_era: PositiveInt | None = optional(
        "shuffle training samples within windows of N samples only, so that reads stay in one part of a file",
        "all samples of an epoch",
        idle_unless="dataset_source!=random and shuffle=epoch|skip_first_epoch",
    )
    shuffle_documents: bool = shuffled_option(
        False,
        "also reshuffle documents every epoch, before training samples are cut; takes 2.5 s for 10 million documents",
    )
    max_epochs: PositiveInt | None = optional(
        "refuse to train on any data set for more than N epochs",
        "no limit",
        idle_unless="dataset_source!=random",
    )
    cross_document_attention: bool = file_option(
        True,
        "let attention cross document boundaries within a sample; 0: each document attends only to itself (positions "
        "still count from the start of the sample; a random sample is one document)",
    )
    truncate_documents: bool = file_option(
        True,
        "cut documents where samples end; 0: fill samples with whole documents, and pad the rest without loss; "
        "documents longer than sequence_length + 1 are left out",
        needs=(
            Rule(
                "fim_truncate_or_pad",
                "rearranged documents would be longer than their place in a sample",
                when="fim_rate and dataset_source!=random",
            ),
        ),
    )
    reset_position_ids: bool = file_option(
        False, "count positions from the start of each document, not of the sample"
    )
    mask_document_starts: bool = file_option(
        False,
        "leave the first token of each document out of the loss, as only another document precedes it",
        aliases="eod_mask_loss",
    )
    loss_mask: tuple[str, ...] = file_option(
        (),
        "prefixes of .bin/.idx pairs, one per data set in the order of data_path, valid_data_path and test_data_path, "
        "with 1 for tokens that count in the loss and 0 for others; none in place of a prefix, or alone: every "
        "token of that data set, or of all, counts (default: the masks that prepare_data wrote beside the data)",
        words=("none",),
        excludes=(LISTED,),
    )
    fim_rate: Fraction = file_option(
        0.0,
        "share of documents to rearrange for fill-in-the-middle: prefix, suffix, then the middle, each after its token "
        "in tokenizer_file",
    )
    fim_max_middle_len: PositiveInt | None = optional(
        "longest middle in characters; its length is then drawn uniformly",
        "no limit",
        idle_unless="fim_rate",
    )
    fim_spm_rate: Fraction = fim_option(
        0.5, "share of rearranged documents with the suffix before the prefix"
    )
    fim_split_sample: str | None = optional(
        "token that separates the files of a document: in a document that fim_rate selects, fim_fragment_rate of the "
        "files are rearranged, each separately",
        "documents are rearranged as a whole",
        idle_unless="fim_rate",
    )
    fim_fragment_rate: Fraction = option(
        0.0,
        "share of files to rearrange in a selected document",
        idle_unless="fim_rate and fim_split_sample",
    )
    fim_ignore_prefix: str | None = optional(
        "do not rearrange documents that begin with this text",
        "none",
        idle_unless="fim_rate",
        aliases="fim_no_prefix",
    )
    fim_truncate_or_pad: bool = fim_option(
        False, "keep the length of each rearranged document: cut its suffix, or pad it"
    )
    tokenizer_file: str | None = optional(
        "tokenizer.json, or byte, for text in data_path, samples and fill-in-the-middle; exports get a copy",
        "that of prepared data",
        words=("none",),
        idle_unless="dataset_source!=random or export_interval or sample_interval or keep_best",
        basic=True,
    )
    tokenizer_library: str = file_option(
        "auto",
        "what tokenizes text in data_path (auto: fastokens where its ids are proved to be those of tokenizers)",
        choices=("auto", "tokenizers", "fastokens"),
    )
    num_workers: int = file_option(
        2, "processes per rank that read data", minimum=0, maximum=1024, basic=True, may_differ=True
    )
    prefetch_factor: PositiveInt | None = worker_option(
        None, "batches each worker prepares ahead", unset="2", may_differ=True
    )
    multiprocessing_context: str = worker_option(
        "spawn",
        "start method of the workers",
        choices=("spawn", "fork", "forkserver"),
        may_differ=True,
    )

    def path_flag(self, phase: str) -> str:
        """Return the option that names a phase's data: its own if set, else data_path."""
        own = OWN_DATA.get(phase, "data_path")
        return own if getattr(self, own) else "data_path"

    @property
    def needs_borders(self) -> bool:
        """Whether the run needs to know where documents begin."""
        within = (
            self.reset_position_ids
            or self.mask_document_starts
            or not self.cross_document_attention
        )
        return within or self.fim_rate > 0


@dataclass
class TrainingConfig(Area):
    """Training"""

    train_iters: NonNegativeInt = option(
        0, "iterations of the whole run, including restarts", basic=True, aliases="num_train_steps"
    )
    train_tokens: PositiveInt | None = optional(
        "tokens of the whole run, instead of train_iters, which becomes the fewest iterations that read them",
        "no goal",
    )
    epochs: PositiveFloat | None = optional(
        "epochs of the whole run, each of which reads every token of data_path once, instead of train_iters",
        "no goal",
        needs=(
            Rule(
                "dataset_source=list",
                "lists of data sets have weights, and random tokens never end",
            ),
            Rule("dry_run=0", "a dry run reads no data", fix="write --train_tokens"),
        ),
    )
    logit_z_loss: NonNegativeFloat = option(
        0.0, "weight of the z-loss, mean(logsumexp(logits)^2), in the loss", aliases="z_loss_weight"
    )
    loss_reduction: str = option(
        "token",
        "token: mean over all tokens of a batch; micro_mean: mean of its micro-batches' means (differs only with "
        "padding)",
        choices=("token", "micro_mean"),
    )
    validation_iters: NonNegativeInt | All = option(
        0,
        "batches of batch_size samples in each validation; all: every validation sample once",
        basic=True,
        aliases="eval_iters",
        excludes=(
            Rule(
                "dataset_source=random",
                "random samples never end",
                when="validation_iters=all",
                fix="write a number of batches",
            ),
        ),
    )
    validation_at_start: bool = option(
        False,
        "also validate before iteration 1",
        aliases="eval_at_start",
        idle_unless="validation_iters and train_iters",
    )
    validation_interval: PositiveInt = validation_option(
        1000, "iterations between validations", basic=True, aliases="eval_interval steps_per_eval"
    )
    validation_by_dataset: bool = validation_option(
        False,
        "also validate on each data set of data_path separately, with validation_iters batches each",
    )
    test_iters: NonNegativeInt = option(0, "batches in the test after training")
    export_interval: PositiveInt | None = optional(
        "iterations between exports", "no exports", basic=True, needs=SAVED
    )
    export_format: str = export_option(
        "huggingface",
        "a model folder, or a resumable checkpoint (distributed)",
        choices=("huggingface", "distributed"),
    )
    export_weights: str = interval_option(
        "raw",
        "weights of a Hugging Face export: as trained (raw) or averaged; export/best has those that keep_best measures",
        choices=("raw", "average"),
        needs=(Rule("ema_type=ema|ema_decay_sqrt", "no average is kept"),),
        excludes=(
            Rule(
                "export_format=distributed",
                "a resumable checkpoint always holds weights and averages",
            ),
        ),
    )
    export_model_type: str | None = optional(
        "architecture of a Hugging Face export",
        "that of the pretrained folder, else the simplest that can express the model",
        choices=MODEL_TYPES,
    )
    export_dtype: str = export_option(
        None,
        "dtype of exported weights",
        choices=tuple(DTYPES),
        value_aliases=DTYPE_ALIASES,
        unset="training_dtype",
    )
    export_shard_size: str = option(
        "5GB",
        "largest file of a Hugging Face export: 5GB, 500MB, 2GiB, or a number of bytes",
        idle_unless="export_interval or keep_best and export_format=huggingface",
    )
    export_callback_script: str = interval_option(
        "", "program to run after each export, with its folder as argument"
    )
    export_callback_env: str = option(
        "",
        "environment variables for the callback, a JSON object of strings; only their names are recorded",
        secret=True,
        idle_unless="export_callback_script",
    )
    sample_interval: PositiveInt | None = optional(
        "iterations between samples of the model's text; costs a pass through all stages for each prompt, and one for "
        "each further token of 8 samples together",
        "no samples",
        needs=(
            Rule("sample_prompt or sample_prompts", "samples follow prompts"),
            Rule("tokenizer_file", "samples are text", when="dataset_source=random"),
        ),
    )
    sample_prompt: str | None = optional("prompt of samples, as text", "none", needs=(SAMPLED,))
    sample_prompts: str | None = optional(
        "text file with the prompts of samples, one per line", "none", needs=(SAMPLED,)
    )
    sample_tokens: int = option(
        64, "tokens after a prompt", minimum=1, maximum=65536, idle_unless="sample_interval"
    )
    sample_temperature: NonNegativeFloat = option(
        0.0, "temperature of samples; 0: always take the most probable token", needs=(SAMPLED,)
    )
    sample_top_k: PositiveInt | None = optional(
        "draw samples from the N most probable tokens",
        "all",
        needs=(SAMPLED, TEMPERED._replace(when="sample_interval and sample_top_k!=1")),
    )
    sample_top_p: PositiveFraction = option(
        1.0,
        "draw samples from the fewest tokens whose probabilities add up to this",
        needs=(SAMPLED, TEMPERED),
    )
    stop_interval: PositiveInt | None = optional(
        "save and stop every N iterations", "no stop", aliases="exit_interval", needs=SAVED
    )
    early_stopping_patience: PositiveInt | None = optional(
        "save and end the run (exit 0) after this many validations in a row that do not improve on keep_best",
        "no early end",
        needs=(
            Rule("keep_best", "it says what to improve", fix="write --keep_best=validation_loss"),
        ),
    )
    max_minutes: PositiveFloat | None = optional(
        "save and stop this many minutes after the start",
        "no limit",
        aliases="exit_duration_in_mins",
        needs=SAVED,
    )
    stop_before_end_s: PositiveFloat | None = optional(
        "save and stop this many seconds before the end of the Slurm job (SLURM_JOB_END_TIME, or squeue)",
        "no stop",
        needs=SAVED,
    )
    stop_file: str | None = optional(
        "save and stop, as after SIGTERM, once a file with this name is there, and remove it; the file "
        "<experiment_dir>/save only saves",
        "<experiment_dir>/stop",
        needs=SAVED,
    )

    @property
    def inference(self) -> bool:
        """Whether the run needs neither gradients nor optimizer state: no training, and no export
        with them."""
        resumable_exports = self.export_interval is not None and self.export_format == "distributed"
        return self.train_iters == 0 and not resumable_exports
