"""A run straight from text, and one from a list of data sets."""

import json
import re
from pathlib import Path

import pytest

from megatron_lite.corpus.from_text import is_text, read_list
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.errors import DataError
from tests.checkpoint.test_damage import seal
from tests.support.launch import TINY, run, succeed
from tests.support.loading import loaded
from tests.support.token_files import save_byte_tokenizer, write_documents

FLAGS = [*TINY, "--num_workers=0", "--split=1,0,0", "--train_iters=3", "--vocab_size=515"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("some words " * 300)
    (folder / "b.jsonl").write_text('{"text": "other words, in a line"}\n' * 200 + "broken\n")
    save_byte_tokenizer(str(tmp_path / "tokenizer.json"))
    return folder


def flags(source: str, experiment: Path, *more: str) -> list[str]:
    return [*FLAGS, f"--dataset_source={source}", f"--experiment_dir={experiment}", *more]


def losses(experiment: Path) -> list[float]:
    lines = map(json.loads, (experiment / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["phase"] == "training"]


def test_text_is_prepared_once(text: Path, tmp_path: Path) -> None:
    """Two ranks train on a folder of text; another run finds the tokens again, and a list of the
    pair is the same.

    A start that goes on names what has changed, and nothing else.
    """
    tokenizer, cache = f"--tokenizer_file={tmp_path / 'tokenizer.json'}", tmp_path / "cache"
    data = [f"--data_path={text}", tokenizer, f"--dataset_cache={cache}"]
    outcome = succeed(flags("list", tmp_path / "a", *data), ranks=2)
    (index,) = cache.glob("*/text.idx")
    assert (
        f"prepared {text} as {cache}" in outcome.output
        and "skipped documents: 1 not JSON" in outcome.output
    )
    assert (
        "--vocab_size=515: the tokenizer has 257 tokens; --vocab_size=257 is smaller"
        in outcome.output
    )
    assert IndexedDataset(str(index)[:-4]).num_documents == 201
    assert f"found {text} as {cache}" in succeed(flags("list", tmp_path / "b", *data)).output
    # People read what they typed.
    shown = json.loads((tmp_path / "b" / "config.json").read_bytes())
    assert shown["data_path"] == [str(text)] and shown["tokenizer_file"] == str(
        tmp_path / "tokenizer.json"
    )
    assert (
        re.search(rf"\s--data_path={text}\s", outcome.output)
        and f"--data_path={cache}" not in outcome.output
    )
    page = (tmp_path / "b" / "report.html").read_text()
    assert f"<td>{text}</td>" in page and str(cache / index.parent.name) not in page
    with loaded("concatenate_dataset") as module:
        assert module.main([str(cache), "--output", str(tmp_path / "all.json")]) == 0
    succeed(flags("file", tmp_path / "c", f"--data_path={tmp_path / 'all.json'}"))
    assert losses(tmp_path / "a") == pytest.approx(losses(tmp_path / "b"), rel=1e-5)
    assert losses(tmp_path / "b") == losses(tmp_path / "c") and len(losses(tmp_path / "c")) == 3
    goes_on = succeed(flags("list", tmp_path / "b", *data, "--train_iters=4")).output
    changed = re.findall(r"changed since that checkpoint .*?: (\w+):", goes_on)
    assert changed == ["lr_decay_iters", "train_iters"] and "has no effect" not in goes_on
    (tmp_path / "b").rename(tmp_path / "copied")
    renamed = succeed(flags("list", tmp_path / "copied", *data, "--train_iters=5")).output
    assert re.findall(r"changed since that checkpoint .*?: (\w+):", renamed) == changed


def test_a_run_keeps_tokens_of_older_rules(text: Path, tmp_path: Path) -> None:
    """A run that goes on reads the pair with which it began, and says so; a new one prepares the
    text again."""
    data = [
        f"--data_path={text}",
        f"--tokenizer_file={tmp_path / 'tokenizer.json'}",
        f"--dataset_cache={tmp_path / 'c'}",
    ]
    whole, stopped, new = (
        flags("list", tmp_path / name, *data) for name in ("whole", "stopped", "new")
    )
    succeed(whole)
    succeed([*stopped, "--stop_interval=2"])
    (index,) = (tmp_path / "c").glob("*/text.idx")
    index.parent.rename(tmp_path / "c" / "older")
    summary = tmp_path / "c" / "older" / "text.summary.json"
    saved = tmp_path / "stopped" / "checkpoints" / "2"
    values = json.loads(summary.read_text()) | {"fingerprint": "another"}
    del values["rules"]
    summary.write_text(json.dumps(values))
    content = json.loads((saved / "manifest.json").read_text().replace(index.parent.name, "older"))
    (saved / "manifest.json").write_bytes(seal(content))
    goes_on = succeed(stopped).output
    assert (
        f"{text}: the run goes on with {tmp_path}/c/older/text, which was prepared under older rules"
        in goes_on
    )
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    assert f"prepared {text} as {tmp_path}/c" in succeed(new).output
    (text / "a.txt").write_text("other words " * 300)
    assert "was trained with other data" in run([*stopped, "--train_iters=5"]).output


def test_text_needs_a_tokenizer_and_a_place(text: Path, tmp_path: Path) -> None:
    """What is missing is named, with exit code 2; a vocabulary that is too small, with 3."""
    (tmp_path / "t.json").write_bytes((tmp_path / "tokenizer.json").read_bytes())
    tokenizer = f"--tokenizer_file={tmp_path / 't.json'}"
    cases = [
        (2, "is text; name its tokenizer: --tokenizer_file", flags("list", tmp_path / "x")),
        (2, "no place for its tokens", [*FLAGS, tokenizer]),
        (
            3,
            "has 257 tokens, more than --vocab_size=256",
            flags("list", tmp_path / "y", tokenizer, "--vocab_size=256"),
        ),
    ]
    for code, words, command in cases:
        outcome = run([*command, "--dataset_source=list", f"--data_path={text}"])
        assert outcome.codes == [code] and words in outcome.output, outcome.output


def test_a_folder_of_pairs_is_no_text(tmp_path: Path) -> None:
    """The message names a pair, with a tokenizer and without; text beside pairs is text, as
    before."""
    folder = tmp_path / "pairs"
    folder.mkdir()
    write_documents(folder / "mine", [[1, 2, 3]] * 20)
    for more in ([], [f"--tokenizer_file={tmp_path / 'tokenizer.json'}"]):
        outcome = run([*FLAGS, *more, "--dataset_source=list", f"--data_path={folder}"])
        assert outcome.codes == [2], outcome.output
        assert (
            f"--data_path={folder}: is a folder of token files; give the prefix of a pair: --data_path={folder}/mine"
            in (outcome.output)
        )
    (folder / "a.txt").write_text("text")
    outcome = run([*FLAGS, *more, "--dataset_source=list", f"--data_path={folder}"])
    assert "no place for its tokens" in outcome.output, outcome.output


def test_text_and_prefixes_are_told_apart(text: Path, tmp_path: Path) -> None:
    """A pair wins over a folder of the same name; what does not exist is a prefix, whose error says
    so."""
    assert is_text(str(text)) and is_text(str(text / "*.txt")) and is_text(str(text / "b.jsonl"))
    assert not is_text(str(tmp_path / "missing")) and not is_text(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.idx").touch()
    assert not is_text(str(text))


def test_lists_that_are_damaged_are_named(tmp_path: Path) -> None:
    """Each kind of damage is one line with the path; weights of zero leave a set out."""
    path = tmp_path / "x.json"
    path.write_text('{"datasets": [{"prefix": "a", "weight": 0}, {"prefix": "b/c", "weight": 2}]}')
    assert read_list(path) == ["2.0", str(tmp_path / "b/c")]
    for content in (
        "",
        "[]",
        "{}",
        '{"datasets": [5]}',
        '{"datasets": [{"prefix": "a", "weight": -1}]}',
    ):
        path.write_text(content)
        with pytest.raises(DataError, match="--data_path=.*x.json: "):
            read_list(path)
    path.write_text('{"datasets": [{"prefix": "a", "weight": 0}]}')
    with pytest.raises(DataError, match="names no data set with a weight"):
        read_list(path)
