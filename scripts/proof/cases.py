"""Layouts, options and cases of both, all written as flags of the program."""

from __future__ import annotations

import contextlib
import functools
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron_lite.cli.parse import parse
from megatron_lite.config import Config, Draft, flatten, unflatten
from megatron_lite.config.dimensions import DIMENSIONS, ranks_per_sample
from megatron_lite.config.system import PIPELINE_SCHEDULES
from megatron_lite.config.values import FLAGS
from megatron_lite.errors import UsageError
from megatron_lite.kernels.choice import REFERENCES
from megatron_lite.model.gpt import model_layers
from megatron_lite.validation import resolve
from megatron_lite.validation.rules import holds
from megatron_lite.validation.sizes import check_passes
from scripts.proof.ranks import MASK, RUN, TOKENS, Part

Flags = Mapping[str, str]  # option -> value as typed
STEPS, SWITCH = 4, 2  # iterations of a run, and those before it goes on in another layout


class Dimension(NamedTuple):
    """A way in which layouts differ: how a table shows it, and values of its option, the first as
    on one rank."""

    label: str
    values: tuple[str, ...]
    keeps_bits: bool = (
        False  # whether docs/parallelism.md promises the same bits at each value on the same ranks
    )


# Options without effect unless a dimension of the grid has several ranks.
OF_DIMENSIONS: Mapping[str, Dimension] = MappingProxyType(
    {
        "pipeline_schedule": Dimension("{}", ("auto", *PIPELINE_SCHEDULES), True),
        "pipeline_placement": Dimension("{}", ("auto", "loop", "v"), True),
        "pipeline_first": Dimension("pipeline first", ("0", "1"), True),
        "sequence_tensor_parallel": Dimension("split tokens", ("0", "1")),
        "parallel_embeddings": Dimension("whole embeddings", ("1", "0")),
        "overlap_tensor_reduce": Dimension("halves", ("0", "1")),
    }
)


def _grid() -> Iterator[tuple[str, Dimension]]:
    """Yield the options of the grid's dimensions, each with the options that need it."""
    for row in DIMENSIONS:
        if row.option:
            values = tuple(map(str, (row.unset, *row.proved)))
            yield row.option, Dimension(f"{row.letter}={{}}", values, row.keeps_bits)
            for name, dimension in OF_DIMENSIONS.items():
                if FLAGS[name].idle_unless == f"{row.option}!={row.unset}":
                    yield name, dimension


# All that a layout is, beside its number of ranks.
LAYOUT: Mapping[str, Dimension] = MappingProxyType(
    {
        **dict(_grid()),
        "depth_first_micro_batches": Dimension("depth={}", ("1", "2", "3")),
        "breadth_first_micro_batches": Dimension("breadth={}", ("1", "2", "3")),
        "layers_per_stage": Dimension("stages of {}", ("1", "1.5", "2", "3")),
        "zero_stage": Dimension("ZeRO-{}", ("1", "2", "3"), True),
        "num_weight_buffers": Dimension("W={}", ("none", "1", "2", "3"), True),
        "num_grad_buffers": Dimension("G={}", ("none", "1", "2", "3"), True),
        "recompute_layers": Dimension("R={}", ("0", "1", "2"), True),
        "mlp_recompute_level": Dimension(
            "MLP={}", ("none", "activation", "full", "activation,full:1"), True
        ),
    }
)
MICRO_BATCHES = ("depth_first_micro_batches", "breadth_first_micro_batches")
OTHERS = ("freeze",)  # options that a restart may leave out
EIGHT_BIT_OPTIONS = {"fp8", "int8"}
# change the sums of gradients that accumulate depth-first
REDUCES = ("zero_stage", "num_grad_buffers")


def flags_of(text: str) -> Flags:
    """Return the flags of a text of `--name=value` words."""
    pairs = (word.removeprefix("--").partition("=") for word in shlex.split(text))
    return {name.replace("-", "_"): value for name, _, value in pairs}


def text_of(flags: Flags) -> str:
    """Return flags as a text of words."""
    return " ".join(f"--{name}={value}" for name, value in flags.items())


