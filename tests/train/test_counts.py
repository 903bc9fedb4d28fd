"""What a run has trained on: the same numbers as a person adds up from the batches, whatever
changed at restarts."""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.checkpoint import manifest
from megatron_lite.config import flatten, unflatten
from megatron_lite.data.open_data import open_data
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import UsageError
from megatron_lite.schedules.batch_size import BatchSchedule, Segment
from megatron_lite.schedules.learning_rate import learning_rate
from tests.checkpoint.test_damage import seal
from tests.support.harness import run_distributed, tiny_config, train_whole
from tests.support.metrics import read_metrics
from tests.support.token_files import data_config, write_counting

SETS = {"a": 500, "b": 900, "c": 333}
RUN: dict[str, Any] = dict(
    dataset_source="list", vocab_size=6000, hidden_size=16, num_layers=1, lr_warmup=0
)
RUN |= dict(
    split=(1.0,),
    max_position_embeddings=32,
    export_interval=1,
    allow_data_change=True,
    num_attention_heads=2,
)
RUN |= dict(allow_nondivisible_batch_size=True)


def train_run(distributed: Distributed, options: dict[str, Any]) -> None:
    train_whole(distributed, tiny_config(distributed.world_size, **RUN | options))


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Data sets whose tokens tell from which they are."""
    folder = tmp_path_factory.mktemp("sets")
    return {
        name: write_counting(folder / name, [size // 2, size - size // 2], "<u2", 2000 * number)
        for number, (name, size) in enumerate(SETS.items())
    }


def words(names: str, weights: tuple[int, ...], sets: dict[str, str]) -> tuple[str, ...]:
    paths = [sets[name] for name in names]
    return (
        tuple(word for pair in zip(map(str, weights), paths, strict=True) for word in pair)
        if weights
        else (*paths,)
    )


def three_stages(draw: random.Random, sets: dict[str, str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield ranks and options of three starts: batches, length, data and layout are drawn again, or
    stay."""
    end, options = 0, dict[str, Any]()
    for _ in range(3):
        end += draw.randrange(1, 5)
        if not options or draw.random() < 0.6:
            sizes = draw.sample((2, 3, 4, 5, 8), 2)
            ramp = (f"0:{sizes[0]}", f"{draw.randrange(1, end + 2)}:{sizes[1]}")
            plain = draw.random() < 0.5
            options |= {
                "batch_size_schedule": () if plain else ramp,
                "batch_size": sizes[0] if plain else None,
            }
        if "sequence_length" not in options or draw.random() < 0.4:
            options["sequence_length"] = draw.choice((8, 16, 20))
        if "data_path" not in options or draw.random() < 0.4:
            names = "".join(draw.sample("abc", draw.randrange(1, 4)))
            weights = draw.choice(((), tuple(draw.randrange(1, 5) for _ in names)))
            options["data_path"] = words(names, weights, sets)
        ranks = draw.choice((1, 1, 2))
        yield (
            ranks,
            {
                **options,
                "zero_stage": draw.choice((1, 3)),
                "train_iters": end,
                "micro_batch_size": 1,
            },
        )


