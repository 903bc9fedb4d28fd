"""What is stored of frozen parameters, moments and averages; any choice of these loads any other.

The models are the stand-ins of `fakes.py`; `test_engine.py` trains.
"""

import itertools
import json
import os
import struct
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_lite.checkpoint import files, manifest
from tests.checkpoint.test_writing import SPECS, load, save
from tests.support.fakes import FakePart, Layout, Values, empty_model, put, same

NAMES = tuple(spec.name for spec in SPECS)
EMBEDDING, BLOCK = NAMES[:1], NAMES[1:5]
# some stages have both kinds of parameters, whatever their number
MIXED = (NAMES[0], NAMES[2], NAMES[3], NAMES[7])


def expected(saved: Values, layout: Layout) -> Values:
    """Return a model's values after loading: missing moments are zero, missing averages equal the
    weights."""
    weights = {
        name: value.to(layout.frozen_dtype if name in layout.frozen else torch.float32)
        for name, value in saved["weights"].items()
    }
    values = {"weights": weights}
    for kind in layout.kinds[1:]:
        start = (
            weights
            if kind == "average"
            else {name: torch.zeros_like(value) for name, value in weights.items()}
        )
        values[kind] = {
            name: saved[kind].get(name, start[name]) for name in NAMES if name not in layout.frozen
        }
    return values


LAYOUTS = [
    ((), torch.float32),
    (EMBEDDING, torch.float32),
    (BLOCK, torch.bfloat16),
    (MIXED, torch.bfloat16),
    (MIXED, torch.float16),
    (NAMES[1:], torch.float32),
]


@pytest.mark.parametrize("saving", LAYOUTS, ids=lambda value: f"{len(value[0])}{str(value[1])[6:]}")
def test_any_choice_of_frozen_parameters_reads_any_other(saving: Any, tmp_path: Path) -> None:
    """From trained to frozen and back, across dtypes and layouts: roundings and missing moments are
    reported."""
    saved = save(tmp_path, 10, 1, 3, 3, frozen=saving[0], frozen_dtype=saving[1])
    for number, (frozen, dtype) in enumerate(LAYOUTS, start=LAYOUTS.index(saving)):
        layout = ((1, 3), (3, 1), (2, 8))[number % 3]
        loaded, values, lines = load(tmp_path, *layout, frozen=frozen, frozen_dtype=dtype)
        assert loaded is not None and loaded.iteration == 10
        assert same(values, expected(saved, Layout(frozen=frozen, frozen_dtype=dtype))), (
            frozen,
            dtype,
        )
        num_started = len(set(saving[0]) - set(frozen))
        rounded = [name for name in frozen if saved["weights"][name].dtype != dtype]
        num_rounded = 0 if dtype == torch.float32 else len(rounded)
        said = "\n".join(lines)
        assert len(lines) == bool(num_started) + bool(num_rounded), lines
        assert (
            f"{num_started} of 8 parameter tensors have no exp_avg and exp_avg_sq" in said
        ) == bool(num_started)
        assert (
            f"{num_rounded} of 8 parameter tensors are frozen and were rounded" in said
        ) == bool(num_rounded)
        if num_rounded:
            dtypes = {str(saved["weights"][name].dtype)[6:] for name in rounded}
            assert all(f"{before} to {str(dtype)[6:]}" in said for before in dtypes)


