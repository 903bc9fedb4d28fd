"""Manifests with a right checksum and wrong content: refused in one line, or accepted with the
meaning that they state.

Whatever is accepted goes through everything that a resume reads from it: comparisons with the
command line, the state of the optimizer, its guards and the log window, the shards, and the model
that a converter builds.
"""

from __future__ import annotations

import copy
import json
import random
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lite.checkpoint import compatibility, manifest
from megatron_lite.checkpoint.decoding import decode
from megatron_lite.checkpoint.saved_state import RUN_STATE, check_options
from megatron_lite.config import AveragingConfig, Config, OptimizerConfig, flatten
from megatron_lite.errors import CheckpointError, DamagedError
from megatron_lite.huggingface import convert, model_folder
from megatron_lite.kernels.adamw import Range, Ranges
from megatron_lite.monitor.metrics import LogWindow
from megatron_lite.optimizer.averaging import Averaging
from megatron_lite.optimizer.guards import Guard
from megatron_lite.optimizer.loss_scale import LossScale
from megatron_lite.optimizer.rolling import RollingStatistics
from megatron_lite.optimizer.rules.update_clipping import NormClipping, UpdateClipping
from tests.checkpoint.test_damage import AVERAGED, FROZEN, TENSOR, as_version, expect_fallback, seal
from tests.checkpoint.test_writing import load, names, save
from tests.support.fakes import one_rank, run_state
from tests.support.harness import tiny_config

CPU = torch.device("cpu")


class State:
    """Everything of a run that has state beside the shards, as `Optimizer` and `LogWindow` put it
    together."""

    def __init__(self) -> None:
        options = OptimizerConfig(skip_bad_steps=True, skip_bad_steps_window=4)
        self.guard = Guard(options, True, CPU, 100)
        self.scale = LossScale(options, "fp16", CPU)
        distributed: Any = one_rank()
        trained: Any = (None, SimpleNamespace(has_memory=True))
        ranges = Ranges([Range(64 * i, 64 * i + 64, 1.0, 1.0) for i in range(3)], CPU)
        self.clipping: UpdateClipping = NormClipping(
            RollingStatistics(4, 6.0, CPU), [trained], [ranges], distributed
        )
        self.averaging = Averaging(AveragingConfig(ema_type="ema"), [])
        self.window = LogWindow(CPU)
        self.updates = torch.zeros(())

    def train(self, steps: int) -> State:
        """Take steps with random numbers, one of which is NaN."""
        generator = torch.Generator().manual_seed(1)
        for step in range(1, steps + 1):
            loss = torch.rand((), generator=generator, dtype=torch.float64)
            loss = loss * torch.nan if step == steps else loss
            verdict = self.guard.judge(
                step,
                loss,
                torch.rand((), generator=generator),
                self.scale.can_shrink() if self.scale.dynamic else None,
            )
            self.scale.update(verdict.overflow)
            self.clipping.factors([torch.rand(3, generator=generator).double()], verdict.skipped)
            self.averaging.begin()
            self.window.add(loss, 10, verdict.skipped, 0.0)
        return self

    def save(self) -> dict[str, Any]:
        return {
            "optimizer": {
                "updates": int(self.updates),
                "loss_scale": self.scale.state(),
                "guard": self.guard.state(),
                "rule": {"clipping": self.clipping.state()},
                "averaging": self.averaging.state(),
            },
            "window": self.window.state(),
            "evaluation_due": True,
        }

    def load(self, state: dict[str, Any]) -> None:
        optimizer = compatibility.optimizer_state(state, "adamw", "adamw")
        self.updates.fill_(optimizer["updates"])
        self.scale.load_state(optimizer["loss_scale"])
        self.guard.load_state(optimizer.get("guard", {}))
        self.clipping.load_state(optimizer.get("rule", {}).get("clipping", {}))
        self.averaging.load_state(optimizer.get("averaging", {}))
        self.window.load_state(state["window"])


CONFIG = tiny_config(
    1,
    train_iters=100,
    lr_decay_style="cosine",
    lr_decay_iters=100,
    lr_warmup=5,
    lr_cycle_minima=(20, 60),
    batch_size_schedule=("0:2", "50:4"),
    rope_type="linear",
    use_rotary_embeddings=True,
    rope_factor=2.0,
    lr_scales=("blocks:0.5",),
    weight_decay_modules=("mlp",),
)