def by_hand(options: dict[str, Any], done: int) -> tuple[list[int], Counter[int]]:
    """Return the samples of each iteration of a start, and those of each data set, from the batches
    themselves."""
    source = open_data(tiny_config(1, **RUN | options | {"export_interval": None}), 0, 1)
    sizes, read = list[int](), Counter[int]()
    for batches in source.batches("training", done):
        rows = [
            row for batch in batches for row in batch.tokens[: len(batch.tokens) - batch.padding]
        ]
        read.update(int(row[0]) // 2000 for row in rows)
        sizes.append(len(rows))
    return sizes, read


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 200))]
)
def test_three_stages(seed: int, sets: dict[str, str], tmp_path: Path) -> None:
    """Metrics, banner, card and checkpoint have the sums over the starts; the shares of each data
    set, too."""
    done = 0
    samples = 0
    tokens = 0
    of_sets = Counter[str]()
    for number, (ranks, options) in enumerate(three_stages(random.Random(seed), sets)):
        end = options["train_iters"]
        length = options["sequence_length"]
        names = list(SETS)
        run_distributed(ranks, train_run, {**options, "experiment_dir": str(tmp_path)})
        content = manifest.read(tmp_path / "checkpoints" / str(end))
        state, weighted = content.state, tuple(content.config["data_path"])
        sizes, read = by_hand({**options, "data_path": weighted}, done)
        lines = {line["iteration"]: line for line in read_metrics(tmp_path / "metrics.jsonl")}
        for size in sizes:
            done = done + 1
            samples = samples + size
            tokens = tokens + size * length
            found = [
                lines[done][key] for key in ("batch_size", "consumed_samples", "consumed_tokens")
            ]
            assert found == [size, samples, tokens]
        for one, count in read.items():
            of_sets[names[one]] += count * length
        log = (tmp_path / "runs" / str(number) / "logs" / "logs_rank_000.txt").read_text()
        assert re.search(rf"total tokens \.+ {tokens:,}$", log, re.MULTILINE)
        counted = Counter[str]()
        for _, name, _, size, count in state["counts"]["sets"]:
            counted[name] += size * count
        assert +counted == +of_sets
        card = (tmp_path / "export" / str(done) / "README.md").read_text()
        assert f"| tokens | {tokens:,} |" in card
        for name, count in of_sets.items():
            assert f"`{name}` ({count / tokens:.1%})" in card
        assert card.count(" samples of ") == len(state["counts"]["stages"])


STAGES = (
    {"batch_size": 4, "train_iters": 3},
    {"batch_size": 8, "train_iters": 5, "sequence_length": 8},
)


def state_of(folder: Path, iteration: int) -> dict[str, Any]:
    counts: dict[str, Any] = manifest.read(folder / "checkpoints" / str(iteration)).state["counts"]
    return counts


def test_counts_of_the_checkpoint_that_a_start_goes_back_to(
    sets: dict[str, str], tmp_path: Path
) -> None:
    """Not of the iterations that it leaves; other ranks and a run that never stopped have the
    same."""
    common = {
        "data_path": (sets["a"], sets["b"]),
        "experiment_dir": str(tmp_path),
        "checkpoint_interval": 1,
    }
    run_distributed(1, train_run, common | STAGES[0])
    run_distributed(
        2, train_run, common | {"batch_size": 8, "train_iters": 4, "micro_batch_size": 2}
    )
    run_distributed(1, train_run, common | {**STAGES[0], "train_iters": 5, "resume_iteration": 2})
    whole = tmp_path / "whole"
    run_distributed(
        1, train_run, common | {**STAGES[0], "train_iters": 5, "experiment_dir": str(whole)}
    )
    assert state_of(tmp_path, 5) == state_of(whole, 5)
    assert state_of(whole, 5)["stages"] == [(0, 4, 16)]


def without_counts(folder: Path, starts: list[int]) -> None:
    """Make a checkpoint one of an earlier version."""
    values = json.loads((folder / "manifest.json").read_bytes())
    values["state"].pop("counts")
    run = values["state"]["history"]
    values["state"]["history"] = {**run, "changes": [[start, f"{start:016x}"] for start in starts]}
    (folder / "manifest.json").write_bytes(seal(values))


