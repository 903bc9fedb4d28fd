"""The search: layouts fit and are sorted by time, their flags mean them, and advice saves what it
says, to the byte."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.config import flatten
from megatron_lite.planner import search as searches
from megatron_lite.planner.devices import GIB
from megatron_lite.planner.plan import Planner, count_traffic, make_plan
from megatron_lite.planner.recommendation import recommendation
from megatron_lite.planner.search import (
    SMALLEST_SAVING,
    SPARE,
    Layout,
    Search,
    changed,
    fewest_changes,
    recommended,
    recomputations,
    remedies,
)
from megatron_lite.planner.step_memory import planned_micro_batch
from megatron_lite.validation import resolve
from tests.planner.test_report import page
from tests.support.launch import pretrain_after

pytestmark = pytest.mark.usefixtures("shared_planners")

SMALL = (
    "--num_layers=8 --hidden_size=2048 --num_attention_heads=16 --vocab_size=32000 --sequence_length=4096 "
    "--batch_size=64 --training_dtype=bf16 --dataset_source=random --device=cuda --dry_run=1"
)


def search(gib: float, ranks: int = 4, more: str = "") -> Search:
    """Return the search for layouts of a small model."""
    asked = parse([*SMALL.split(), *more.split()]).config
    return Search(asked, resolve(asked, ranks).batch.batch_size or 0, ranks, "cuda", int(gib * GIB))


def rebuilt(found: Layout, asked: Search) -> dict[str, object]:
    """Return the options to which the fewest changes of a layout resolve."""
    changes = fewest_changes(asked.asked, found)
    return flatten(resolve(changed(asked.asked, changes), found.plan.world_size))


@pytest.mark.parametrize(
    ("gib", "more"),
    [
        (16, ""),
        (24, "--batch_size=none --batch_size_schedule 0:32 10:64"),
        (60, "--depth_first_micro_batches=2 --num_grad_buffers=3"),
    ],
)
def test_layouts_fit_and_are_sorted(gib: float, more: str) -> None:
    """Each needs what a full plan of its options says, exactly, and sends as much; its flags mean
    it."""
    asked = search(gib, more=more)
    seconds = [layout.time.seconds for layout in asked.layouts]
    assert seconds and seconds == sorted(seconds)
    for layout in asked.layouts[::4]:
        plan = Planner(4, "cuda").plan(layout.config)
        assert layout.plan.needed_bytes() == plan.needed_bytes() <= 0.97 * asked.device_bytes
        assert layout.plan.state_bytes == plan.state_bytes and layout.plan.traffic == plan.traffic
        options = rebuilt(layout, asked)
        assert options == flatten(layout.config)


def test_layouts_divide_every_batch_of_a_schedule() -> None:
    """Not the largest alone: all micro-batches that divide each are tried, also in the groups of a
    pipeline."""
    more = "--num_layers=2 --hidden_size=128 --batch_size=none --batch_size_schedule 0:4 9:6 --pipeline_parallel=2"
    asked = search(60, 2, more)
    assert {layout.config.batch.micro_batch_size for layout in asked.layouts} == {1, 2}
    padded = search(60, 2, f"{more} --allow_nondivisible_batch_size=1")
    assert {layout.config.batch.micro_batch_size for layout in padded.layouts} == {1, 2, 4}


def test_less_memory_is_slower() -> None:
    """The best layout of a smaller device is never faster, and recomputation comes after smaller
    micro-batches."""
    best = [search(gib).layouts[0] for gib in (80, 12, 8, 6)]
    seconds = [layout.time.seconds for layout in best]
    assert seconds == sorted(seconds) and seconds[0] < seconds[-1]
    assert [layout.config.performance.recompute_layers for layout in best[:2]] == [0, 0]


def test_a_layout_as_good_as_asked_stays() -> None:
    """Nothing is changed where the asked layout is the fastest, or nearly."""
    asked = search(200)
    config = asked.layouts[0].config
    again = dataclasses.replace(asked, asked=config)
    best = recommended([*again.layouts, again.layout(config, {})], config, again.usable_bytes)
    assert {
        name: value for name, value in fewest_changes(config, best).items() if value is not None
    } == {}


def test_of_equally_fast_layouts_the_one_with_the_most_room_is_recommended() -> None:
    """The asked layout does not fit, or leaves less than 3 % free: of those within 2 % of the
    fastest that leave more, the one that needs the least is taken."""
    asked = search(24)
    limit = 1.02 * asked.layouts[0].time.seconds
    near = [layout.plan.needed_bytes() for layout in asked.layouts if layout.time.seconds <= limit]
    assert min(near) < 0.9 * near[0], "the fastest needs more"
    best = recommended(asked.layouts, resolve(asked.asked, 4), asked.usable_bytes)
    assert best.plan.needed_bytes() == min(near)
    tight = dataclasses.replace(
        asked, device_bytes=int(asked.layouts[0].plan.needed_bytes() / 0.98)
    )
    typed = tight.layout(asked.layouts[0].config, {})
    best = recommended([typed, *tight.layouts], typed.config, tight.usable_bytes)
    assert best.plan.needed_bytes() <= 0.97 * tight.device_bytes and best.time.seconds <= limit


@pytest.mark.parametrize("blocks", [1, 2, 12])
def test_each_recomputation_needs_less_memory(blocks: int) -> None:
    """They are sorted for the bisection: each one needs at most as much as the one before, up to
    one whole block."""
    config = resolve(search(80, 1, f"--micro_batch_size=1 --num_layers={blocks}").asked, 1)
    steps = recomputations(blocks)
    assert (
        len({tuple(step.values()) for step in steps}) == len(steps) == {1: 4, 2: 6, 12: 10}[blocks]
    )
    planner = Planner(1, "cuda")
    needed = [planner.plan(changed(config, step)).needed_bytes() for step in steps]
    assert needed[: blocks + 1] == sorted(needed[: blocks + 1], reverse=True)
    assert needed[-1] < needed[0] or blocks == 1


def test_a_part_of_the_blocks_is_enough_if_little_memory_is_missing() -> None:
    """With less than `activation` needs, and more than `activation,full:3`, only some blocks repeat
    the up product."""
    one = search(80, 1, "--batch_size=1 --zero_stage=3 --num_layers=12")
    needed = [
        one.needed_bytes({"mlp_recompute_level": level}) or 0
        for level in ("activation", "activation,full:3")
    ]
    smaller = dataclasses.replace(one, device_bytes=int(sum(needed) / 2 / 0.97))
    level = {"mlp_recompute_level": "activation,full:3"}
    assert level in [fewest_changes(one.asked, layout) for layout in smaller.layouts]


def test_a_smaller_evaluation_comes_before_recomputation() -> None:
    """Large micro-batches of a validation are given up where they do not fit, and only there."""
    asked = search(80, 4, "--micro_batch_size=1 --validation_iters=1 --eval_micro_batch_size=16")
    limit = math.floor((asked.needed_bytes({}) or 0) / 0.97) - 1
    for search_of_limit, kept in (
        (asked, 16),
        (dataclasses.replace(asked, device_bytes=limit), None),
    ):
        same = {"zero_stage": 1, "micro_batch_size": 1}
        (found,) = (
            layout for layout in search_of_limit.layouts if same.items() <= layout.values().items()
        )
        assert (
            found.config.batch.eval_micro_batch_size == kept
            and rebuilt(found, asked)["eval_micro_batch_size"] == kept
        )


def test_more_ranks_are_the_last_resort() -> None:
    """If no layout fits, the smallest number of GPUs that shares the batch is found, if any
    fits."""
    one = search(0, 1, "--num_layers=4")
    least = {
        ranks: dataclasses.replace(one, world_size=ranks).least_bytes for ranks in (1, 2, 4, 8, 64)
    }
    assert sorted(least.values(), reverse=True) == list(least.values())
    alone = dataclasses.replace(one, device_bytes=math.ceil(least[4] / 0.97))
    more = alone.on_fewest_ranks()
    assert not alone.layouts and more is not None and more.world_size == 4
    assert more.layouts[0].plan.needed_bytes() <= alone.device_bytes
    nowhere = dataclasses.replace(one, device_bytes=GIB)
    assert not nowhere.layouts and nowhere.on_fewest_ranks() is None


def test_the_search_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that takes too long says so, and names options by hand; what fits as asked is
    recommended."""
    monkeypatch.setattr(searches, "SEARCH_S", 0.0)
    asked = search(80, 1).asked
    plan = make_plan(resolve(asked, 1), 1, "cuda")
    lines = [
        recommendation(plan, {}, Search(asked, 64, 1, "cuda", size), []) for size in (1, 2**50)
    ]
    assert "the search for flags that fit was given up" in " ".join(lines[0]) and lines[1][
        0
    ].startswith("fits: ")


