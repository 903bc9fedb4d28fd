"""Options of the multi-stage engine and of profiles: values with a syntax of their own,
contradictions, warnings."""

from typing import Any

import pytest

from megatron_lite.cli.help import banners
from megatron_lite.cli.parse import parse
from megatron_lite.config import Config, flatten, unflatten
from megatron_lite.config.structured_values import lr_scale_patterns
from megatron_lite.config.system import number_of_stages
from megatron_lite.errors import UsageError
from megatron_lite.validation import planned_world_size, resolve, warnings
from megatron_lite.zero.layout import split_into_stages
from tests.support.harness import tiny_config
from tests.support.tables import rows

COMPLETE = ("--dataset_source=random", "--train_iters=10", "--experiment_dir=/run")


def resolved(*argv: str, launched: int = 1) -> Config:
    """Resolve a command line as the program does before it starts."""
    config = parse(argv).config
    return resolve(config, planned_world_size(config, launched))


def problem(*argv: str) -> str:
    """Return the only error of an otherwise complete command line."""
    with pytest.raises(UsageError) as caught:
        resolved(*argv, *COMPLETE)
    (line,) = str(caught.value).splitlines()
    return line


def cautions(*argv: str, launched: int = 2) -> list[str]:
    """Return the warnings for an otherwise complete command line."""
    return warnings(resolved(*COMPLETE, *argv, launched=launched))


# Option -> legal texts with their values.
GOOD: dict[str, dict[str, Any]] = {
    "layers_per_stage": {"1": 1.0, "1.5": 1.5, "1e3": 1000.0, "auto": "auto", "AUTO": "auto"},
    "zero_stage": {"1": 1, "2": 2, "3": 3, "auto": "auto", "Auto": "auto", "none": 1},
    "freeze": {
        "blocks.0": ("blocks.0",),
        "blocks.0,*.bias": ("blocks.0", "*.bias"),
        "a  b": ("a", "b"),
    },
    "lr_scales": {"embedding:0.1": ("embedding:0.1",), "a:0 *:2,a:1e-3": ("a:0", "*:2", "a:1e-3")},
    "mlp_recompute_level": {
        "activation": "activation",
        "activation,full:1": "activation,full:1",
        "full:01,activation": "activation,full:1",
        "none,full:1, activation:1": "none,full:1,activation:1",
    },
}
# Option -> illegal texts with a part of the error.
BAD: dict[str, dict[str, str]] = {
    "layers_per_stage": {
        "0.5": "a layer cannot be split between stages; to save memory, write 1",
        "-1": "must be >= 1, or auto",
        "atuo": "did you mean --layers_per_stage=auto?",
        "none": "must be >= 1, or auto",
    },
    "zero_stage": {
        "0": "every rank would hold and update",
        "4": "must be >= 1 and <= 3, or auto",
        "2.0": "write --zero_stage=2",
        "aut": "did you mean --zero_stage=auto?",
        "optim": "not an integer",
    },
    "stages_per_pipeline_stage": {"2": "must be 1: write more --layers_per_stage"},
    "freeze": {
        "blocks.0:0": "no name has a colon; write scales as --lr_scales=blocks.0:0",
        "a,,b": "empty",
    },
    "lr_scales": {
        "embedding": "--lr_scales=embedding: write <pattern of the names>:<scale>",
        ":2": "write <pattern",
        "head:": "write <pattern",
        "a:1 b": "--lr_scales=b: write <pattern",
        "a:x": "scale x: not a number",
        "a:-0.1": "scale -0.1 must be >= 0; 0 freezes",
        "a:nan": "scale nan: not a finite number",
        "a:1e999": "too large",
        "a:b:": "--lr_scales=a:b:",
    },
    "split_master_weights": {"1": "write --training_dtype=bf16"},
    "mlp_recompute_level": {
        "1": "takes none, activation, full",
        "activation,full:13": "--num_layers=12: write numbers that add up to at most 12",
        "activation:8,none,full:5": "--num_layers=12: write numbers that add up to at most 12",
        "full:1": "must have no number, for all other blocks; write --mlp_recompute_level=none,full:1",
        "none:1,activation:1,full:1": "one part must have no number",
        "none,full": "only one part may have none; write --mlp_recompute_level=none,full:8",
        "full:1,full:1,none": "full is given twice; leave one out",
        "ful:1,none": "did you mean --mlp_recompute_level=full:1,none?",
        "selective,full:1": "selective: takes none, activation, full",
        "full:0,none": "takes no block; write --mlp_recompute_level=full:1,none",
        "full:-1,none": "takes no block",
        "full:2e0,none": "2e0: not an integer; write --mlp_recompute_level=full:2,none",
        "full:,none": "not an integer",
        ",full:1": "takes none, activation, full",
        "activations": "did you mean --mlp_recompute_level=activation?",
    },
    "world_size": {"8": "a run takes the number of ranks from torchrun"},
}


