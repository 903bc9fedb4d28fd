"""Tensors in the log: output of each option and level, on one rank and joined from several."""

import dataclasses
import itertools
import logging
import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from megatron_lite.config import Config, RunConfig
from megatron_lite.errors import UsageError
from megatron_lite.monitor import hashes, tensor_debug, tensor_log
from megatron_lite.monitor.tensor_debug import (
    LEVELS,
    TensorDebugger,
    join_ranks,
    memory_in_use,
    open_debugger,
)
from megatron_lite.monitor.tensor_log import (
    TensorEntry,
    compute_statistics,
    read_tensor_log,
    summarize,
    take_samples,
    write_tensor_log,
)
from megatron_lite.parameter import Initializer, ParameterSpec
from megatron_lite.zero.layout import lay_out

SHAPES = {
    "embedding.word.weight": (10, 8),
    "blocks.0.norm.weight": (8,),
    "blocks.0.up.weight": (24, 8),
}
STAGES = [("embedding.word.weight",), ("blocks.0.norm.weight", "blocks.0.up.weight")]


def values(name: str, salt: float = 0.0) -> Tensor:
    """Return the full value of a parameter (or, with a salt, of its gradient)."""
    count = int(np.prod(SHAPES[name]))
    return (torch.arange(count, dtype=torch.float32) * (1 + len(name)) + salt).view(SHAPES[name])


class FakePart:
    """A stage's shard on one rank."""

    def __init__(
        self, names: tuple[str, ...], rank: int, world_size: int, frozen: bool = False
    ) -> None:
        specs = [
            ParameterSpec(name, SHAPES[name], Initializer("constant", 0.0), "norm" not in name)
            for name in names
        ]
        self.layout, self.rank = lay_out(specs, world_size), rank
        self.split_over = SimpleNamespace(rank=0, world_size=1)
        self.frozen = frozen
        self.has_state = not frozen
        self._weights, self.grad_shard = self._shard(rank, 0.0), self._shard(rank, 0.5)

    def _shard(self, rank: int, salt: float) -> Tensor:
        full = torch.full((self.layout.numel,), torch.nan)  # padding must never show
        for slot in self.layout.slots:
            full[slot.offset : slot.end] = values(slot.spec.name, salt).view(-1)
        return full.view(self.layout.world_size, -1)[rank].clone()

    def read(self, kind: str) -> Tensor:
        assert kind == "weights"
        return self._weights


class FakeModel:
    def __init__(
        self, rank: int = 0, world_size: int = 1, frozen: frozenset[int] = frozenset()
    ) -> None:
        self.stages = [SimpleNamespace(observer=None) for _ in STAGES]
        self._parts = [
            (i, FakePart(names, rank, world_size, i in frozen)) for i, names in enumerate(STAGES)
        ]

    def observe(self, observer: TensorDebugger) -> None:
        for stage in self.stages:
            stage.observer = observer

    def parts(self) -> list[tuple[int, FakePart]]:
        return self._parts


def alone(tensor: Tensor) -> list[Tensor]:
    return [tensor]


def make_config(micro_batches: int = 1, **options: Any) -> Config:
    config = Config(run=RunConfig(**options))
    return dataclasses.replace(
        config, batch=dataclasses.replace(config.batch, sequential_micro_batches=micro_batches)
    )


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(
            f"{record.levelname} {record.getMessage()}"
            if record.levelno > 20
            else record.getMessage()
        )


def make_logger(rank: int = 0) -> tuple[logging.Logger, list[str]]:
    logger, handler = logging.Logger(f"rank {rank}", logging.INFO), Lines()
    logger.addHandler(handler)
    return logger, handler.lines


def fake_ranks(rank: int, world_size: int, gather: Callable[[Tensor], list[Tensor]]) -> Any:
    """Return what the debugger needs of `Distributed`."""
    data, tensor = SimpleNamespace(rank=rank), SimpleNamespace(rank=0, world_size=1)
    layers = SimpleNamespace(rank=rank, gathered=lambda tensor, _: torch.stack(gather(tensor)))
    return SimpleNamespace(
        rank=rank, world_size=world_size, layers=layers, data=data, tensor=tensor
    )


def open_alone(
    artifacts: Path | None = None, **options: Any
) -> tuple[TensorDebugger | None, list[str]]:
    logger, lines = make_logger()
    return open_debugger(make_config(**options), logger, fake_ranks(0, 1, alone), artifacts), lines