def test_traffic_of_many_micro_batches() -> None:
    """Extrapolating from two and three micro-batches gives what the whole schedule counts."""
    for stage in (1, 2, 3):
        asked = search(500, 4, f"--zero_stage={stage} --micro_batch_size=2")
        config = resolve(asked.asked, 4)
        assert config.batch.depth_first_micro_batches == 8
        partition = Planner(4, "cuda").partition(config)
        steps, micro_batch = partition.steps(config, "none", (8, 1)), planned_micro_batch(config)
        assert make_plan(config, 4, "cuda").traffic == count_traffic(
            partition.model, steps, micro_batch
        )


def test_shards_of_a_node_if_they_fit() -> None:
    """Plans of two nodes take them by default, the search one group where memory is short, and its
    flags say so."""
    asked = search(80, 16, "--zero_stage=3")
    whole, by_node = (asked.needed_bytes({"data_parallel_shard": size}) or 0 for size in (0, 8))
    assert whole < by_node == asked.needed_bytes({}) and search(80, 8).nodes == 1 < asked.nodes
    tight = dataclasses.replace(asked, device_bytes=int(asked.least_bytes / (1 - SPARE)) + 2**26)
    for either, expected, flag in ((asked, 8, None), (tight, 0, 0)):
        found = next(
            layout for layout in either.layouts if layout.config.multi_stage.zero_stage == 3
        )
        assert found.config.distributed.data_parallel_shard == expected
        assert fewest_changes(either.asked, found).get("data_parallel_shard") == flag
    (remedy,) = (remedy for remedy in remedies(asked) if remedy.flag == "data_parallel_shard")
    assert (remedy.append, remedy.saving_bytes) == ("--data_parallel_shard=0", by_node - whole)


