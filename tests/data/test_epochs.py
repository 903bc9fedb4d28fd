"""How often data is read: the banner, the warning beyond four epochs, the limit, and weights that
change."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.config import unflatten
from megatron_lite.config.structured_values import short_names, weight_stages
from megatron_lite.data.open_data import open_data
from megatron_lite.errors import UsageError
from megatron_lite.validation import resolve
from tests.support.token_files import data_config, read_batches, write_counting

LENGTH = 16


@pytest.fixture
def prefixes(tmp_path: Path) -> tuple[str, str]:
    """Two data sets of 60 and 30 samples, one from 0, one from 10,000 on."""
    sizes = [LENGTH] * 60
    return (
        write_counting(tmp_path / "a", [*sizes, 1], "<u2"),
        write_counting(tmp_path / "b", [*sizes[:30], 1], "<u2", 10_000),
    )


config = functools.partial(
    data_config, batch_size=6, micro_batch_size=6, sequence_length=LENGTH, vocab_size=20_000
)


def test_the_banner_and_the_warning(prefixes: tuple[str, str]) -> None:
    """Every data set has its epochs in the banner; those beyond four give one warning with the
    worst of them."""
    source = open_data(config("2", prefixes[0], "1", prefixes[1], train_iters=40), 0, 1)
    lines = source.description
    assert lines["data 0"].endswith("66.67% of the samples, 2.67 epochs")
    assert lines["data 1"].startswith(
        f"{prefixes[1]}: 31 documents, 481 tokens, 33.33% of the samples, 2.67 epochs"
    )
    assert set(lines) == {"data 0", "data 1", "training data"}
    assert source.warnings == ()
    source = open_data(config(*prefixes, train_iters=100), 0, 1)
    (warning,) = source.warnings
    assert (
        f"training reads {prefixes[1]} 10 times (and 1 other data sets more than 4 times)"
        in warning
    )
    assert open_data(config(prefixes[0], train_iters=40), 0, 1).warnings == ()  # four


def test_the_limit(prefixes: tuple[str, str]) -> None:
    """--max_epochs allows the iterations that its message names, and not one more."""
    with pytest.raises(UsageError) as caught:
        open_data(config(*prefixes, train_iters=50, max_epochs=2), 0, 1)
    assert (
        f"--max_epochs=2, --train_iters=50: {prefixes[1]} would be read 5 times; write --train_iters=20"
        in str(caught.value)
    )
    open_data(config(*prefixes, train_iters=20, max_epochs=2), 0, 1)
    with pytest.raises(UsageError, match="--train_iters=20 or less"):
        open_data(config(*prefixes, train_iters=21, max_epochs=2), 0, 1)
    with pytest.raises(UsageError, match="--train_tokens=999: .* write a smaller --train_tokens,"):
        open_data(config(*prefixes, train_iters=21, train_tokens=999, max_epochs=2), 0, 1)


def test_weights_change_at_their_iterations(prefixes: tuple[str, str]) -> None:
    """Of two data sets every iteration has the share of its own weights, also where a run
    resumes."""
    schedule = ("10:1/0", "25:1/2")
    values = config(
        "0.5", prefixes[0], "0.5", prefixes[1], train_iters=40, data_weights_schedule=schedule
    )
    for done in (0, 5, 9, 10, 11, 25, 26, 30):
        found = [
            int((batch.tokens[:, 0] >= 10_000).sum())
            for (batch,) in read_batches(values, done=done)
        ]
        assert found == ([3] * 10 + [0] * 15 + [4] * 15)[done:], done


def test_a_schedule_moves_with_the_batch_size(prefixes: tuple[str, str]) -> None:
    """The change comes at its iteration, whatever the sizes of the batches before it."""
    values = config(
        *prefixes,
        train_iters=8,
        data_weights_schedule=("0:1/0", "4:0/1"),
        batch_size_schedule=("0:2", "2:6"),
        allow_nondivisible_batch_size=True,
    )
    for number, batch in enumerate(read_batches(values)):
        samples = torch.cat([part.tokens[: len(part.tokens) - part.padding] for part in batch])
        assert (
            len(samples) == (2 if number < 2 else 6)
            and ((samples[:, 0] >= 10_000) == (number >= 4)).all()
        )


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (("x",), "write <iteration>:<weight>/<weight>"),
        (("10:1",), "1 weights for 2 data sets"),
        (("10:1/x",), "weight x: not a number"),
        (("10:1/nan",), "10:1/nan"),
        (("10:0/0",), "with a positive sum"),
        (("10:1/-1",), "write finite weights >= 0"),
        (("10:1/1", "10:1/2"), "10 follows 10"),
        (("10:1/1", "0:1/2"), "0 follows 10"),
    ],
)
def test_schedules_that_cannot_be(schedule: tuple[str, ...], message: str) -> None:
    """The item, and what to write."""
    with pytest.raises(UsageError) as caught:
        weight_stages(("a", "b"), schedule)
    assert message in str(caught.value) and str(caught.value).startswith("--data_weights_schedule=")
    options = {"data_path": ("a", "b"), "data_weights_schedule": schedule, "train_iters": 1}
    with pytest.raises(UsageError, match="--data_weights_schedule"):
        resolve(unflatten(options), 1)


def test_weights_twice_are_refused() -> None:
    """A change at 0 stands for the weights of --data_path."""
    with pytest.raises(UsageError, match="--data_path has weights, too"):
        weight_stages(("1", "a", "2", "b"), ("0:1/1",))
    assert [stage.weights for stage in weight_stages(("a", "b"), ("0:3/1", "5:0/1"))] == [
        (0.75, 0.25),
        (0.0, 1.0),
    ]


def test_full_needs_a_number_of_epochs() -> None:
    """Its order would otherwise depend on the length of the run."""
    options = {"data_path": ("a",), "shuffle": "full", "train_iters": 1}
    with pytest.raises(
        UsageError,
        match="--shuffle=full: its order depends on the number of epochs; set --max_epochs",
    ):
        resolve(unflatten(options), 1)
    resolve(unflatten({**options, "max_epochs": 2}), 1)


def test_short_names() -> None:
    """The shortest end of a path that no other one has."""
    assert short_names(["x/a", "x/b"]) == {"x/a": "a", "x/b": "b"}
    assert short_names(["/x/a", "y/a", "a"]) == {"/x/a": "x/a", "y/a": "y/a", "a": "a"}


def test_each_data_set_alone(prefixes: tuple[str, str]) -> None:
    """The batches of a data set alone are its own; the blend's are those of a run without this
    option."""
    options: dict[str, Any] = dict(
        split=(0.5, 0.5), validation_iters=2, batch_size=4, micro_batch_size=4
    )
    whole, plain = (
        open_data(config(*prefixes, prefixes[0], **options, validation_by_dataset=by), 0, 1)
        for by in (True, False)
    )
    assert (
        whole.alone("validation") == {"a": "validation/a", "b": "validation/b"}
        and plain.alone("validation") == {}
    )
    for name, phase in whole.alone("validation").items():
        batches = [batch for (batch,) in whole.batches(phase)]
        assert len(batches) == 2
        assert all(((batch.tokens >= 10_000) == (name == "b")).all() for batch in batches)
    for (one,), (other,) in zip(
        whole.batches("validation"), plain.batches("validation"), strict=True
    ):
        assert torch.equal(one.tokens, other.tokens)
    alone = open_data(config(prefixes[0], **options, validation_by_dataset=True), 0, 1)
    assert alone.alone("validation") == {}
