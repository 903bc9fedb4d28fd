"""--lr_schedule: Fast-LLM's stages in one string, and the errors of malformed ones."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.cli.parse import parse
from megatron_lite.config import Config, unflatten
from megatron_lite.errors import UsageError
from megatron_lite.schedules.learning_rate import learning_rate, peak_learning_rate
from megatron_lite.schedules.stages import parse_stages, stage_rate
from megatron_lite.validation import resolve, warnings


def resolved(text: str, **options: Any) -> Config:
    given = {
        "lr_schedule": text,
        "dataset_source": "random",
        "train_iters": 100,
        "dry_run": True,
        **options,
    }
    return resolve(unflatten(given), 1)


def test_stages_follow_each_other() -> None:
    """The first update is one step into the first stage; a stage's own rate holds from its first
    step on, and the last rate after all stages."""
    config = resolved("linear,10,0,1e-3;constant,20,1e-3;cosine,40,1e-3,1e-4;power,10,5e-4,1e-4,2")
    expected = {
        1: 1e-4,
        5: 5e-4,
        10: 1e-3,
        29: 1e-3,
        30: 1e-3,
        40: 1e-4 + 9e-4 * (1 + math.cos(math.pi / 4)) / 2,
        50: 5.5e-4,
        70: 5e-4,
        75: 5e-4 - 4e-4 / 4,
        79: 5e-4 - 4e-4 * 0.81,
        80: 1e-4,
        10**12: 1e-4,
    }
    for iteration, rate in expected.items():
        assert learning_rate(config, iteration) == pytest.approx(rate, rel=1e-12), iteration
    assert peak_learning_rate(config) == 1e-3


def test_warmup_and_decay_are_the_plain_options() -> None:
    """As in Fast-LLM, which turns its plain flags into stages, rates equal those of --lr and so
    on."""
    for style in ("linear", "cosine"):
        stages = resolved(f"linear,10,0,1e-3;{style},90,1e-3,1e-5")
        options: dict[str, Any] = {
            "lr": 1e-3,
            "lr_warmup": 10,
            "lr_decay_style": style,
            "min_lr": 1e-5,
        }
        plain = resolve(unflatten({"dataset_source": "random", "train_iters": 100, **options}), 1)
        for iteration in range(1, 120):
            assert learning_rate(stages, iteration) == pytest.approx(
                learning_rate(plain, iteration), rel=1e-12
            )


def test_a_stage_for_ever() -> None:
    """The last stage may have a negative number of iterations."""
    config = resolved(" linear , 4, 0, 1 ; constant, -1, 0.5 ")
    assert [learning_rate(config, iteration) for iteration in (1, 3, 4, 5, 2**62)] == [
        0.25,
        0.75,
        0.5,
        0.5,
        0.5,
    ]


def test_offset_and_scale() -> None:
    """An offset into the schedule, Levanter's origin, and a factor on all rates."""
    text = "linear,10,0,1;constant,-1,0.5"
    assert learning_rate(resolved(text, lr_schedule_offset=4), 1) == 0.5
    assert learning_rate(resolved(text, lr_step_offset=0), 1) == 0.0
    assert learning_rate(resolved(text, default_lr_scale=0.5), 5) == 0.25
    with pytest.raises(UsageError, match="--default_lr_scale=1e\\+200: the product overflows"):
        resolved("constant,5,1e200", default_lr_scale=1e200)


def test_from_the_command_line() -> None:
    """The text arrives complete, quoted for a shell or not; resolving twice changes nothing."""
    text = "linear,10,0,1e-3;cosine,90,1e-3,1e-5"
    for words in ([f"--lr_schedule={text}"], ["--lr_schedule", text]):
        arguments = parse(
            ["--dataset_source=random", "--train_iters=100", "--experiment_dir=/x", *words]
        )
        config = resolve(arguments.config, 1)
        assert config.learning_rate.lr_schedule == text and not arguments.warnings
        assert resolve(config, 1) == config and warnings(config) == []