def test_good_values() -> None:
    """A legal value arrives in the resolved configuration; resolving it again or printing it
    changes nothing."""
    for name, text, meaning in (
        (name, *pair) for name, texts in GOOD.items() for pair in texts.items()
    ):
        config = resolved(f"--{name}={text}", *COMPLETE)
        found = flatten(config)[name]
        assert found == meaning and type(found) is type(meaning), (name, text)
        assert resolve(config, 1) == config, (name, text)
        assert any(name in line.split()[:2] for line in banners(config, {})[0].splitlines()), (
            name,
            text,
        )


def test_bad_values() -> None:
    """An illegal value causes one line that starts with the flag and gives the rule."""
    for name, text, words in (
        (name, *pair) for name, texts in BAD.items() for pair in texts.items()
    ):
        line = problem(f"--{name}={text}")
        assert line.startswith(f"--{name}=") and words in line, line


# --- Options that depend on each other


BF16 = ("--training_dtype=bf16", "--split_master_weights=1", "--num_layers=4")


def test_master_weights_can_be_split() -> None:
    """bf16 training with one weight buffer per stage is accepted (a tied embedding always has its
    own)."""
    for argv in (
        "",
        "--zero_stage=2",
        "--zero_stage=auto",
        "--num_grad_buffers=1",
        "--num_weight_buffers=5",
        "--num_weight_buffers=6 --tie_word_embeddings=0",
        "--layers_per_stage=auto",
        "--zero_stage=3 --num_weight_buffers=6",
        "--num_weight_buffers=3 --layers_per_stage=2",
    ):
        assert resolved(*BF16, *argv.split(), *COMPLETE).multi_stage.split_master_weights, argv


UNSPLIT = """
--training_dtype=fp32
    --training_dtype=fp32: only bf16 training can split masters
--training_dtype=fp16
    write --training_dtype=bf16, or leave split_master_weights out
--zero_stage=3
    --zero_stage=3: the bf16 weights are half of the master, so every stage needs its own weight buffer; write
    --zero_stage=1 or 2, or leave
--num_weight_buffers=4
    --num_weight_buffers=4: the bf16 weights are
--num_weight_buffers=5 --tie_word_embeddings=0
    leave num_weight_buffers out
--num_weight_buffers=6 --layers_per_stage=auto
    leave num_weight_buffers out
"""


@pytest.mark.parametrize(("argv", "words"), rows(UNSPLIT))
def test_master_weights_that_cannot_be_split(argv: str, words: str) -> None:
    """The error is one line with the rule and the fix."""
    line = problem(*BF16, *argv.split())
    assert line.startswith("--split_master_weights=1, --") and words in line, line


def test_world_size_of_a_dry_run() -> None:
    """The batch arithmetic of a dry run uses --world_size, or else the ranks of torchrun."""
    model = ("--dry_run=1", "--batch_size=128")
    batch = resolved(*model, "--world_size=128", "--micro_batch_size=1").batch
    assert (batch.batch_size, batch.micro_batch_size, batch.sequential_micro_batches) == (128, 1, 1)
    assert resolved(*model, "--world_size=4").batch.micro_batch_size == 32
    assert resolved(*model, launched=2).batch.micro_batch_size == 64
    line = problem(*model, "--world_size=3")
    assert line.startswith("--batch_size=128 on 3 ranks") and "nearest: 126 or 129" in line
    config = parse(["--world_size=8"]).config
    # without --dry_run=1 it is refused, and counts for nothing
    assert planned_world_size(config, 2) == 2


def test_errors_of_a_dry_run_count_its_ranks() -> None:
    """Contradictions reported together with other errors also use --world_size, if it can be
    read."""
    for flags, contradiction in (
        (("--world_size=128",), False),
        (("--world_size=3",), True),
        (("--world_size=x",), False),
    ):
        with pytest.raises(UsageError) as caught:
            parse(
                [
                    "--dry_run=1",
                    "--batch_size=128",
                    "--micro_batch_size=1",
                    "--lr=x",
                    *flags,
                    *COMPLETE,
                ]
            )
        assert ("nearest" in str(caught.value)) == contradiction