SIZES = flags_of(
    "--num_layers=4 --hidden_size=48 --num_attention_heads=12 --ffn_hidden_size=96 --vocab_size=61 "
    "--sequence_length=24 --batch_size=12"
)
# A larger epsilon, as Adam would divide small gradients, and their rounding, by themselves.
FIXED = flags_of(
    f"--data_path={TOKENS} --split=3,1,0 --validation_iters=0 --num_workers=0 --train_iters={STEPS} --log_interval=1 "
    "--adam_eps=1e-4 --lr=1e-3 --lr_decay_style=linear --lr_decay_iters=8 --distributed_timeout=60 "
    "--startup_timeout=60 --save_retries=0"
)
LLAMA = "--use_rotary_embeddings=1 --gated=1 --normalization_type=rms_norm --add_linear_biases=0"
EXPERTS = "--num_experts=8 --num_experts_per_token=2 --moe_ffn_hidden_size=24"
# Of normally distributed values, 6 in 100,000 are beyond it, and hardly one is so near that rounding
# moves it across.
LEAST_LIMIT = 4.0
# Each on or off.
SINGLE = (
    "truncate_documents=0",
    "mask_document_starts=1",
    "shuffle_documents=1",
    "window_size=5",
    "logit_soft_cap=1",
    "logit_z_loss=0.01",
    "hybrid_norm=1",
    "input_embedding_norm=1",
    "use_layer_norm_weight=0",
    "zero_centered_normalization=1",
    "rotary_percent=0.5",
    "scale_attn_by_inverse_layer_idx=1",
    "add_qkv_biases=1",
    "activation_type=squared_relu",
    "embedding_scale=5",
    "residual_scale=0.3",
    "attention_scale=0.7",
    "attention_soft_cap=0.5",
    "logit_scale=1.7",
    "skip_bad_steps=1",
    "lr=1e-2",
    "full_precision_residual=1",
    "full_precision_gradients=0",
    "split_master_weights=1",
    "store_frozen_weights_in_optimization_precision=0",
    "attention_softmax_in_fp32=1",
    "async_checkpoint=1",
    "attention_sinks=1",
    "gated=1",
    f"activation_limit={LEAST_LIMIT:g}",
)
# All that runs may have beside a layout; of each line a run has one, the first with less than the
# others.
OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "family": (
            "--random_bias_init=1",
            "--random_bias_init=1 --use_rotary_embeddings=1 --head_groups=2",
            f"{LLAMA} --head_groups=4 --tie_word_embeddings=0",
            f"{LLAMA} --head_groups=1 --tie_word_embeddings=0",
            # Norms of queries and keys over 12 channels: over 4 they may divide by almost nothing,
            # and so any rounding.
            f"{LLAMA} --head_groups=2 --qk_layernorm=1 --num_attention_heads=4",
            # As OLMo 2, and as models with windows and rotary positions in some blocks.
            f"{LLAMA} --head_groups=2 --qk_layernorm=1 --qk_norm_scope=all --norm_placement=post",
            f"{LLAMA} --head_groups=2 --window_size=7 --attention_pattern=window,full "
            "--rotary_pattern=rotary,rotary,nope --window_rotary_base=100",
            # As Cohere 2 and Phi-3: the sequences below are on both sides of the original length.
            "--use_rotary_embeddings=1 --gated=1 --add_linear_biases=0 --use_layer_norm_bias=0 --head_groups=2 "
            "--parallel_branches=one_norm --window_size=7 --attention_pattern=window,full --rotary_pattern=rotary,nope",
            f"{LLAMA} --head_groups=4 --tie_word_embeddings=0 --kv_channels=6 --rope_type=longrope "
            "--rope_short_factor=1,1.1,1.3 --rope_long_factor=1.5,2,4 --rope_original_max_position_embeddings=30 "
            "--max_position_embeddings=60",
        ),
        "dtype": ("--training_dtype=fp32", "--training_dtype=bf16", "--training_dtype=fp16"),
        "experts": (
            "",
            f"{EXPERTS} --num_shared_experts=1",
            f"{EXPERTS} --moe_layer_frequency=2 --expert_auxiliary_loss_coefficient=0.1",
            f"{EXPERTS} --expert_auxiliary_loss_coefficient=0.1 --moe_balance=sequence",
            f"{EXPERTS} --moe_router_score=sigmoid --moe_router_groups=2 --moe_first_dense_layers=1 "
            "--expert_z_loss_coefficient=0.01 --moe_router_bias=1",
        ),
        "eight bits": (
            "",
            "--fp8=tensorwise",
            "--fp8=rowwise",
            "--fp8=delayed",
            "--int8=1",
            "--fp8=delayed --amax_history_length=1",
            "--fp8=delayed --amax_history_length=2",
        ),
        "optimizer": ("", "--optimizer=muon", "--optimizer=lion", "--optimizer=sgd"),
        "frozen": (
            "",
            "--freeze=embedding",
            "--freeze=*.output.*",
            "--freeze=*.down.*",
            "--freeze=blocks.0,blocks.1",
            "--freeze=blocks.0.mlp,blocks.1.attention",
        ),
        "adapters": (
            "",
            "--lora_rank=2",
            "--lora_rank=3 --lora_targets=query,value,down --lora_scaling=sqrt_rank",
            "--lora_rank=4 --lora_alpha=8 --lora_targets=blocks.1,key,attention.output",
            "--lora_rank=1 --lora_targets=up,query_key_value",
            "--lora_rank=2 --lora_targets=attention",
        ),
        "rates": ("", "--lr_scales=blocks:0.25,*.down.*:0.5", "--lr_scales=blocks.0:0,blocks.1:2"),
        "average": (
            "",
            "--ema_type=ema --ema_beta=0.5",
            "--ema_type=ema_decay_sqrt --ema_beta=0.5 --ema_switch_iter=2 --ema_decay_iters=3",
        ),
        "evaluation": ("", "--validation_iters=1 --validation_interval=1"),
        "heads": (
            "",
            "--num_attention_heads=4",
            "--num_attention_heads=6",
            "--num_attention_heads=8",
        ),
        "head size": ("", "--kv_channels=6"),
        "layers": ("", "--num_layers=2", "--num_layers=3", "--num_layers=5"),
        "vocabulary": ("", "--vocab_size=64", "--make_vocab_size_divisible_by=8"),
        "sequence": ("", "--sequence_length=36"),
        "batch": (
            "",
            "--batch_size=24",
            "--batch_size_schedule=0:12,1:24",
            "--batch_size=10 --allow_nondivisible_batch_size=1",
        ),
        "loss": ("", f"--loss_mask={MASK}", f"--loss_mask={MASK} --loss_reduction=micro_mean"),
        "tied": ("", "--tie_word_embeddings=1"),
        "clipping": (
            "",
            "--clip_grad=0",
            "--clip_grad=0.1",
            "--clip_grad_style=levanter",
            "--update_rms_clip=0.5",
            "--clip_update_norm_sigma=1 --clip_update_norm_window=2",
        ),
        "moments": ("", "--adam_nesterov=1", "--adamc_weight_decay=1"),
        "branches": ("", "--parallel_branches=one_norm", "--parallel_branches=two_norms"),
        "loss in parts": ("", "--cross_entropy_splits=3", "--cross_entropy_block_size=7"),
        "documents": ("", "--cross_document_attention=0", "--reset_position_ids=1"),
        **{flag: ("", f"--{flag}") for flag in SINGLE},
    }
)