def test_rounding_is_to_nearest_and_back_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding equals PyTorch's, also in pieces smaller than a parameter; converting back to fp32
    changes nothing."""
    monkeypatch.setattr(files, "CHUNK_BYTES", 100)
    saved = save(tmp_path / "full", 10, 1, 2)
    rounded = load(tmp_path / "full", frozen=NAMES[:7], frozen_dtype=torch.bfloat16)[1]
    for name in NAMES[:7]:
        assert torch.equal(rounded["weights"][name], saved["weights"][name].bfloat16())
    kept = save(tmp_path / "half", 10, 1, 2, frozen=NAMES[:7], frozen_dtype=torch.bfloat16)
    restored = load(tmp_path / "half", 3)[1]
    for name in NAMES:
        assert torch.equal(restored["weights"][name], kept["weights"][name].float())
        assert name == NAMES[7] or not restored["exp_avg"][name].any()


@pytest.mark.parametrize(
    "more", [{}, dict(frozen=MIXED, frozen_dtype=torch.bfloat16), dict(averaged=True)], ids=str
)
@pytest.mark.parametrize("averaged", [False, True])
def test_inference_takes_weights_and_averages(
    more: dict[str, Any], averaged: bool, tmp_path: Path
) -> None:
    """A model without moments loads the weights of any checkpoint, reports no moments missing and
    cannot save."""
    saved = save(tmp_path, 10, 1, 3, **more)
    _, values, lines = load(tmp_path, 2, 2, training=False, averaged=averaged)
    weights = {name: value.float() for name, value in saved["weights"].items()}
    averages = {"average": saved["average"] if "averaged" in more else weights} if averaged else {}
    assert same(values, {"weights": weights, **averages}) and len(lines) == (
        "averaged" in more and not averaged
    )
    with pytest.raises(AssertionError, match="this model is for inference"):
        save(tmp_path, 11, 1, training=False)


def test_moments_left_by_a_failed_attempt_are_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest checkpoint fails while it is read; the older one, with everything frozen, has no
    moments."""
    old = save(tmp_path, 9, 1, frozen=NAMES[1:])
    save(tmp_path, 10, 2)
    real_read = files.Files.read
    calls = itertools.count()

    def read(*arguments: Any) -> None:
        if next(calls) == 15:
            raise OSError(5, "Input/output error")
        real_read(*arguments)

    monkeypatch.setattr(files.Files, "read", read)
    loaded, values, lines = load(tmp_path)
    assert (
        loaded is not None
        and loaded.iteration == 9
        and len(lines) == 2
        and "Input/output error" in lines[0]
    )
    assert same(values, expected(old, Layout()))


# -- the file
# -------------------------------------------------------------------------------------------------------


def test_rank_files_are_ordinary_safetensors_files(tmp_path: Path) -> None:
    """The safetensors library reads them; modes follow the umask. Frozen parameters store exactly
    their bytes, under separate names after the trainable ones, no moments and no empty lists; the
    manifest has the dtype."""
    safetensors = pytest.importorskip("safetensors")
    layout = Layout(2, 3, MIXED, torch.bfloat16)
    previous = os.umask(0o027)
    try:
        saved = save(tmp_path / "new", 10, 1, 2, 3, frozen=MIXED, frozen_dtype=torch.bfloat16)
    finally:
        os.umask(previous)
    folder, model = tmp_path / "new" / "10", put(empty_model(SPECS, layout, 1), saved, 1)
    wanted = {
        f"stage_{index:03d}.{'frozen.' if part.frozen else ''}{kind}": tensor
        for index, part in model.parts()
        for kind, tensor in part.tensors.items()
    }
    with safetensors.safe_open(folder / "rank_001.safetensors", "pt") as file:
        assert file.metadata()["iteration"] == "10" and file.metadata()["rank"] == "1"
        assert list(file.offset_keys()) == list(wanted)
        for name, tensor in wanted.items():
            assert (
                torch.equal(file.get_tensor(name), tensor)
                and file.get_tensor(name).dtype == tensor.dtype
            )
    assert "stage_000.frozen.weights" in wanted and "stage_000.frozen.exp_avg" not in wanted
    size = (folder / "rank_001.safetensors").stat().st_size
    header = (folder / "rank_001.safetensors").read_bytes()[:8]
    assert size == 8 + struct.unpack("<Q", header)[0] + sum(
        tensor.nbytes for tensor in wanted.values()
    )
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        name: 0o640 for name in ("manifest.json", "rank_000.safetensors", "rank_001.safetensors")
    }
    values = json.loads((folder / "manifest.json").read_bytes())
    assert values["version"] == 6
    for name, entry in values["parameters"].items():
        assert entry["dtype"] == ("bfloat16" if name in MIXED else "float32") and all(
            entry.values()
        )
        assert set(entry) == {"dtype", "shape", "weights"} | (
            set() if name in MIXED else {"exp_avg", "exp_avg_sq"}
        )
        assert sum(piece[2] for piece in entry["weights"]) == saved["weights"][name].nbytes


