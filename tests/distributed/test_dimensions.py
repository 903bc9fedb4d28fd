"""A dimension of the grid of ranks is an option and a row of the table: everything else finds it
there."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.config import DistributedConfig
from megatron_lite.config.dimensions import DIMENSIONS, GROUPS, RankGrid
from megatron_lite.distributed.grid import OF_SEVERAL, TYPES, Groups
from megatron_lite.distributed.rank_group import Group
from megatron_lite.distributed.traffic import KINDS
from tests.support.thread_ranks import rank_grid

ROOT = Path(__file__).resolve().parents[2]
OPTION = """    dummy_parallel: PositiveInt = option(1, "ranks that divide nothing")
"""
ROW = """    Dimension(
        "dummy",
        "D",
        divides="nothing",
        option="dummy_parallel",
        sums=("layers",),
        in_layers=True,
        kinds=("dummy sum",),
        remark="dummy ranks sum at {dummy:,.4g} GB/s",
        proved=(2, 5),
    ),
"""
# Each place that knows the grid, asked about ranks of which `size` are along the new dimension.
PLACES = """
import json, logging, sys
from types import SimpleNamespace
from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.checkpoint.inspection import shape_text
from megatron_lite.checkpoint.resume import _other_ranks
from megatron_lite.cli.parse import parse
from megatron_lite.config.dimensions import RankGrid, ranks_per_layer
from megatron_lite.config.system import shard_of_node
from megatron_lite.distributed.grid import Groups, divide
from megatron_lite.distributed.traffic import Traffic
from megatron_lite.monitor.banner import describe_ranks
from megatron_lite.planner.devices import data_sheet
from megatron_lite.planner.plan import Planner, SimulatedGroup
from megatron_lite.planner.search import WIDE, Search
from megatron_lite.validation import resolve
from megatron_lite.validation.sizes import data_ranks
from scripts.proof.cases import LAYOUT
from scripts.proof.pairs import factors_of
import torch

def asked(size):
    words = "--dataset_source=random --train_iters=1 --tensor_parallel=2 --batch_size=8 --num_layers=8"
    return parse([*words.split(), f"--dummy_parallel={size}"]).config

def places(size):
    config, ranks = asked(size), 8
    options = config.distributed
    world = Groups(5, ranks, torch.device("cpu"), None, Traffic())
    divide(world, tuple, options)
    simulated = SimulatedGroup(5, ranks, "cuda", options=options)
    saved = Manifest("id", 1, ranks, vars(options), {}, {}, {})
    sheet = data_sheet(options, "cuda", ranks)
    resolved = resolve(config, ranks)
    plan = Planner(ranks, "cpu").plan(resolved)
    return {
        "divided": [world.dummy.world_size, world.dummy.rank, world.dummy.group, len(world.groups)],
        "simulated": [simulated.dummy.world_size, simulated.dummy.rank],
        "grid": world.grid.ranks("dummy"),
        "banner": describe_ranks(simulated),
        "manifest": saved.grid,
        "verified": shape_text(saved.grid),
        "resumed": _other_ranks(saved, SimpleNamespace(world_size=4, grid=RankGrid(4, asked(1).distributed))),
        "samples": [data_ranks(options, ranks), resolved.batch.sequential_micro_batches],
        "planned": plan.model.group.world_size,
        "node": ranks_per_layer(options),
        "link": [line for line in sheet.assumptions if "dummy" in line],
        "kinds": [kind for kind in sheet.collectives if "dummy" in kind],
        "searched": ["dummy_parallel" in WIDE, Search(config, 8, ranks, "cuda", 2**36).together],
    }

print(json.dumps({
    "one": places(1),
    "two": places(2),
    "proof": [LAYOUT["dummy_parallel"].label, LAYOUT["dummy_parallel"].values, factors_of(2, ())["dummy_parallel"]],
}))
"""


def lines(code: str, folder: Path) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the places say in a copy of the program that has one more option and one more row."""
    folder = tmp_path_factory.mktemp("with_a_dimension")
    for room in ("megatron_lite", "scripts"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / room, folder / room, ignore=ignored)
    for name, before, added in (
        ("system", "    tensor_parallel: PositiveInt", OPTION),
        ("dimensions", '    Dimension(\n        "tensor"', ROW),
    ):
        path = folder / "megatron_lite" / "config" / f"{name}.py"
        text = path.read_text("utf-8")
        assert text.count(before) == 1
        path.write_text(text.replace(before, added + before), "utf-8")
    return lines(PLACES, folder)


def test_one_rank_along_a_new_dimension_changes_nothing(found: Any) -> None:
    assert found["one"] == {
        "divided": [1, 0, None, 3],
        "simulated": [1, 0],
        "grid": [[rank] for rank in range(8)],
        "banner": "8 (4 data x 2 tensor)",
        "manifest": {"pipeline": 1, "data": 4, "dummy": 1, "tensor": 2},
        "verified": "4x1x2",
        "resumed": ", saved by 8 ranks",
        "samples": [4, 1],
        "planned": 4,
        "node": 2,
        "link": [],
        "kinds": [],
        "searched": [True, 2],
    }


def test_every_place_knows_a_new_dimension(found: Any) -> None:
    assert found["two"] == {
        "divided": [2, 0, [5, 7], 4],
        "simulated": [2, 0],
        "grid": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "banner": "8 (2 data x 2 dummy x 2 tensor)",
        "manifest": {"pipeline": 1, "data": 2, "dummy": 2, "tensor": 2},
        "verified": "2x2x2",
        "resumed": ", saved by 8 ranks with --dummy_parallel=2",
        "samples": [2, 1],
        "planned": 2,
        "node": 4,
        "link": ["dummy ranks sum at 450 GB/s"],
        "kinds": ["dummy sum"],
        "searched": [True, 4],
    }
    assert found["proof"] == [
        "D={}",
        ["1", "2", "5"],
        ["", "--dummy_parallel=2", "--dummy_parallel=5"],
    ]


def test_the_table_has_what_groups_have() -> None:
    """Each group of the table is an attribute; the kinds of its links are counted."""
    assert Groups.__annotations__ == {name: TYPES.get(name, Group).__name__ for name in GROUPS}
    assert {kind for row in DIMENSIONS for kind in row.kinds} <= {*KINDS}
    assert GROUPS.keys() == {*OF_SEVERAL, *(row.name for row in DIMENSIONS)}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(
    ("pipeline", "tensor", "shard"), [(1, 1, 4), (2, 2, 2), (4, 2, 0), (1, 16, 0)]
)
def test_groups_are_lines_of_the_grid(pipeline: int, tensor: int, shard: int, first: bool) -> None:
    options = DistributedConfig(
        pipeline_parallel=pipeline,
        tensor_parallel=tensor,
        data_parallel_shard=shard,
        pipeline_first=first,
    )
    grid, ranks = RankGrid(16, options), rank_grid(16, options)
    data = 16 // pipeline // tensor
    apart = ranks.view(pipeline, -1, shard or data, tensor)  # P, R, S, T
    axes = {"pipeline": (0,), "replicate": (1,), "shard": (2,), "tensor": (3,)}
    axes |= {"data": (1, 2), "samples": (1, 2), "layers": (1, 2, 3)}
    for name, along in axes.items():
        others = [axis for axis in range(4) if axis not in along]
        expected = apart.permute(*others, *along).reshape(-1, grid.size(name)).tolist()
        assert sorted(grid.ranks(name)) == sorted(sorted(group) for group in expected)
        for group in grid.ranks(name):
            assert [grid.place(rank)[name] for rank in group] == [*range(len(group))]
            assert grid.span(name) > group[-1] - group[0]