def ranks_that_keep_bits(flags: Flags) -> int:
    """Return the ranks of a layout along the dimensions that change no bit."""
    return math.prod(int(flags.get(row.option, 1)) for row in DIMENSIONS if row.keeps_bits)


class Layout(NamedTuple):
    """A number of ranks, and flags that are not as on one rank; a Case has its options among
    them."""

    ranks: int
    flags: Flags

    def kept(self, names: Sequence[str]) -> Flags:
        """Return the flags with these names."""
        return {name: value for name, value in self.flags.items() if name in names}

    def exact(self, depth_first: bool = False) -> Layout:
        """Return the layout without what keeps its bits. depth_first: whether gradients
        accumulate."""
        free = {name for name, dimension in LAYOUT.items() if dimension.keeps_bits}
        free -= {*REDUCES} if depth_first else set()
        ranks = self.ranks // ranks_that_keep_bits(self.flags)
        return Layout(ranks, self.kept([name for name in LAYOUT if name not in free]))

    def __str__(self) -> str:
        labels = [LAYOUT[name].label.format(value) for name, value in self.kept([*LAYOUT]).items()]
        labels += ["thawed"] * ("freeze" in self.flags)
        return " ".join([f"{self.ranks} rank{'s' * (self.ranks > 1)}", *labels])