OTHER = tiny_config(1, train_iters=1000)
DELETE = object()  # the key instead of giving it a value


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with every kind of state and slice."""
    root = tmp_path_factory.mktemp("checkpoints")
    save(root, 20, 1, world_size=4, tensor_ranks=2, state=State().train(9).save())
    return root / "20"


@pytest.fixture(scope="module")
def values(saved: Path) -> dict[str, Any]:
    """The content of its manifest, with a resolved configuration."""
    content = json.loads((saved / "manifest.json").read_bytes())
    return {**content, "config": json.loads(json.dumps(flatten(CONFIG)))}


def use(content: manifest.Manifest) -> None:
    """Read from a manifest what a resume and a converter read; only a CheckpointError may come of
    it."""
    for config in (CONFIG, OTHER):
        for difference in compatibility.differences(
            content.config, config, "architecture", "data", None
        ):
            assert str(difference).isprintable()
        for moved in (compatibility.moved_samples, compatibility.moved_rate):
            assert (moved(content.config, config, content.iteration) or "x").isprintable()
        list(compatibility.data_changes(content, config, {"sets": [], "tokenizer": None}))
    compatibility.saved_optimizer(content.config)
    State().load(content.state)
    State().guard.dropped.load_state(
        content.state["optimizer"].get("guard", {}).get("dropped", run_dropped())
    )
    model_folder.saved_model_type(content.config)
    try:
        model_folder.resolved_model(model_folder.checkpoint_values(content.config, "here"), "here")
    except CheckpointError:
        pass


def run_dropped() -> dict[str, Any]:
    return State().guard.dropped.state()


def seen(content: manifest.Manifest) -> Any:
    """Return what the program understood, as JSON with sorted names."""
    return json.dumps({**json.loads(manifest.dump(content)), "crc32": 0}, sort_keys=True)


JUNK: tuple[Callable[[], Any], ...] = tuple(
    (lambda value=value: copy.deepcopy(value))  # type: ignore[misc]
    for value in (
        *(None, True, False, -1, 0, 1, 2, 7, 2**31, 2**63 - 1, 2**63, 10**400, -(10**300)),
        *(0.0, -0.0, 1e-320, 0.5, 1.5, -2.5, 1e308, float("nan"), float("inf"), float("-inf")),
        *(
            "",
            "x",
            "zz",
            "0",
            "nan",
            "../x",
            "a" * 5000,
            "\x1b[31m",
            "\ud800",
            "\0",
            "0x1.8p+1",
            "0x1p+9999",
            "1:2",
        ),
        *(
            "0:0",
            "constant,-1,1e-3",
            "linear,5,1,0;x",
            "adamw",
            "auto",
            "all",
            "none",
            "full:3",
            "activation,full:8",
        ),
        *(
            [],
            [[]],
            {},
            {"a": 1},
            [1, 2],
            [1.0, 2.0],
            ["a"],
            ["0:1"],
            [None],
            [[1.0, 2.0]],
            [[1.0]],
            [[]] * 20_000,
        ),
    )
)


def similar(value: Any, generator: random.Random) -> Any:
    """Return another value of the same type, often a legal one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        number = generator.choice(
            (value + 1, value * 2, value - 1, generator.randrange(1, 10**6), 2**62)
        )
        return type(value)(number) if abs(number) < 1e300 else value
    if isinstance(value, list):
        return copy.deepcopy(value[: generator.randrange(len(value) + 1)])
    return (
        value
        if value is None or isinstance(value, dict)
        else generator.choice(("x", "adamw", value + "1", ""))
    )