def test_one_temporary_copy_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving and loading hold one tensor of weights that `read` creates; moments are never copied.

    Saving reads each shard once: bytes and checksums come from one pass.
    """
    calls: list[str] = []
    copies: list[weakref.ref[np.ndarray[Any, Any]]] = []
    alive: list[int] = []

    def read(part: FakePart, kind: str) -> Tensor:
        calls.append(f"{part.layout.slots[0].spec.name} {kind}")
        if kind != "weights":
            return part.tensors[kind]
        memory = part.tensors[kind].numpy().copy()
        copies.append(weakref.ref(memory))
        alive.append(sum(copy() is not None for copy in copies))
        return torch.from_numpy(memory)  # keeps it alive as long as any view lives

    monkeypatch.setattr(FakePart, "read", read)
    saved = save(tmp_path, 10, 1, num_per_stage=2, copies=True)
    assert alive == [1] * 4, "one for each stage"
    assert len(calls) == len({*calls}) == 3 * 4
    assert same(load(tmp_path, num_per_stage=1, copies=True)[1], saved)
    assert alive == [1] * 12


# -- averages and single moments
# ---------------------------------------------------------------------------------------

BOTH = manifest.MOMENTS
ONE = manifest.MOMENTS[:1]
NONE = ()
SETS: list[dict[str, Any]] = [
    dict(moments=moments, averaged=averaged)
    for moments in (BOTH, ONE, NONE)
    for averaged in (False, True)
]


def number(kinds: dict[str, Any]) -> str:
    return f"{len(kinds['moments'])}{'+average' * kinds['averaged']}"


@pytest.mark.parametrize("loading", SETS, ids=number)
@pytest.mark.parametrize("saving", SETS, ids=number)
def test_any_set_reads_any_other(
    saving: dict[str, Any], loading: dict[str, Any], tmp_path: Path
) -> None:
    """(moments, averaged) of a parameter: across ranks and stages, with masters that are copies on
    either side."""
    # each pair of sets with and without frozen parameters, copies on one side
    turn = SETS.index(saving) % 2
    for count, (copies, frozen) in enumerate([(bool(turn), ()), (not turn, MIXED)]):
        saved = save(tmp_path / str(count), 10, 1, 3, 3, **saving, copies=copies, frozen=frozen)
        loaded, values, lines = load(tmp_path / str(count), 2, 8, **loading, copies=not copies)
        assert loaded is not None and same(values, expected(saved, Layout(**loading)))
        said = "\n".join(lines)
        missing = [kind for kind in loading["moments"] if kind not in saving["moments"]]
        if missing:
            assert (
                f" of 8 parameter tensors have no {' and '.join(missing)} there (they were frozen, or tra"
                in said
            )
        resumes = loading["averaged"] and saving["averaged"]
        assert ("4 of 8 parameter tensors have no average there" in said) == (
            resumes and bool(frozen)
        )
        assert ("it holds averaged weights" in said) == (
            saving["averaged"] and not loading["averaged"]
        )
        if saving == loading and not frozen:
            assert lines == []


def test_numbers_of_parameters_are_counted_apart(tmp_path: Path) -> None:
    """With half the parameters frozen in a run of one moment, the report counts frozen and trained
    ones separately."""
    save(tmp_path, 10, 1, moments=ONE, averaged=True, frozen=MIXED)
    lines = load(tmp_path, averaged=True)[2]
    assert [line.partition("/10: ")[2].partition(" (")[0] for line in lines] == [
        "4 of 8 parameter tensors have no exp_avg_sq there",
        "4 of 8 parameter tensors have no exp_avg and exp_avg_sq there",
        "4 of 8 parameter tensors have no average there",
    ]