def test_dry_run_needs_neither_data_nor_a_folder() -> None:
    """A dry run needs neither input nor output paths, and does not warn that nothing is saved."""
    argv = (
        "--dry_run=1",
        "--train_iters=5",
        "--checkpoint_interval=5",
        "--export_interval=5",
        "--stop_interval=5",
        "--save_tensor_logs=1",
        "--debug_param_init=1",
        "--split=0,1",
    )
    assert warnings(resolved(*argv)) == []
    with pytest.raises(UsageError) as caught:
        resolved(*argv[1:])
    lines = str(caught.value).splitlines()
    assert sorted(line.partition(":")[0] for line in lines) == [
        "--checkpoint_interval=5",
        "--data_path is missing",
        "--export_interval=5",
        "--save_tensor_logs=1",
        "--split=0,1,0, --train_iters=5",
        "--stop_interval=5",
    ]
    with pytest.raises(UsageError, match="--data_path=0.5: write a weight before every prefix"):
        resolved("--dry_run=1", "--data_path=0.5")


# --- Learning-rate scales


def test_patterns_of_learning_rates() -> None:
    """Scales keep their order, and frozen patterns follow, because the last match counts."""
    scales = lr_scale_patterns(("head", "*.bias"), ("*:2", "head:0.5", "x:y:1e-2", "head:3"))
    assert scales == [
        ("*", 2.0),
        ("head", 0.5),
        ("x:y", 0.01),
        ("head", 3.0),
        ("head", 0.0),
        ("*.bias", 0.0),
    ]
    assert lr_scale_patterns((), ()) == []


# --- Warnings


CAUTIONS = """
--num_grad_buffers=4 --zero_stage=2
    --num_grad_buffers=4 is used; --zero_stage=2 by itself would set 2
--num_weight_buffers=1 --zero_stage=3
    --num_weight_buffers=1 is used; --zero_stage=3 by itself would set 2
--num_weight_buffers=3 --zero_stage=2
    --num_weight_buffers=3 is used; --zero_stage=2 by itself would set one per stage (14)
--num_grad_buffers=2
    --num_grad_buffers=2 is used; --zero_stage=1 by itself would set one per stage (14)
--num_grad_buffers=2 --layers_per_stage=auto
    --num_grad_buffers=2 is used; --zero_stage=1 by itself would set one per stage
--num_grad_buffers=4 --zero_stage=auto
    --num_grad_buffers=4 is used, whatever --zero_stage=auto chooses
--num_weight_buffers=15
    --num_weight_buffers=15: only 14 are allocated, one per stage
--num_grad_buffers=7 --layers_per_stage=4 --zero_stage=3
    --num_grad_buffers=7: only 5 are allocated, one per stage; --zero_stage=3 by itself would set 2
--full_precision_gradients=0 --training_dtype=bf16
    --full_precision_gradients=0: sums of gradients in bf16 lose small contributions
--train_iters=0
    --train_iters=0: nothing is trained, so neither gradients nor optimizer state are allocated
--train_iters=0 --export_interval=1 --export_format=distributed
    --train_iters=0: nothing is trained; only --export_format=distributed needs the optimizer state
"""


@pytest.mark.parametrize(("argv", "expected"), rows(CAUTIONS))
def test_cautions(argv: str, expected: str) -> None:
    """Each surprising option causes one warning, and no other."""
    assert cautions(*argv.split()) == [expected]


IDLE = """
--store_frozen_weights_in_optimization_precision=0 --training_dtype=bf16
    without --freeze or a scale of 0 in --lr_scales
--store_frozen_weights_in_optimization_precision=0 --training_dtype=bf16 --lr_scales=head:0.5
    without --freeze or a scale of 0 in --lr_scales
--store_frozen_weights_in_optimization_precision=0 --freeze=head
    with --training_dtype=fp32
--save_tensor_logs=1
    while all debug levels are 0
--show_tensor_logs=0
    while all debug levels are 0
--debug_global_tensors=0
    while all debug levels are 0
"""


@pytest.mark.parametrize(("argv", "reason"), rows(IDLE))
def test_idle_options(argv: str, reason: str) -> None:
    """The first option has no effect; one warning says why, and there is no other."""
    assert cautions(*argv.split()) == [f"{argv.partition('=')[0]} has no effect {reason}"]


def test_buffers_on_one_rank() -> None:
    """One rank's shards are the full tensors: with the dtype of the buffers, there is nothing to
    share."""
    idle = "has no effect on one rank{}: the shards are the full tensors"
    argv = ("--zero_stage=3", "--num_weight_buffers=1", "--num_grad_buffers=1")
    gradients = "--num_grad_buffers " + idle.format("")
    assert cautions(*argv, launched=1) == [
        "--num_weight_buffers " + idle.format(" in fp32 training"),
        gradients,
    ]
    weights = "--num_weight_buffers=1 is used; --zero_stage=3 by itself would set 2"
    assert cautions(*argv, "--training_dtype=bf16", launched=1) == [weights, gradients]
    assert cautions(*argv, "--batch_size=12", launched=3) == [
        weights,
        "--num_grad_buffers=1 is used; --zero_stage=3 by itself would set 2",
    ]