def changed(values: dict[str, Any], generator: random.Random) -> dict[str, Any]:
    """Return the values after one to three changes at random places, most of them in the options
    and the state."""
    values = copy.deepcopy(values)
    for _ in range(generator.choice((1, 1, 1, 2, 3))):
        node: Any = values
        key: Any = generator.choice(
            ("config", "config", "state", "state", "files", "parameters", *values)
        )
        while key in ("config", "state") or generator.random() < 0.8:
            child = node[key] if not isinstance(node, dict) else node.get(key)
            if not isinstance(child, (dict, list)) or not child:
                break
            node = child
            key = (
                generator.choice(list(node))
                if isinstance(node, dict)
                else generator.randrange(len(node))
            )
        way = generator.random()
        if way < 0.1 and isinstance(node, dict) and key in node:
            del node[key]
        elif way < 0.2 and isinstance(node, dict):
            node[generator.choice(("extra", "", "lr", "updates", "a" * 300))] = generator.choice(
                JUNK
            )()
        elif way < 0.3 and isinstance(node, list):
            node.extend(copy.deepcopy(node) * generator.choice((1, 3)))
        elif way < 0.4 and isinstance(node, dict):
            node[key] = copy.deepcopy(generator.choice(list(node.values()) or [None]))
        elif way < 0.7 and (isinstance(node, list) or key in node):
            node[key] = similar(node[key], generator)
        else:
            node[key] = generator.choice(JUNK)()
    return values


def fuzz(
    values: dict[str, Any], folder: Path, cases: int, layout: dict[str, Any]
) -> tuple[int, int]:
    """Return how many of the changed manifests were accepted and refused; load what is accepted."""
    generator = random.Random(15)
    accepted = 0
    refused = 0
    for case in range(cases):
        now = changed(values, generator)
        (folder / "manifest.json").write_bytes(seal(now))
        start_s = time.process_time()  # of this process: a busy machine may pause it for longer
        try:
            content = manifest.read(folder)
        except DamagedError as error:
            assert (
                str(error).startswith("manifest.json: ")
                and str(error).isprintable()
                and len(str(error)) < 700
            ), case
            refused += 1
        else:
            if now["version"] == manifest.VERSION:
                assert seen(content) == json.dumps({**now, "crc32": 0}, sort_keys=True), case
            use(content)
            accepted += 1
        assert time.process_time() - start_s < 1.0, case
        try:
            loaded, _, lines = load(folder.parent, layout.get("tensor_ranks", 1), **layout)
        except CheckpointError:  # of another model
            continue
        assert loaded is not None and (loaded.iteration == 10) == any(
            "; skipped, " in line for line in lines
        ), case
    return accepted, refused


@pytest.mark.parametrize(
    "version", [3, *(pytest.param(version, marks=pytest.mark.slow) for version in (4, 5)), 6]
)
@pytest.mark.parametrize("cases", [60, pytest.param(5000, marks=pytest.mark.slow)])
def test_random_content_is_refused_or_means_what_it_says(
    saved: Path, values: dict[str, Any], version: int, cases: int, tmp_path: Path
) -> None:
    """No other exception, in less than a second each, within 100 MiB; nothing is read outside of
    its files, and what cannot be used is reported and survived."""
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    layout = {3: AVERAGED, 4: FROZEN}.get(version, TENSOR)  # columns since version 5
    if version < 5:
        save(tmp_path, 20, 1, world_size=2, state=State().train(9).save(), **layout)
    else:
        shutil.copytree(saved, tmp_path / "20")
    save(tmp_path, 10, 1, world_size=2, **layout)
    older = {**as_version(version, tmp_path / "20"), "config": values["config"]}
    accepted, refused = fuzz(older, tmp_path / "20", cases, layout)
    assert names(tmp_path) == {"10", "20"}
    assert accepted > cases // 10 and refused > cases // 3, (accepted, refused)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 100 * 1024