def run_phases(
    debugger: TensorDebugger | None, model: FakeModel, rank: int = 0, micro_batches: int = 1
) -> None:
    """Do what a run does: initialize, then one iteration of a two-layer model, hidden (2, 3, 4) on
    each rank."""
    if debugger is None:
        return
    debugger.attach(model)
    with debugger.phase("init"):
        debugger.parameters(model, "init")
    observer = model.stages[0].observer
    with debugger.phase("train_00001"):
        for micro in range(micro_batches if observer else 0):
            hidden = torch.arange(24.0).view(2, 3, 4) + 100 * rank + 1000 * micro
            observer.layer_output("embedding", hidden, micro)
            observer.layer_output("head", hidden[0, 0, 1], micro)
            observer.layer_gradient("head", hidden / 2, micro)
        debugger.gradients_reduced(model)
        debugger.parameters(model, "update")
    if observer:
        # an evaluation between iterations
        observer.layer_output("embedding", torch.ones(2, 3, 4), 0)


def logged(artifacts: Path, phase: str, rank: int = 0) -> dict[str, TensorEntry]:
    entries = read_tensor_log(artifacts / f"tensor_logs_{phase}_rank_{rank:03d}.safetensors")
    return {entry.name: entry for entry in entries}


# --- Statistics and samples


def test_statistics_are_those_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean, standard deviation and extremes agree with numpy in float64 to 1e-12, in one chunk and
    in many."""
    dtypes, shapes = (torch.float32, torch.bfloat16, torch.float16), ((1,), (7, 13), (3, 5, 7))
    for dtype, shape in itertools.product(dtypes, shapes):
        tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3 + 50).to(dtype)
        expected = tensor.double().numpy()
        whole = compute_statistics(tensor.view(-1))
        with monkeypatch.context() as small:
            for module in (tensor_log, hashes):
                small.setattr(module, "CHUNK_NUMEL", 4)
            cut = compute_statistics(tensor.view(-1))
        for statistics in (whole, cut):
            assert statistics.mean == pytest.approx(expected.mean(), rel=1e-12), (dtype, shape)
            assert statistics.std == pytest.approx(expected.std(), rel=1e-9, abs=1e-12), (
                dtype,
                shape,
            )
            assert statistics.rms == pytest.approx(np.sqrt((expected**2).mean()), rel=1e-12), (
                dtype,
                shape,
            )
            assert (statistics.minimum, statistics.maximum) == (expected.min(), expected.max()), (
                dtype,
                shape,
            )
            assert statistics.not_finite == 0 and statistics.checksum == whole.checksum, (
                dtype,
                shape,
            )


def test_checksum_sees_only_values() -> None:
    """The sign of a zero and the bits of a NaN change nothing; everything else does, as `bit_hash`
    is tested to see."""
    zeros = torch.zeros(5)
    assert compute_statistics(zeros).checksum == compute_statistics(-zeros).checksum
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert compute_statistics(nans[:1]).checksum == compute_statistics(nans[1:]).checksum


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_comes_to_the_same_summary(dtype: torch.dtype) -> None:
    """Checksum, extremes and samples of a tensor are those of its copy on the CPU, mean and
    deviation to 1e-12."""
    tensor = torch.randn(3, 1000, 777, generator=torch.Generator().manual_seed(1)).to(dtype)
    there, here = summarize("x", tensor.cuda(), 12), summarize("x", tensor, 12)
    assert there.statistics is not None and here.statistics is not None
    for name in ("checksum", "minimum", "maximum", "not_finite"):
        assert getattr(there.statistics, name) == getattr(here.statistics, name)
    for name in ("mean", "std"):
        assert getattr(there.statistics, name) == pytest.approx(
            getattr(here.statistics, name), rel=1e-12, abs=1e-15
        )
    assert (
        there.samples is not None
        and here.samples is not None
        and torch.equal(there.samples, here.samples)
    )


def test_samples_are_spread_evenly() -> None:
    """`count` of ten elements, one of each tenth, quarter, ...; all where there are fewer; exact in
    fp32."""
    flat = torch.arange(10, dtype=torch.bfloat16)
    for count, positions in ((1, [0]), (2, [0, 8]), (4, [0, 3, 5, 8]), (16, list(range(10)))):
        samples = take_samples(flat, count)
        assert samples.tolist() == positions and samples.dtype == torch.float32


def test_samples_see_every_column() -> None:
    """And every row, and no element twice, although the width divides the distance between
    samples."""
    for shape, count in (((64, 32), 64), ((64, 32), 128), ((4, 16, 128), 256), ((3, 7), 16)):
        samples = take_samples(torch.arange(float(np.prod(shape))), count)
        assert len(set(samples.tolist())) == count, shape
        assert len(set((samples % shape[-1]).tolist())) == shape[-1], shape
        borders = torch.arange(count + 1) * int(np.prod(shape)) // count
        assert bool((samples >= borders[:-1]).all()) and bool((samples < borders[1:]).all()), shape


def test_levels() -> None:
    """1: shape, dtype, device; 2: and mean and std; from 3 on: and 2**(level - 3) samples, at most
    all."""
    for level, samples in ((1, None), (2, None), (3, 1), (4, 2), (7, 16), (9, 60), (30, 60)):
        entry = summarize("x", torch.randn(3, 4, 5).transpose(0, 1), level)
        assert (entry.shape, entry.dtype, entry.device) == ((4, 3, 5), "float32", "cpu")
        assert (entry.statistics is not None) == (level >= 2)
        assert (None if entry.samples is None else entry.samples.numel()) == samples
        line = entry.line()
        assert line.startswith("x | (4, 3, 5) float32 cpu")
        assert ("mean" in line, "samples" in line) == (level >= 2, level >= 3)


def test_lines() -> None:
    """Some or all samples; what is not finite is counted; a rank's shard may be all padding."""
    line = summarize("x", torch.arange(64.0), 9).line()
    eight = " ".join(f"{number}.0000e+00" for number in range(8))
    assert (
        re.findall(r"samples (.*)", line) == [f"{eight} ... (64 in all)"]
        and "NOT FINITE" not in line
    )
    assert "in all" not in summarize("x", torch.arange(8.0), 9).line()
    assert (
        "3 NOT FINITE"
        in summarize("x", torch.tensor([1.0, torch.nan, torch.inf, -torch.inf]), 2).line()
    )
    empty = summarize("x", torch.empty(0), 5)
    assert empty.statistics is None and empty.samples is not None and empty.samples.numel() == 0
    assert empty.line().startswith("x | (0,) float32 cpu")