# -- advice to a run that ran out of memory

MODEL = "--num_layers=6 --hidden_size=2048 --num_attention_heads=16 --vocab_size=32000 --sequence_length=4096"
RUN = f"{MODEL} --dataset_source=random --training_dtype=bf16 --tie_word_embeddings=0"


def needed(words: str, ranks: int) -> int:
    return Planner(ranks, "cuda").plan(resolve(parse(words.split()).config, ranks)).needed_bytes()


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (
            f"{RUN} --batch_size=32",
            "micro_batch_size mlp_recompute_level mlp_recompute_level recompute_layers zero_stage zero_stage "
            "tensor_parallel split_master_weights world_size",
        ),
        (
            f"{RUN} --micro_batch_size=2 --sequential_micro_batches=4",
            "micro_batch_size mlp_recompute_level",
        ),
        (
            f"{RUN} --batch_size=64 --micro_batch_size=1 --breadth_first_micro_batches=4 --zero_stage=3",
            "breadth_first_micro_batches mlp_recompute_level",
        ),
        (
            f"{RUN} --batch_size=64 --micro_batch_size=1 --mlp_recompute_level=full --recompute_layers=6"
            " --validation_iters=1 --eval_micro_batch_size=16",
            "eval_micro_batch_size",
        ),
    ],
    ids=["plain", "no batch size", "breadth-first", "validation"],
)
def test_each_option_alone_saves_what_the_list_says(words: str, flags: str) -> None:
    """Appended to the command, each makes the plan smaller by its saving; options that save nothing
    are left out."""
    ranks, asked = 4, parse(words.split()).config
    batch_size = resolve(asked, ranks).batch.batch_size
    assert batch_size
    found = remedies(Search(asked, batch_size, ranks, "cuda", 80 * 2**30))
    assert " ".join(remedy.flag for remedy in found).startswith(flags)
    before = needed(words, ranks)
    for remedy in found:
        assert remedy.saving_bytes >= math.ceil(SMALLEST_SAVING * before)
        if remedy.append:
            assert f"--{remedy.flag}={remedy.value}" in remedy.append.split()
            assert before - needed(f"{words} {remedy.append}", ranks) == remedy.saving_bytes, remedy
            assert (
                resolve(parse(f"{words} {remedy.append}".split()).config, ranks).batch.batch_size
                == batch_size
            )
        else:
            assert before - needed(words, int(remedy.value)) == remedy.saving_bytes, remedy


def test_a_run_that_runs_out_of_memory_gets_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error of a run that cannot allocate ends with flags whose plan needs much less than its
    own."""
    flags = "--num_layers=2 --hidden_size=1024 --num_attention_heads=4 --vocab_size=256 --sequence_length=4096"
    words = [
        *flags.split(),
        "--batch_size=1024",
        "--dataset_source=random",
        "--device=cpu",
        "--train_iters=1",
    ]
    words.append("--ignore_memory_check=1")
    limited = "import resource; resource.setrlimit(resource.RLIMIT_AS, (12 * 2**30,) * 2)"
    result = pretrain_after(limited, [*words, f"--experiment_dir={tmp_path / 'run'}"])
    assert result.returncode == 7, result.stderr
    found = re.search(
        r"to plan ([\d.,]+) GiB instead of ([\d.,]+) GiB, append (--.*)", result.stderr
    )
    exit_json = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert found is not None and found[0] in exit_json["message"]
    less, before = (float(number.replace(",", "")) for number in found.groups()[:2])
    first, *_ = advice = exit_json["advice"]
    assert [remedy["flag"] for remedy in advice][:3] == [
        "micro_batch_size",
        *["mlp_recompute_level"] * 2,
    ]
    log = (tmp_path / "run" / "runs" / "0" / "logs" / "logs_rank_000.txt").read_text()
    for text in (result.stderr, log):
        lines = text.splitlines()[-len(advice) :]
        for line, remedy in zip(lines, advice, strict=True):
            assert line.split() == [remedy["append"], f"{remedy['saving_bytes'] / GIB:,.2f}", "GiB"]
    smaller = [
        Planner(1, "cpu").plan(resolve(parse([*words, *more]).config, 1)).needed_bytes()
        for more in ([], first["append"].split())
    ]
    assert smaller[0] - smaller[1] == first["saving_bytes"]
    assert less < 0.9 * before
    (row,) = re.findall(
        r"^  needed .*", page(capsys, *words, *found[3].split(), "--world_size=1"), re.M
    )
    assert min(map(float, row.replace(",", "").split()[1:])) / 1024 <= less + 0.1
