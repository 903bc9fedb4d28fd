"""docs/metrics.md names every number of metrics.jsonl, by the code that writes them and by a run,
and no other."""

import ast
import inspect
import json
import re
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.monitor.metrics import LogWindow, StepTimer
from megatron_lite.monitor.trackers.opening import Trackers
from megatron_lite.optimizer.balance import Balance
from megatron_lite.optimizer.rules.update_clipping import UpdateClipping
from megatron_lite.outputs.evaluation import evaluate
from megatron_lite.outputs.training_log import log_training
from tests.support import documents
from tests.support.documents import ROOT
from tests.support.harness import LLAMA, run_distributed, tiny_config, train_whole

pytestmark = pytest.mark.guides
GUIDE = documents.read("metrics")
EVERYWHERE = "In every record"


def names_by_section() -> dict[str, set[str]]:
    """Names in the first column of each section's table."""
    sections = re.split(r"^## ", GUIDE, flags=re.M)[1:]
    rows = {
        section.partition("\n")[0]: re.findall(r"^\| (`.*?) \|", section, re.M)
        for section in sections
    }
    return {title: set(re.findall(r"`([^`]+)`", " ".join(cells))) for title, cells in rows.items()}


def names_of(phase: str) -> set[str]:
    """Documented names of a phase, with those of every record."""
    (section,) = (names for title, names in names_by_section().items() if f"`{phase}`" in title)
    return section | names_by_section()[EVERYWHERE]


def keys_in(function: Callable[..., Any]) -> set[str]:
    """Words that a function makes keys of a record: in dict literals, and where it assigns to
    `record[...]`."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Dict):
            found |= {
                key.value
                for key in node.keys
                if isinstance(key, ast.Constant) and isinstance(key.value, str)
            }
        elif isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Subscript):
            if isinstance(target.value, ast.Name) and target.value.id == "record":
                assert isinstance(target.slice, ast.Constant)
                found.add(target.slice.value)
    return found


def test_names_in_the_code() -> None:
    """Every number that the code of training writes is described, and nothing else is."""
    sources = {path: path.read_text() for path in (ROOT / "megatron_lite").rglob("*.py")}
    pauses = {
        f"{kind}_s"
        for text in sources.values()
        for kind in re.findall(r'timer\.pause\("(\w+)"\)', text)
    }
    rates = StepTimer._rates, StepTimer._rates_between
    of_optimizer = UpdateClipping.record, Balance.record
    functions = (log_training, LogWindow.close, *rates, *of_optimizer, Trackers.log)
    written = pauses.union(*map(keys_in, functions))
    assert names_of("training") == written
    assert keys_in(evaluate) <= names_of("validation")
    callers = {path.name for path, text in sources.items() if "trackers.log" in text}
    others = {"setup_run.py"}  # for --watch
    assert callers == {"training_log.py", "evaluation.py", "samples.py"} | others, (
        "who else writes records?"
    )


def records_of(distributed: Any, folder: str) -> None:
    """Train with everything on that adds numbers on a CPU."""
    options = {
        "validation_iters": 1,
        "validation_interval": 2,
        "test_iters": 1,
        "ema_type": "ema",
        "log_interval": 1,
    }
    options |= {
        "watch": ("grads", "params", "updates", "opt_state"),
        "watch_interval": 1,
        "export_interval": 2,
    }
    options |= {"clip_update_norm_sigma": 2.0, "checkpoint_interval": 2}
    experts = {"num_experts": 4, "num_experts_per_token": 2, "moe_router_choice_bias": False}
    options |= LLAMA | experts | {"moe_router_bias_update_rate": 0.0}
    train_whole(distributed, tiny_config(train_iters=4, experiment_dir=folder, **options))


def test_names_in_a_run(tmp_path: Path) -> None:
    """All keys of all phases of a run are described under their phase, and the lines that read them
    print them."""
    run_distributed(1, records_of, str(tmp_path / "runs" / "mine"))
    records = [
        json.loads(line)
        for line in (tmp_path / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()
    ]
    assert {record["phase"] for record in records} == {"training", "validation", "test", "watch"}
    statistics = {name.rpartition("/")[2] for name in names_of("watch") if "/" in name}
    for record in records:
        names = set(record)
        if record["phase"] == "watch":
            names = {name for name in names if name.rpartition("/")[2] not in statistics}
        assert names <= names_of(record["phase"]), record
    on_a_cpu = set().union(*(record for record in records if record["phase"] == "training"))
    gpu_only = {"mfu", "max_allocated_mib", "max_reserved_mib"}
    assert names_of("training") - on_a_cpu == gpu_only | {
        "skip_reason",
        "samples_s",
        "counted_since",
    }
    (command,) = documents.blocks(GUIDE)
    printed = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    losses = [record["loss"] for record in records if record["phase"] == "training"]
    assert [line.split()[:2] for line in printed.splitlines()] == [
        [str(n), str(x)] for n, x in enumerate(losses, 1)
    ]