@pytest.mark.parametrize(
    ("text", "stage", "problem"),
    [
        ("linear,10,0,1;", "stage 2 of 2, empty", "remove the semicolon"),
        (";constant,5,1", "stage 1 of 2, empty", "write type,iters,lr[,end_lr[,power]]"),
        (
            "Linear,10,0,1",
            "stage 1 of 1, Linear,10,0,1",
            "type Linear: takes constant, linear, power, cosine",
        ),
        ("10,0,1", "stage 1 of 1, 10,0,1", "type 10: takes"),
        ("constant,5", "stage 1 of 1", "lr is missing; write constant,iters,lr"),
        (
            "cosine,5",
            "stage 1 of 1",
            "lr or end_lr is missing; write cosine,iters,lr,end_lr[,power]",
        ),
        (
            "linear,5,1",
            "stage 1 of 1",
            "lr or end_lr is missing; write linear,iters,lr,end_lr[,power]",
        ),
        ("constant,5,1,2", "stage 1 of 1", "4 items; write constant,iters,lr, or type linear"),
        ("power,5,1,2,3,4", "stage 1 of 1", "6 items; write power,iters,lr,end_lr[,power]"),
        ("constant,5,1;linear,1.5,1,2", "stage 2 of 2", "iters 1.5: not an integer"),
        ("constant,1e3,1", "stage 1 of 1", "iters 1e3: not an integer; write 1000"),
        ("constant,0,1", "stage 1 of 1", "iters 0: leave the stage out"),
        ("linear,-1,0,1", "stage 1 of 1", "iters -1: only a constant stage can last forever"),
        ("constant,-2,1", "stage 1 of 1", "iters -2: write -1 for a stage"),
        ("constant,-1,1;constant,5,1", "stage 2 of 2", "the previous stage never ends"),
        ("constant,5,", "stage 1 of 1", "lr '': not a number"),
        ("constant,5,-1", "stage 1 of 1", "lr -1: must be >= 0"),
        ("constant,5,nan", "stage 1 of 1", "lr nan: not a finite number"),
        ("linear,5,0,inf", "stage 1 of 1", "end_lr inf: not a finite number"),
        ("linear,5,0,1,0", "stage 1 of 1", "power 0: must be > 0"),
        ("linear,5,0,1,-2", "stage 1 of 1", "power -2: must be > 0"),
        ("linear,5,0,1,x", "stage 1 of 1", "power x: not a number"),
        ("linear:5:0:1", "stage 1 of 1", "type linear:5:0:1: takes"),
    ],
)
def test_malformed_stages(text: str, stage: str, problem: str) -> None:
    """Every error is one line with the stage, the rule and the fix."""
    with pytest.raises(UsageError) as error:
        resolved(text)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"--lr_schedule: {stage}") and problem in line, line


@pytest.mark.parametrize(
    ("options", "typed"),
    [
        ({"lr": 1e-3}, "--lr=0.001"),
        ({"min_lr": 0.0}, "--min_lr=0"),
        ({"lr_decay_style": "cosine", "lr_warmup": 5}, "--lr_decay_style=cosine, --lr_warmup=5"),
        ({"lr_decay_iters": 100}, "--lr_decay_iters=100"),
        ({"lr_cycle_minima": (5,)}, "--lr_cycle_minima=5"),
    ],
)
def test_exclusive_with_the_other_options(options: dict[str, Any], typed: str) -> None:
    """Stages are the whole schedule: other options of the rate are refused."""
    with pytest.raises(UsageError) as error:
        resolved("constant,-1,1", **options)
    assert str(error.value).startswith("--lr_schedule, --") and f"{typed}: its stages are" in str(
        error.value
    )


stages = st.tuples(
    st.sampled_from(("constant", "linear", "power", "cosine")),
    st.integers(1, 30),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0.1, 4),
)


@settings(max_examples=60, derandomize=True)
@given(st.lists(stages, min_size=1, max_size=5), st.booleans())
def test_random_stages(drawn: list[tuple[str, int, float, float, float]], for_ever: bool) -> None:
    """Within a stage the rate starts at lr and stays between lr and end_lr; the last rate holds."""
    words = [
        f"{kind},{iters},{lr}" + f",{end},{power}" * (kind != "constant")
        for kind, iters, lr, end, power in drawn
    ]
    parsed = parse_stages(";".join(words + ["constant,-1,0.25"] * for_ever))
    step = 0
    for kind, iters, lr, end, _ in drawn:
        end = lr if kind == "constant" else end
        assert stage_rate(parsed, step) == lr
        for place in range(iters):
            assert min(lr, end) - 1e-15 <= stage_rate(parsed, step + place) <= max(lr, end) + 1e-15
        step += iters
    for far in (step, step + 1, 2**62):
        assert stage_rate(parsed, far) == (0.25 if for_ever else end)