class Case(NamedTuple):
    """A run. then: the layout that goes on from a checkpoint, if any."""

    options: Flags
    layout: Layout
    then: Layout | None = None

    @property
    def _averages(self) -> bool:
        """Whether the loss depends on the micro-batches."""
        return self.options.get("loss_reduction") == "micro_mean"

    @property
    def in_8_bits(self) -> bool:
        """Whether factors of products are rounded."""
        return bool(EIGHT_BIT_OPTIONS & {*self.options})

    @property
    def dtype(self) -> str:
        """The training dtype."""
        return self.options.get("training_dtype", "fp32")

    @property
    def is_measured(self) -> bool:
        """Whether limits are measured by disturbed runs."""
        return self.in_8_bits or ("num_experts" in self.options and self.dtype != "fp32")

    def parts(self, fixed: Flags) -> list[Part]:
        """Return the parts of the run; raise UsageError if the program refuses it. fixed: flags of
        all runs."""
        if (
            self._averages
            and "allow_nondivisible_batch_size" in self.options
            and self.layout.kept(MICRO_BATCHES)
        ):
            raise UsageError(
                "the samples of a micro-batch depend on the ranks, and so do means of micro-batches"
            )
        if {"num_experts", "activation_limit"} <= {*self.options} and self.dtype != "fp32":
            raise UsageError(
                "an expert's gradient sums few tokens, and rounding to 16 bits moves some across the limit"
            )
        parts = self._parts(fixed)
        if 0 < (limit := parts[0].config.model.activation_limit) < LEAST_LIMIT:
            raise UsageError(
                f"--activation_limit={limit:g}: rounding moves values across it, and their gradients begin or end there; "
                f"write {LEAST_LIMIT:g} or more, which few values come near"
            )
        if "lora_rank" in self.options:
            for part in parts:
                model_layers(part.config, REFERENCES)  # its patterns may select nothing
        if self._averages and self.in_8_bits and any(_data_ranks(part) > 1 for part in parts):
            rule = "a mean is of the micro-batches of all data-parallel ranks, and 8 bits round by those of each"
            raise UsageError(
                f"--loss_reduction=micro_mean: {rule}; fewer are with --tensor_parallel"
            )
        return parts

    def _parts(self, fixed: Flags) -> list[Part]:
        if self.then is None:
            return [_part({**fixed, **self.options}, self.layout)]
        if self._averages and self.then.kept(MICRO_BATCHES) != self.layout.kept(MICRO_BATCHES):
            raise UsageError("means of other micro-batches are another loss")
        options = {**fixed, **self.options, "experiment_dir": RUN}
        return [_part(options, self.layout)._replace(last=SWITCH), _part(options, self.then)]

    def reference(self, fixed: Flags) -> Case:
        """Return the run on one rank to compare with.

        It evaluates at its end only, as evaluations change nothing. With 8 bits it has the same
        micro-batches, whose magnitudes are scales. It restarts only if another layer trains then,
        or if micro-batches change.
        """
        options = dict(self.options)
        if "validation_interval" in options:
            options["validation_interval"] = str(STEPS)
        layouts = [self.layout] if self.then is None else [self.layout, self.then]
        ones = [
            Layout(1, layout.kept((*MICRO_BATCHES, *OTHERS) if self._averages else OTHERS))
            for layout in layouts
        ]
        if self.in_8_bits:
            sizes = [str(part.config.batch.micro_batch_size) for part in self.parts(fixed)]
            ones = [
                Layout(1, {**one.flags, "micro_batch_size": size})
                for one, size in zip(ones, sizes, strict=True)
            ]
        return Case(options, ones[0], None if ones[-1] == ones[0] else ones[-1])

    def twin(self, fixed: Flags) -> Case | None:
        """Return the plainest run that must compute the same bits; None if it is this one, or there
        is none."""
        parts = self.parts(fixed)
        exact, last = (
            _exact(parts[i].config, layout)
            for i, layout in ((0, self.layout), (-1, self.then or self.layout))
        )
        if exact is None or exact != last or (self.then is None and exact == self.layout):
            return None
        other = self.then.kept(OTHERS) if self.then else {}
        twin = Case(
            self.options, exact, Layout(exact.ranks, {**exact.flags, **other}) if other else None
        )
        with contextlib.suppress(UsageError):  # ZeRO-3 may need a number of buffers
            return twin if twin != self and twin.parts(fixed) else None
        return None

    def command(self, fixed: Flags) -> str:
        """Return the command that runs this case alone. fixed: see `parts`."""
        words = [f"--device={fixed['device']}"] if fixed["device"] != "cpu" else []
        words += [
            f"--ranks={self.layout.ranks}",
            f"--case={text_of({**self.options, **self.layout.flags})}",
        ]
        if self.then is not None:
            words.append(f"--then={self.then.ranks} {text_of(self.then.flags)}".strip())
        return shlex.join(["python", "scripts/prove_layouts.py", *words])