def test_no_caution_without_reason() -> None:
    """Options that take effect cause no warning."""
    for argv in (
        "",
        "--zero_stage=auto",
        "--layers_per_stage=auto",
        "--layers_per_stage=1.5",
        "--zero_stage=3",
        "--num_grad_buffers=2 --zero_stage=2",
        "--num_weight_buffers=2 --num_grad_buffers=2 --zero_stage=3",
        "--num_weight_buffers=14",
        "--num_weight_buffers=13 --zero_stage=2",
        "--store_frozen_weights_in_optimization_precision=0 --training_dtype=bf16 --freeze=embedding",
        "--lr_scales=head:0 --training_dtype=bf16 --store_frozen_weights_in_optimization_precision=0",
        "--split_master_weights=1 --training_dtype=bf16",
        "--debug_layer_outputs=3 --save_tensor_logs=1 --show_tensor_logs=0 --debug_global_tensors=0",
        "--debug_param_update=13",
        "--dry_run=1 --world_size=128 --batch_size=128",
    ):
        assert cautions(*argv.split()) == [], argv


def test_automatic_values_survive() -> None:
    """`auto` is resolved later, when the device is known; until then it is neither replaced nor
    compared."""
    config = resolved(
        "--zero_stage=auto", "--layers_per_stage=auto", "--num_grad_buffers=1", *COMPLETE
    )
    assert (config.multi_stage.zero_stage, config.multi_stage.layers_per_stage) == ("auto", "auto")
    lines = banners(config, {})[0].splitlines()
    for name in ("zero_stage", "layers_per_stage"):
        assert any(line.startswith(f"* {name} .") and line.endswith(" auto") for line in lines)


def test_words_are_for_their_options_only() -> None:
    """A configuration made in Python obeys the same rules as a command line."""
    for name, wrong in (
        ("zero_stage", "2"),
        ("layers_per_stage", "none"),
        ("num_layers", "auto"),
        ("lr", "auto"),
    ):
        with pytest.raises(UsageError, match=f"--{name}={wrong}: must be "):
            resolve(unflatten({"dataset_source": "random", name: wrong}), 1)


def test_number_of_stages_is_that_of_the_split() -> None:
    """The arithmetic without torch agrees with the split itself, where quotients and products round
    apart, too."""
    for num_layers in range(1, 65):
        for hundredths in (*range(100, 400), 777, 6400, 10**6):
            split = split_into_stages(num_layers, hundredths / 100)
            assert number_of_stages(num_layers, hundredths / 100) == len(split), (
                num_layers,
                hundredths,
            )
    # no loop over the stages, whatever rounding does
    assert number_of_stages(2**53 + 1, 1.0) == 2**53 + 4


def test_ranks_to_profile_exist() -> None:
    """The message has the ranks that there are."""
    assert tiny_config(4, profile_ranks=(0, 3), profile_cpu=True).profiling.profile_ranks == (0, 3)
    rule = "leave out profile_ranks to profile all"
    with pytest.raises(UsageError, match=f"--profile_ranks=0,4: the ranks are 0 to 3; {rule}"):
        tiny_config(4, profile_ranks=(0, 4), profile_cpu=True)
    with pytest.raises(UsageError, match=f"--profile_ranks=1: the only rank is 0; {rule}"):
        tiny_config(1, profile_ranks=(1,), profile_cpu=True)


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ({"profile_cpu": True}, None),
        ({"profile_schedule": True}, None),
        ({"profile_schedule": True, "profile_skip": 18}, None),
        (
            {"profile_cpu": True, "profile_skip": 19},
            "no iteration is profiled, as the run ends after 20",
        ),
        (
            {"profile_schedule": True, "experiment_dir": None},
            "--profile_schedule has no effect without --experiment_dir",
        ),
    ],
)
def test_profiles_without_a_result_are_pointed_out(
    options: dict[str, Any], warning: str | None
) -> None:
    """One warning each, and none for what leaves a file or a line."""
    found = [
        line
        for line in warnings(tiny_config(1, **{"experiment_dir": "runs/x", **options}))
        if "profile" in line
    ]
    assert len(found) == (warning is not None) and (not warning or warning in found[0]), found