WEIGHTS = "parameters/embedding.word.weight/weights"  # (37, 16)
COLUMNS = "parameters/blocks.0.mlp.up.weight/weights"  # (65, 16), of which two ranks have eight columns each


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("format", "other", "not of the format megatron_lite_checkpoint"),
        ("version", True, "version is not a count"),
        ("extra", 1, "it has the unknown key 'extra'"),
        ("config", DELETE, "it has no config"),
        ("save_id", 1, "save_id is not a text"),
        ("iteration", -1, "iteration is not a count"),
        ("iteration", 20.0, "iteration is not a count"),
        ("world_size", True, "world_size is not a positive count"),
        ("world_size", 3, "names 4 files for 3 ranks"),
        (
            "files/rank_001.safetensors/size",
            float("nan"),
            "files.rank_001.safetensors.size is not a positive count",
        ),
        ("files/rank_001.safetensors/size", 10**30, "size is not a positive count"),
        (
            "files/rank_001.safetensors/size",
            2**60,
            "rank_001.safetensors does not have one checksum per block",
        ),
        ("files/rank_001.safetensors/block_bytes", 0, "block_bytes is not a positive count"),
        ("files/rank_001.safetensors/crc32", -1, "crc32 is not hexadecimal digits"),
        ("files/rank_001.safetensors/crc32", "x" * 8, "crc32 is not hexadecimal digits"),
        ("files/rank_001.safetensors/crc32", "", "does not have one checksum per block"),
        ("parameters/x", None, "parameters.x is not an object"),
        (
            "parameters/embedding.word.weight/dtype",
            "float64",
            "dtype is not float32 or bfloat16 or float16",
        ),
        (
            "parameters/embedding.word.weight/dtype",
            ["bfloat16"],
            "dtype is not float32 or bfloat16 or float16",
        ),
        (
            "parameters/embedding.word.weight/dtype",
            "bfloat16",
            "the slices of weights have more or fewer bytes",
        ),
        ("parameters/embedding.word.weight/shape", [37, 0], "shape[1] is not a positive count"),
        ("parameters/embedding.word.weight/shape", [2**62] * 8, "the slices of weights hold"),
        (
            "parameters/embedding.word.weight/shape",
            [38, 16],
            "the slices of weights hold 592 of 608 elements",
        ),
        ("parameters/embedding.word.weight/momentum", [], "has the unknown key 'momentum'"),
        (
            "parameters/embedding.word.weight/weights",
            DELETE,
            "parameters.embedding.word.weight has no weights",
        ),
        ("parameters/embedding.word.weight/average", None, "average is not a list"),
        (
            "parameters/embedding.word.weight/average",
            [],
            "the slices of average hold 0 of 592 elements",
        ),
        (WEIGHTS + "/0", DELETE, "the slices of weights leave a gap or overlap at element 0"),
        (WEIGHTS + "/0", [1, 2, 3], "weights[0] is not a list of 5"),
        (WEIGHTS + "/0/0", "rank_009.safetensors", "lie outside the listed files"),
        (WEIGHTS + "/0/0", ["rank_000.safetensors"], "weights[0][0] is not a text"),
        (WEIGHTS + "/0/1", 10**9, "lie outside the listed files"),
        (WEIGHTS + "/0/1", -8, "weights[0][1] is not a count"),
        (WEIGHTS + "/0/2", 3, "more or fewer bytes than their elements need"),
        (WEIGHTS + "/0/4", None, "weights[0][4] is not a positive count"),
        (COLUMNS + "/1/4", 7, "more or fewer bytes than their elements need"),
        (COLUMNS + "/1/4", 10**9, "more or fewer bytes than their elements need"),
        (COLUMNS + "/1", DELETE, "of 1040 elements"),
        ("state", {}, "state has no optimizer"),
        ("state", [], "state is not an object"),
        ("state/optimizer", None, "state.optimizer is not an object"),
        ("state/optimizer/updates", -1, "state.optimizer.updates is not a count"),
        (
            "state/optimizer/loss_scale/scale",
            1e300,
            "state.optimizer.loss_scale.scale is not a number > 0 that fits",
        ),
        ("state/optimizer/loss_scale/patience", 1.0, "patience is not an integer"),
        ("state/optimizer/guard/dropped/last", ["0x0.0p+0"], "last is not a list of 5"),
        (
            "state/optimizer/guard/dropped/last",
            ["nan"] * 5,
            "last[4] is not a hexadecimal float that is an iteration",
        ),
        ("state/optimizer/guard/usual", [[1.0]], "usual[0] is not a list of 2"),
        ("state/optimizer/averaging", {"type": "ema"}, "state.optimizer.averaging has no updates"),
        ("state/window/loss", "1.5", "state.window.loss is not a hexadecimal float"),
        ("state/evaluation_due", 1, "state.evaluation_due is not true or false"),
        ("state/extra", 1, "state has the unknown key 'extra'"),
        ("config", [], "config is not an object"),
        ("config/batch_size", "x", "config: batch_size: must be of type int"),
        ("config/batch_size", 0, "config: batch_size: must be >= 1"),
        ("config/batch_size", 10**400, "config: batch_size: too large"),
        ("config/batch_size_schedule", [1, 2], "config: batch_size_schedule: must be of type str"),
        (
            "config/batch_size_schedule",
            ["1"],
            "config: batch_size_schedule: --batch_size_schedule=1: ",
        ),
        ("config/lr_schedule", "x", "config: lr_schedule: --lr_schedule: stage 1"),
        (
            "config/rotary_embedding_scale",
            "zz",
            "config: rotary_embedding_scale: must be of type float",
        ),
        ("config/optimizer", ["a"], "config: optimizer: must be of type str"),
        ("config/optimizer", "other", "config: optimizer: takes adamw"),
        ("config/gated", 1, "config: gated: must be of type bool"),
        ("config/gated", None, "config: gated: must be of type bool"),
        ("config/lr", float("nan"), "config: lr: must be >= 0"),
        ("config/data_path", ["\x1b[31m"], "config: data_path: contains a control character"),
    ],
)
def test_wrong_content_is_named(
    values: dict[str, Any], place: str, value: Any, message: str, tmp_path: Path
) -> None:
    """One line names the place and the rule; a run falls back to an older checkpoint."""
    now = copy.deepcopy(values)
    *path, key = place.split("/")
    node: Any = now
    for name in path:
        node = node[int(name) if isinstance(node, list) else name]
    at = int(key) if isinstance(node, list) else key
    if value is DELETE:
        del node[at]
    else:
        node[at] = value
    (tmp_path / "manifest.json").write_bytes(seal(now))
    with pytest.raises(DamagedError) as caught:
        manifest.read(tmp_path, 20)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "a/rank_001.safetensors",
        "rank_001.safetensors\n",
        "rank_٠٠١.safetensors",
    ],
)
def test_a_file_has_a_name_of_the_format(values: dict[str, Any], name: str, tmp_path: Path) -> None:
    """No path leads out of the folder."""
    files = {**values["files"], name: values["files"]["rank_001.safetensors"]}
    del files["rank_001.safetensors"]
    (tmp_path / "manifest.json").write_bytes(seal({**values, "files": files}))
    with pytest.raises(DamagedError, match="is not a file name of this format"):
        manifest.read(tmp_path, 20)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "embedding.word.weight",
            "parameter 'embedding.word.weight': the slices of exp_avg leave a gap or overlap at",
        ),
        ("blocks.0.mlp.up.weight", "the slices of exp_avg leave gaps or overlap from element"),
    ],
)
def test_slices_that_leave_a_gap(name: str, message: str, tmp_path: Path) -> None:
    """A slice that a forger moved away makes a checkpoint damaged; between columns the gap is found
    by who reads it."""
    for iteration in (10, 20):
        save(tmp_path, iteration, iteration // 10, world_size=2, tensor_ranks=2)
    content = json.loads((tmp_path / "20" / "manifest.json").read_bytes())
    content["parameters"][name]["exp_avg"][1][3] = 10**6
    (tmp_path / "20" / "manifest.json").write_bytes(seal(content))
    expect_fallback(tmp_path, f"manifest.json: {message}")


def test_other_versions_may_have_other_options(values: dict[str, Any], tmp_path: Path) -> None:
    """Unknown options and missing ones are no damage, whatever the values of the unknown ones
    are."""
    now = copy.deepcopy(values)
    now["config"]["option_of_tomorrow"] = {"a": [1, None]}
    del (
        now["config"]["batch_size"],
        now["config"]["lr_decay_iters"],
        now["config"]["batch_size_schedule"],
    )
    (tmp_path / "manifest.json").write_bytes(seal(now))
    use(manifest.read(tmp_path))
    for state in (run_state(), convert._fresh_state()):
        decode(RUN_STATE, state)
    check_options({})
    check_options(json.loads(json.dumps(flatten(Config()))))


def test_every_state_is_legal() -> None:
    """A run's own state passes at any time, with and without each part."""
    for steps in (0, 1, 9):
        state = State().train(steps).save()
        decode(RUN_STATE, json.loads(json.dumps(state)))
        for key in ("guard", "rule", "averaging"):
            for rest in ({}, None):
                other = copy.deepcopy(state)
                other["optimizer"].pop(key)
                other["optimizer"] |= {} if rest is None else {key: rest}
                decode(RUN_STATE, other)
