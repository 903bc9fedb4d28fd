"""A path that does not exist is said not to exist, a file where a folder belongs to be one, in one
line each."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron_lite import errors
from megatron_lite.checkpoint.resume import choose
from megatron_lite.cli import prepare_data
from megatron_lite.cli.parse import parse
from megatron_lite.commands import (
    convert_checkpoint,
    evaluate,
    generate,
    plot_run,
    report_run,
    watch_run,
)
from megatron_lite.config.source import CheckpointConfig
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.errors import CheckpointError, DataError, UsageError

MISSING, A_FILE = "there is no (such )?folder", "is a file"


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with an empty folder, a file and a folder with a space in its name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a b").mkdir()
    (tmp_path / "file").write_text("text")
    return tmp_path


@pytest.mark.parametrize(
    ("main", "words", "empty"),
    [
        (generate.main, ("--prompt=x", "--model"), "the folder is empty"),
        (evaluate.main, ("--text=file", "--model"), "the folder is empty"),
        (
            convert_checkpoint.main,
            ("--to=x", "--format=huggingface", "--from"),
            "the folder is empty",
        ),
        (watch_run.main, ("--once",), None),
        (report_run.main, (), "metrics.jsonl: No such file"),
        (plot_run.main, (), "metrics.jsonl: No such file"),
    ],
)
def test_folders_of_models_and_runs(
    main: Callable[[Sequence[str]], int],
    words: Sequence[str],
    empty: str | None,
    places: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for path, said in (
        ("none/at/all", MISSING),
        ("file", A_FILE),
        ("empty", empty),
        ("a b", empty),
    ):
        code = main([*words, path])
        error = capsys.readouterr().err
        if said is None:
            assert code == 0
        else:
            assert code != 0 and error.count("\n") == 1 and path in error, error
            assert re.search(said, error), error


def test_folders_of_a_start(places: Path) -> None:
    for path, said in (
        ("none/at/all", MISSING),
        ("file", A_FILE),
        ("empty", "no checkpoint is there"),
    ):
        with pytest.raises(CheckpointError, match=said):
            choose(None, CheckpointConfig(load_checkpoint_path=path))
        with pytest.raises(
            CheckpointError, match=said if path != "empty" else "the folder is empty"
        ):
            parse(["--dataset_source=random", f"--pretrained_checkpoint_path={path}"])


def test_token_files(places: Path) -> None:
    for path, said in (
        ("nope", "nope: no such file, folder or pair"),
        ("empty", "empty is a folder: give"),
    ):
        with pytest.raises(DataError, match=said):
            IndexedDataset(path)


@pytest.mark.parametrize(
    "words", [["--data_path=a b"], ["--data_path", "x", "a b/pair"], ["--loss_mask=~/a b/pair"]]
)
def test_spaces_separate_words(
    words: list[str], places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path with a space that exists is not taken for two; words without such a path go on being
    words."""
    monkeypatch.setenv("HOME", str(places))
    (places / "a b" / "pair.idx").touch()
    with pytest.raises(UsageError, match="spaces separate words here"):
        parse([*words, "--num_layers=1"])
    assert parse(["--data_path=0.5 empty 0.5 x"]).config.data.data_path == (
        "0.5",
        "empty",
        "0.5",
        "x",
    )


def test_tokenizer_files(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong is said once."""
    for path, said in (
        ("nope", "No such file"),
        ("file", "not a tokenizer.json"),
        ("empty", "No such file"),
    ):
        assert prepare_data.main(["file", "--output_prefix=out", f"--tokenizer={path}"]) == 3
        error = capsys.readouterr().err
        assert error.count("cannot be read") <= 1 and said in error and error.count("\n") == 1


def test_messages_name_the_installed_commands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A checkout has scripts; elsewhere the command that pip installs stands in their place."""
    text = "try python scripts/report_run.py run, scripts/prepare_data.py or scripts/replay_step.py"
    assert str(UsageError(text)) == text
    monkeypatch.setattr(
        errors, "__file__", os.fspath(tmp_path / "site-packages" / "megatron_lite" / "errors.py")
    )
    installed = (
        "try megatron_lite report_run run, megatron_lite prepare_data or scripts/replay_step.py"
    )
    assert str(UsageError(text)) == installed