def _exact(config: Config, layout: Layout) -> Layout | None:
    """Return the plain layout with the same bits; None if none has them.

    All schedules of a pipeline but breadth-first add up the gradients of all micro-batches before
    they reduce them, and the head's part of a tied gradient before the embedding's.
    """
    depth = config.batch.depth_first_micro_batches or 1
    breadth = config.batch.breadth_first_micro_batches or 1
    exact = layout.exact(depth > 1)
    if config.distributed.pipeline_parallel == 1:
        return exact
    if config.multi_stage.pipeline_schedule != "breadth_first":
        if config.multi_stage.num_grad_buffers is not None:
            return None
        depth, breadth = 1, depth * breadth
        exact = layout.exact()
    elif depth > 1 and exact.kept(REDUCES):
        # a stage that shares no buffer adds up all its micro-batches first
        return None
    elif config.model.tie_word_embeddings and config.multi_stage.pipeline_placement == "loop":
        depth, breadth = 1, depth * breadth  # the embedding's part of a tied gradient comes last
    # both: else a schedule changes sizes
    numbers = dict(zip(MICRO_BATCHES, map(str, (depth, breadth)), strict=True))
    return Layout(
        exact.ranks,
        {**exact.kept([name for name in LAYOUT if name not in MICRO_BATCHES]), **numbers},
    )


def case_of(flags: Flags, ranks: int, then: str | None) -> Case:
    """Return the case of flags of options and layout. then: ranks and flags."""
    layout = Layout(ranks, flags)
    options = layout.kept([name for name in flags if name not in LAYOUT])
    number, _, text = (then or "").partition(" ")
    if then and not number.isdecimal():
        raise UsageError(
            f"--then={then}: begin with the number of ranks, as in --then='2 --zero_stage=3'"
        )
    return Case(
        options,
        Layout(ranks, layout.kept([*LAYOUT])),
        Layout(int(number), flags_of(text)) if then else None,
    )


def _part(options: Flags, layout: Layout) -> Part:
    flags = {**SIZES, **FIXED, **options, **layout.flags}
    if "batch_size_schedule" in options:
        del flags["batch_size"]
    values = {name: _value(name, text) for name, text in flags.items() if text}
    config = resolve(unflatten(values), layout.ranks)
    check_passes(config)
    draft = Draft(**flatten(config))
    for name in layout.flags:
        if (needed := FLAGS[name].idle_unless) and name in LAYOUT and not holds(needed, draft):
            raise UsageError(f"--{name} has no effect, unless --{needed}")
    return Part(config, layout.ranks, STEPS)


def _data_ranks(part: Part) -> int:
    return part.ranks // ranks_per_sample(part.config.distributed)


@functools.cache
def _value(name: str, text: str) -> Any:
    """Return the value of a flag as the command line reads it."""
    return flatten(parse([f"--data_path={TOKENS}", f"--{name}={text}"]).config)[name]
