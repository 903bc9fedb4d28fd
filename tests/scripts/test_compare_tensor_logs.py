"""scripts/compare_tensor_logs.py: what counts as the same, which tensor is named first, and what it
refuses."""

import math
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_lite.errors import UsageError
from megatron_lite.monitor.tensor_log import summarize, write_tensor_log
from scripts import compare_tensor_logs as script

FILE = "tensor_logs_train_00001_rank_000.safetensors"


def write(folder: Path, tensors: Mapping[str, Tensor], level: int = 5, file: str = FILE) -> Path:
    write_tensor_log(
        folder / file, [summarize(name, tensor, level) for name, tensor in tensors.items()], {}
    )
    return folder


def make_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {f"blocks.{i} fw, mb=1/1": torch.randn(4, 25, generator=generator) * 3 for i in range(5)}


def test_same_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same tensors, logged in another order, are the same: exit code 0 and one line."""
    tensors = make_tensors()
    a, b = write(tmp_path / "a", tensors), write(tmp_path / "b", dict(reversed(tensors.items())))
    assert script.compare(a, b) == []
    assert script.main([str(a), str(b)]) == 0
    assert capsys.readouterr().out == "the same: 5 tensors in 1 files\n"


def test_one_bit_in_one_element_is_found(tmp_path: Path) -> None:
    """Whether it is among the four samples or not."""
    a = write(tmp_path / "a", make_tensors())
    for element in range(100):
        tensors = make_tensors()
        flat = tensors["blocks.3 fw, mb=1/1"].view(-1)
        before = flat[element].clone()
        flat[element] = torch.nextafter(before, torch.tensor(100.0))
        (difference,) = script.compare(a, write(tmp_path / "b", tensors))
        assert difference.name == "blocks.3 fw, mb=1/1" and difference.file == FILE, element
        sampled = element in (0, 40, 55, 96)
        assert difference.what == (
            "1 of 4 samples differ" if sampled else "differs outside the samples"
        ), element
        if sampled:
            assert difference.max_abs == float(flat[element]) - float(before), element


def test_first_difference_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first in the order of the first run's log, with the largest difference, absolute and over
    the RMS."""
    tensors = make_tensors()
    a = write(tmp_path / "a", tensors)
    wrong = {name: tensor.clone() for name, tensor in tensors.items()}
    for i in (2, 3, 4):
        wrong[f"blocks.{i} fw, mb=1/1"][0, 0] += 0.5
    b = write(tmp_path / "b", dict(reversed(wrong.items())))
    assert script.main([str(a), str(b), "--limit=2"]) == 1
    *lines, more, count, first = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[1] for line in lines] == [
        "blocks.2 fw, mb=1/1",
        "blocks.3 fw, mb=1/1",
    ]
    assert more == "... and 1 more" and count == "different: 3 of 5 tensors in 1 files"
    rms = float(tensors["blocks.2 fw, mb=1/1"].double().square().mean().sqrt())
    expected = f"max abs 5.000e-01, {0.5 / rms:.3e} of RMS | 1 of 4 samples differ"
    assert first == f"first: {FILE} | blocks.2 fw, mb=1/1 | {expected}"


def test_tolerances(tmp_path: Path) -> None:
    """atol is absolute, rtol a fraction of the tensor's RMS; beyond either alone is a
    difference."""
    tensor = torch.full((64,), 100.0)
    tensor[::2] = -100.0  # RMS 100
    wrong = tensor.clone()
    wrong[0] += 0.5
    a, b = write(tmp_path / "a", {"x": tensor}), write(tmp_path / "b", {"x": wrong})
    assert len(script.compare(a, b)) == 1
    for rtol, atol, same in (
        (0.004, 0, False),
        (0.006, 0, True),
        (0, 0.4, False),
        (0, 0.6, True),
        (0.003, 0.3, True),
    ):
        assert (script.compare(a, b, rtol, atol) == []) == same, (rtol, atol)


def test_tolerances_hold_outside_the_samples(tmp_path: Path) -> None:
    """A large error that no sample sees is seen by the statistics."""
    tensor = torch.randn(100, generator=torch.Generator().manual_seed(1))
    wrong = tensor.index_fill(0, torch.tensor([1]), 1000.0)
    a, b = (
        write(tmp_path / name, {"x": value}, 4) for name, value in (("a", tensor), ("b", wrong))
    )
    (difference,) = script.compare(a, b, rtol=1e-3)
    assert difference.what == "differs outside the samples"
    assert difference.max_abs == pytest.approx(1000 - float(tensor.max()))


def test_dtypes_compare_within_tolerances_only(tmp_path: Path) -> None:
    """bf16 against fp32: another dtype without tolerances, the same tensor with those of bf16."""
    tensors = make_tensors()
    a = write(tmp_path / "a", tensors, 20)
    b = write(tmp_path / "b", {name: tensor.bfloat16() for name, tensor in tensors.items()}, 20)
    exact = script.compare(a, b)
    assert (
        len(exact) == 5
        and exact[0].what == "dtypes float32 and bfloat16, 100 of 100 samples differ"
    )
    assert script.compare(a, b, rtol=2e-2) == []
    assert len(script.compare(a, b, rtol=1e-5)) == 5
    rounded = write(
        tmp_path / "rounded",
        {name: tensor.bfloat16().float() for name, tensor in tensors.items()},
        20,
    )
    assert (
        script.compare(rounded, b)[0].what
        == "dtypes float32 and bfloat16, no difference of values found"
    )


