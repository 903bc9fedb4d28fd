"""Which checkpoints a start may resume from, and where newer ones go."""

import errno
import os
from pathlib import Path

import pytest

from megatron_lite.checkpoint import resume
from megatron_lite.checkpoint.resume import choose, set_aside
from megatron_lite.config import CheckpointConfig, Config
from megatron_lite.errors import CheckpointError
from tests.checkpoint import test_writing
from tests.support.fakes import run_state

OPTIONS = CheckpointConfig()


def save(root: Path, *iterations: int, options: CheckpointConfig = OPTIONS) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for iteration in iterations:
        test_writing.save(root, iteration, 1, config=Config(checkpoint=options))
    return root


def chosen(root: Path | None, **options: object) -> list[str]:
    found = choose(root, CheckpointConfig(**options)).found  # type: ignore[arg-type]
    return [folder.name for _, folder in found]


def test_without_options(tmp_path: Path) -> None:
    """The newest comes first; a run without checkpoints, or without a directory, begins anew."""
    assert chosen(save(tmp_path / "own", 2, 10)) == ["10", "2"]
    assert chosen(tmp_path / "missing") == chosen(None) == []


def test_never_and_require(tmp_path: Path) -> None:
    """Neither can mix two runs or begin one by mistake."""
    own = save(tmp_path / "own", 2)
    assert chosen(own, load_policy="require") == ["2"]
    with pytest.raises(
        CheckpointError, match="--load_policy=never: .* has checkpoints, the newest of iteration 2"
    ):
        chosen(own, load_policy="never")
    assert chosen(tmp_path / "missing", load_policy="never") == []
    for root in (tmp_path / "missing", None):
        with pytest.raises(CheckpointError, match="--load_policy=require: no checkpoint is there"):
            chosen(root, load_policy="require")


def test_a_damaged_checkpoint_is_one(tmp_path: Path) -> None:
    """`never` refuses a folder whose only checkpoint is damaged, too."""
    (tmp_path / "own" / "7").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="has checkpoints, the newest of iteration 7"):
        chosen(tmp_path / "own", load_policy="never")


def test_elsewhere_until_there_is_one_of_its_own(tmp_path: Path) -> None:
    """A checkpoint, a folder of them or an experiment directory; repeating the command resumes the
    run itself."""
    other = save(tmp_path / "other" / "checkpoints", 3, 5)
    for path in (other, other.parent):
        assert chosen(None, load_checkpoint_path=str(path)) == ["5", "3"]
        assert chosen(None, load_checkpoint_path=str(path), resume_iteration=3) == ["3"]
    assert chosen(
        tmp_path / "own", load_checkpoint_path=str(other / "3"), load_policy="require"
    ) == ["3"]
    assert chosen(save(tmp_path / "own", 4), load_checkpoint_path=str(other)) == ["4"]
    for missing in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(
            CheckpointError,
            match="--load_checkpoint_path=.*: (no checkpoint is there|there is no folder)",
        ):
            chosen(None, load_checkpoint_path=str(missing))
    with pytest.raises(CheckpointError, match="File name too long; give a folder that can be read"):
        chosen(None, load_checkpoint_path="a" * 300)


def test_going_back(tmp_path: Path) -> None:
    """That iteration or none; the same command does not go back again after it has saved, another
    one does."""
    back, own = CheckpointConfig(resume_iteration=4), save(tmp_path / "own", 2, 4, 6, 8)
    for options in (back, CheckpointConfig(resume_iteration=8)):
        assert [iteration for iteration, _ in choose(own, options).found] == [
            options.resume_iteration
        ]
    assert (
        choose(own, back).goes_back
        and not choose(own, CheckpointConfig(resume_iteration=8)).goes_back
    )
    for root, there in (
        (own, "write one of these: 2, 4, 6, 8"),
        (tmp_path / "missing", "it has none"),
    ):
        with pytest.raises(
            CheckpointError, match=f"--resume_iteration=5: there is no checkpoint .*{there}"
        ):
            chosen(root, resume_iteration=5)
    moved = set_aside(own, 4)
    assert moved is not None and sorted(path.name for path in moved.iterdir()) == ["6", "8"]
    assert chosen(own) == ["4", "2"] and set_aside(own, 4) is None
    save(own, 5, options=back)
    continued = choose(own, back)
    assert [folder.name for _, folder in continued.found] == [
        "5",
        "4",
        "2",
    ] and not continued.goes_back
    assert "--resume_iteration=4 was followed by an earlier start" in continued.note
    assert choose(own, CheckpointConfig(resume_iteration=2)).goes_back
    save(own, 9)
    assert choose(own, back).goes_back
    again = set_aside(own, 4)
    assert again is not None and again.name == "2" and (moved / "8").is_dir()


def test_a_list_that_cannot_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stale handle of a network file system, for one, is neither a defect nor a reason to move
    anything."""

    def fail(root: Path) -> list[tuple[int, Path]]:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(root))

    own = save(tmp_path / "own", 2, 4)
    monkeypatch.setattr(resume, "find_checkpoints", fail)
    with pytest.raises(
        CheckpointError, match="cannot read the checkpoints in .*own: Stale file handle"
    ):
        set_aside(own, 2)
    with pytest.raises(
        CheckpointError, match="cannot read the checkpoints in .*own: Stale file handle"
    ):
        chosen(own)


def test_the_data_with_which_a_run_began(tmp_path: Path) -> None:
    """It is known from the first iteration on; of a checkpoint of an earlier version, nothing
    is."""
    assert choose(tmp_path, OPTIONS).began is None
    data = {"sets": [], "tokenizer": None}
    later = {**data, "evaluation_order": "data"}
    for iteration, known, began in (
        (0, {}, None),  # a converted model
        (1, {}, {}),
        (2, {"data": data}, data),
        (3, {"data": later}, later),
    ):
        test_writing.save(tmp_path, iteration, 1, state={**run_state(), **known})
        found = choose(tmp_path, OPTIONS).began
        if found is not None and began is not None:
            assert found.pop("config")["num_layers"] >= 1
            began |= {"counts": {"stages": [(0, 0, 0)], "sets": []}, "iteration": iteration}
            began |= {"pinned": {}}
        assert found == began