# --- Files


def test_file_round_trip(tmp_path: Path) -> None:
    """Everything comes back as it was, in order, whatever its values; nothing else is left in the
    folder."""
    tensors = {
        "b fw, mb=1/2": torch.randn(4, 3),
        "a": torch.tensor([torch.nan, -torch.inf, 1e-40]),
        "c": torch.ones(2),
    }
    entries = [
        summarize(name, tensor, level)
        for level, (name, tensor) in zip((5, 4, 1), tensors.items(), strict=True)
    ]
    path = tmp_path / "artifacts" / "log.safetensors"
    mask = os.umask(0o022)
    write_tensor_log(path, entries, {"phase": "init"})
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o644
    assert os.listdir(path.parent) == ["log.safetensors"]
    for before, after in zip(entries, read_tensor_log(path), strict=True):
        for field in TensorEntry._fields:
            a, b = getattr(before, field), getattr(after, field)
            if field == "samples" and a is not None:
                assert torch.equal(a.nan_to_num(nan=7), b.nan_to_num(nan=7))
            else:
                assert repr(a) == repr(b)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Missing, cut, noise, of another program, without entries: one line that names the file."""
    path = tmp_path / "log.safetensors"
    write_tensor_log(path, [summarize("x", torch.ones(5), 6)], {})
    whole = path.read_bytes()
    contents = [None, whole[:-1], b"noise" * 20]
    contents += [save({"x": torch.ones(5)}, about) for about in ({}, {"format": tensor_log.FORMAT})]
    for content in contents:
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(UsageError, match=re.escape(str(path))) as refusal:
            read_tensor_log(path)
        assert "\n" not in str(refusal.value)


# --- Which option logs what

EXPECTED = {
    "debug_layer_outputs": ["embedding fw, mb=1/1", "head fw, mb=1/1"],
    "debug_layer_gradients": ["head bw, mb=1/1"],
    "debug_param_init": [f"{name} init" for name in SHAPES],
    "debug_param_gradients": ["stage 0 gradient shards", "stage 1 gradient shards"],
    "debug_all_param_gradients": [f"{name} gradient" for name in SHAPES],
    "debug_param_update": [f"{name} update" for name in SHAPES],
}


def test_every_level_option_is_tested() -> None:
    names = {
        field.name for field in dataclasses.fields(RunConfig) if field.name.startswith("debug_")
    }
    others = {
        "debug_global_tensors",
        "debug_activation_memory",
        "debug_tensor_parallel",
        "debug_schedule",
    }
    assert names == {*LEVELS, *others}
    assert set(LEVELS) == set(EXPECTED)


def test_each_option_logs_its_tensors_and_no_others() -> None:
    for name, level in itertools.product(LEVELS, (1, 2, 6)):
        debugger, lines = open_alone(**{name: level})
        run_phases(debugger, FakeModel())
        phase = "init" if name == "debug_param_init" else "train_00001"
        assert [line.split(" | ")[:2] for line in lines] == [
            [phase, tensor] for tensor in EXPECTED[name]
        ]
        for line in lines:
            assert len(line.split(" | ")) == 3 + (level >= 2) + (level >= 3), line
            assert re.search(r"\| \([\d, ]*\) float32 cpu", line), line


def test_parameters_and_gradients_are_the_right_ones(tmp_path: Path) -> None:
    """Values come from the shards without padding; a frozen stage has parameters but no
    gradient."""
    options = {name: 20 for name in LEVELS}
    debugger, _ = open_alone(tmp_path, save_tensor_logs=True, show_tensor_logs=False, **options)
    run_phases(debugger, FakeModel(frozen=frozenset({1})))
    initial, trained = logged(tmp_path, "init"), logged(tmp_path, "train_00001")
    for name in SHAPES:
        for entry in (initial[f"{name} init"], trained[f"{name} update"]):
            assert entry.samples is not None and entry.shape == SHAPES[name]
            assert torch.equal(entry.samples, values(name).view(-1))
    word = trained["embedding.word.weight gradient"].samples
    assert word is not None and torch.equal(word, values("embedding.word.weight", 0.5).view(-1))
    shard = trained["stage 0 gradient shards"].samples
    assert shard is not None and torch.equal(shard, word)
    assert not [
        name for name in trained if name.startswith(("stage 1", "blocks.0")) and "gradient" in name
    ]


def test_local_tensors_are_each_ranks_own(tmp_path: Path) -> None:
    """Without --debug_global_tensors there is no collective: every rank logs its own outputs and
    its own pieces."""
    options = {name: 20 for name in LEVELS}

    def run(rank: int) -> dict[str, TensorEntry]:
        def gather(tensor: Tensor) -> list[Tensor]:
            raise AssertionError("a collective")

        logger, lines = make_logger(rank)
        config = make_config(save_tensor_logs=True, debug_global_tensors=False, **options)
        debugger = open_debugger(config, logger, fake_ranks(rank, 2, gather), tmp_path)
        run_phases(debugger, FakeModel(rank, 2), rank)
        assert lines
        return logged(tmp_path, "train_00001", rank)

    ranks = [run(rank) for rank in range(2)]
    for rank, entries in enumerate(ranks):
        hidden = entries["embedding fw, mb=1/1"].samples
        assert hidden is not None and torch.equal(hidden, torch.arange(24.0) + 100 * rank)
    for name in SHAPES:
        for what, salt in (("update", 0.0), ("gradient", 0.5)):
            pieces = [
                entry.samples
                for entries in ranks
                for label, entry in entries.items()
                if re.fullmatch(rf"{re.escape(name)}(\[\d+:\d+\])? {what}", label)
                and entry.samples is not None
            ]
            assert torch.equal(torch.cat(pieces), values(name, salt).view(-1)), name
    assert (
        "embedding.word.weight[0:64] update" in ranks[0]
        and "embedding.word.weight[64:80] update" in ranks[1]
    )
    assert ranks[0]["stage 0 gradient shard"].shape == (64,) and ranks[1][
        "stage 0 gradient shard"
    ].shape == (16,)


def test_join_ranks_keeps_the_dtype_of_a_loss() -> None:
    tensors = [torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor(2.0, dtype=torch.bfloat16)]
    joined = join_ranks(torch.stack(tensors))
    assert joined.shape == () and joined.dtype == torch.bfloat16 and float(joined) == 3.5


# --- Nothing asked for, nothing done


def test_observer_only_where_layers_are_wanted() -> None:
    """Options about parameters leave the stages without an observer."""
    for options, wanted in (
        ({"debug_param_init": 9, "debug_param_gradients": 9, "debug_param_update": 9}, False),
        ({"debug_layer_outputs": 1}, True),
        ({"debug_layer_gradients": 1}, True),
        ({"debug_activation_memory": True}, True),
    ):
        debugger, model = open_alone(**options)[0], FakeModel()
        assert debugger is not None
        debugger.attach(model)
        assert [stage.observer for stage in model.stages] == [debugger if wanted else None] * 2


def test_options_without_effect_cost_nothing(tmp_path: Path) -> None:
    """With nothing to show or save there is no debugger, unless for the memory; no line, and no
    file."""
    silent = {"show_tensor_logs": False, "debug_layer_outputs": 2}
    unused: list[dict[str, Any]] = [
        {},
        {"debug_tensor_parallel": True},
        {"save_tensor_logs": True},
        silent,
    ]
    for options in (
        *unused,
        {**silent, "debug_activation_memory": True},
        {**silent, "save_tensor_logs": True},
    ):
        saves = options.keys() > silent.keys() and "save_tensor_logs" in options
        debugger, lines = open_alone(tmp_path, **options)
        assert (debugger is None) == (options in unused)
        run_phases(debugger, FakeModel())
        assert any(tmp_path.iterdir()) == saves
        assert all("memory" in line for line in lines)


def test_saved_but_not_shown(tmp_path: Path) -> None:
    """--show_tensor_logs=0 only saves; lines have 8 samples, files all."""
    for show in (False, True):
        debugger, lines = open_alone(
            tmp_path / str(show), save_tensor_logs=True, show_tensor_logs=show, debug_param_init=20
        )
        run_phases(debugger, FakeModel())
        assert len(lines) == (len(SHAPES) if show else 0)
        assert all(len(re.findall(r"e[+-]\d\d", line)) == 10 for line in lines), lines  # mean, std
        entry = logged(tmp_path / str(show), "init")["embedding.word.weight init"]
        assert entry.samples is not None and entry.samples.numel() == 80
        assert not (tmp_path / str(show) / "tensor_logs_train_00001_rank_000.safetensors").exists()


def test_names_that_repeat_are_numbered(tmp_path: Path) -> None:
    """A layer that runs twice (recomputation) does not lose its first output."""
    debugger, _ = open_alone(tmp_path, save_tensor_logs=True, debug_layer_outputs=3)
    with debugger.phase("train_00001"):
        for value in (1.0, 2.0):
            debugger.layer_output("blocks.0", torch.full((1,), value), 0)
    assert list(logged(tmp_path, "train_00001")) == [
        "blocks.0 fw, mb=1/1",
        "blocks.0 fw, mb=1/1 #2",
    ]


def test_disk_that_cannot_be_written_costs_the_file_only(tmp_path: Path) -> None:
    blocked = tmp_path / "artifacts"
    blocked.write_text("in the way")
    debugger, lines = open_alone(blocked, save_tensor_logs=True, debug_param_init=1)
    run_phases(debugger, FakeModel())
    warnings = [line for line in lines if line.startswith("WARNING")]
    assert len(warnings) == 1 and str(blocked) in warnings[0] and "continues" in warnings[0]


# --- Memory


def test_memory_after_each_layer() -> None:
    """One line per layer and direction, without tensors; on CPU it says that it is the process's
    resident set."""
    debugger, lines = open_alone(debug_activation_memory=True)
    run_phases(debugger, FakeModel())
    with debugger.phase("train_00002"):
        debugger.layer_gradient("embedding", None, 0)
    assert [line.split(" | ")[1] for line in lines] == [
        "embedding fw, mb=1/1",
        "head fw, mb=1/1",
        "head bw, mb=1/1",
        "embedding bw, mb=1/1",
    ]
    assert all(
        re.search(r"\| memory: resident set of the process [\d,]+\.\d MiB$", line) for line in lines
    ), lines


def test_memory_in_use_is_measured() -> None:
    """On CPU the memory in use grows by 64 MiB of new pages, within 8 MiB (a tensor may lie in
    pages freed before)."""

    def resident() -> float:
        found = re.search(r"([\d,]+\.\d) MiB", memory_in_use(torch.device("cpu")))
        assert found
        return float(found[1].replace(",", ""))

    before = resident()
    with mmap.mmap(-1, 64 * 2**20) as pages:
        pages[:: mmap.PAGESIZE] = bytes(len(pages) // mmap.PAGESIZE)
        assert abs(resident() - before - 64) < 8


def test_memory_on_a_gpu_is_that_of_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * 2**20)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2048 * 2**20)
    assert memory_in_use(torch.device("cuda", 0)) == "allocated 3.0 MiB, reserved 2,048.0 MiB"


def test_memory_where_there_is_no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /proc only the peak is known, and the text says so."""
    monkeypatch.setattr(tensor_debug, "proc_file", lambda pid, name: b"")
    assert re.fullmatch(
        r"largest resident set of the process so far [\d,.]+ MiB",
        memory_in_use(torch.device("cpu")),
    )