@pytest.mark.parametrize(("starts", "is_known"), [([0], True), ([0, 1], False)])
def test_a_checkpoint_of_an_earlier_version(
    starts: list[int], is_known: bool, sets: dict[str, str], tmp_path: Path
) -> None:
    """What it read is known if its options never changed; otherwise the counts begin there, and say
    so."""
    common = {"data_path": (sets["a"], sets["b"]), "experiment_dir": str(tmp_path)}
    run_distributed(1, train_run, common | STAGES[0])
    without_counts(tmp_path / "checkpoints" / "3", starts)
    run_distributed(1, train_run, common | {**STAGES[0], "train_iters": 5})
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    card = (tmp_path / "export" / "5" / "README.md").read_text()
    log = (tmp_path / "runs" / "1" / "logs" / "logs_rank_000.txt").read_text()
    if is_known:
        assert (last["consumed_samples"], last["consumed_tokens"]) == (
            20,
            320,
        ) and "counted_since" not in last
        assert (
            "| tokens | 320 |" in card
            and sum(row[-1] for row in state_of(tmp_path, 5)["sets"]) == 20
        )
    else:
        assert (last["consumed_samples"], last["consumed_tokens"], last["counted_since"]) == (
            8,
            128,
            3,
        )
        assert "| tokens | 128 since iteration 3 |" in card and "128 since iteration 3" in log


def test_power_tokens_counts_what_was_read() -> None:
    """The rate after a change of the batch size is that of a schedule with both sizes, not of the
    second alone."""
    options = dict(
        lr=1.0, min_lr=0.0, lr_decay_style="power_tokens", lr_decay_iters=100, lr_warmup=2
    )
    whole = tiny_config(1, batch_size=None, batch_size_schedule=("0:4", "10:8"), **options)
    now = tiny_config(1, batch_size=8, **options)
    read = BatchSchedule((Segment(0, 4, 16), Segment(10, 8, 16)))
    assert learning_rate(now, 20, read) == learning_rate(whole, 20) != learning_rate(now, 20)
    longer = BatchSchedule((Segment(0, 4, 16), Segment(10, 8, 32)))
    decay = 1  # iteration before it
    factor = (longer.consumed_tokens(19) - decay * 64) / (read.consumed_tokens(19) - decay * 64)
    assert learning_rate(now, 20, longer) == pytest.approx(
        learning_rate(now, 20, read) * factor**-0.51
    )


def test_the_limit_of_epochs_counts_earlier_starts(sets: dict[str, str]) -> None:
    """Two thirds of an epoch with one batch size leave one third for another; a word about a data
    set's fifth epoch."""
    config = data_config(
        sets["b"], sequence_length=9, vocab_size=6000, batch_size=11, micro_batch_size=11
    )
    began: dict[str, Any] = {"evaluation_order": "data", "iteration": 66}
    mark = open_data(with_iterations(config, 1), 0, 1).identity["sets"][0][3]
    began["counts"] = {"stages": [(0, 1, 9)], "sets": [(mark, "b", 99, 9, 66)]}
    assert (
        "1 epochs"
        in open_data(with_iterations(config, 69), 0, 1, began).description["training data"]
    )
    with pytest.raises(
        UsageError, match=r"would be read 1\.111 times; write --train_iters=69 or less"
    ):
        open_data(with_iterations(config, 70), 0, 1, began)
    began["counts"] = {"stages": [(0, 1, 9)], "sets": [(mark, "b", 99, 9, 66 + 4 * 99)]}
    (warning,) = open_data(with_iterations(config, 69, max_epochs=None), 0, 1, began).warnings
    assert "training reads" in warning and " 5 times" in warning


def with_iterations(config: Any, iterations: int, **more: Any) -> Any:
    return unflatten({**flatten(config), "max_epochs": 1, **more, "train_iters": iterations})


def test_a_data_set_at_two_places_counts_once(sets: dict[str, str]) -> None:
    """Its epochs are those of both places together."""
    config = data_config(
        sets["a"], sets["a"], sequence_length=10, vocab_size=6000, batch_size=7, micro_batch_size=7
    )
    counts = open_data(with_iterations(config, 14, max_epochs=None), 0, 1).counts
    assert counts.epochs(14) == [2.0, 2.0] and len(counts.state(14)["sets"]) == 1