@pytest.mark.parametrize("rtol", [0.0, 0.1])
def test_values_that_are_not_finite(tmp_path: Path, rtol: float) -> None:
    """NaN is the same as NaN at the same place, and as nothing else; likewise an infinity."""
    special = torch.tensor([1.0, math.nan, math.inf, -math.inf])
    a = write(tmp_path / "a", {"x": special}, 20)
    assert script.compare(a, write(tmp_path / "b", {"x": special.clone()}, 20), rtol) == []
    for position in range(1, 4):
        for value in (2.0, math.inf if position != 2 else math.nan):
            wrong = special.clone()
            wrong[position] = value
            (difference,) = script.compare(a, write(tmp_path / "b", {"x": wrong}, 20), rtol)
            assert difference.max_abs == math.inf and difference.max_rel == math.inf


@pytest.mark.parametrize("rtol", [0.0, 0.1])
def test_shapes_and_missing_tensors_are_differences(tmp_path: Path, rtol: float) -> None:
    a = write(tmp_path / "a", {"x": torch.ones(6), "only a": torch.ones(1), "z": torch.ones(1)})
    b = write(tmp_path / "b", {"only b": torch.ones(1), "z": torch.ones(1), "x": torch.ones(2, 3)})
    assert [(difference.name, difference.what) for difference in script.compare(a, b, rtol)] == [
        ("x", "shapes (6,) and (2, 3)"),
        ("only a", "only in the first run"),
        ("only b", "only in the second run"),
    ]


def test_levels_may_differ(tmp_path: Path) -> None:
    """Entries of both logs are compared: shapes at level 1, everything by the checksum from level 2
    on."""
    tensor, wrong = torch.ones(64), torch.ones(64)
    wrong[63] = 2.0
    a = write(tmp_path / "a", {"x": tensor}, 6)
    assert script.compare(a, write(tmp_path / "1", {"x": wrong}, 1)) == []
    assert script.compare(a, write(tmp_path / "2", {"x": tensor}, 2)) == []
    for level in (2, 3, 20):
        (difference,) = script.compare(a, write(tmp_path / "b", {"x": wrong}, level))
        assert difference.what == "by the statistics" and difference.max_abs == 1.0


def test_files_are_compared_in_order_of_time(tmp_path: Path) -> None:
    """Initial weights, then iterations by their number, whatever its digits."""
    phases = ["init", "train_00002", "train_99999", "train_100000"]
    for name, value in (("a", 1.0), ("b", 2.0)):
        for phase in phases:
            for rank in (0, 1):
                file = f"tensor_logs_{phase}_rank_{rank:03d}.safetensors"
                write(tmp_path / name, {"x": torch.full((4,), value)}, file=file)
    files = [difference.file for difference in script.compare(tmp_path / "a", tmp_path / "b")]
    assert files == [
        f"tensor_logs_{phase}_rank_{rank:03d}.safetensors" for phase in phases for rank in (0, 1)
    ]


def test_places(tmp_path: Path) -> None:
    """An experiment directory stands for its newest start with logs; files compare whatever their
    names."""
    for run, value in ((2, 2.0), (10, 10.0)):
        write(tmp_path / "run" / "runs" / str(run) / "artifacts", {"x": torch.full((4,), value)})
    # a start that logged nothing
    (tmp_path / "run" / "runs" / "11" / "artifacts").mkdir(parents=True)
    reference = write(tmp_path / "reference", {"x": torch.full((4,), 10.0)})
    for place in (
        tmp_path / "run",
        tmp_path / "run" / "runs" / "10",
        tmp_path / "run" / "runs" / "10" / "artifacts",
    ):
        assert script.compare(place, reference) == []
    assert len(script.compare(tmp_path / "run" / "runs" / "2", reference)) == 1
    other = (reference / FILE).rename(reference / "other.safetensors")
    newest = tmp_path / "run" / "runs" / "10" / "artifacts" / FILE
    assert script.compare(other, newest) == []
    assert (
        script.compare(newest, tmp_path / "run") == []
        and script.compare(tmp_path / "run", newest) == []
    )


@pytest.mark.parametrize("case", ["missing", "empty", "one file more", "damaged", "foreign"])
def test_nothing_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    """Exit code 2, one line on stderr that names the place, nothing on stdout."""
    a, b = write(tmp_path / "a", make_tensors()), write(tmp_path / "b", make_tensors())
    more, named = "tensor_logs_train_00002_rank_000.safetensors", FILE
    if case in ("missing", "empty"):
        (b / FILE).unlink()
        named = str(b)
    if case == "missing":
        b.rmdir()
    elif case == "one file more":
        write(a, make_tensors(), file=more)
        named = more
    elif case == "damaged":
        (b / FILE).write_bytes((b / FILE).read_bytes()[:-9])
    elif case == "foreign":
        save_file({"x": torch.ones(1)}, b / FILE)
    assert script.main([str(a), str(b)]) == 2
    output = capsys.readouterr()
    assert output.out == "" and re.fullmatch(r"ERROR: [^\n]*\n", output.err) and named in output.err
    with pytest.raises(UsageError):
        script.compare(a, b)
