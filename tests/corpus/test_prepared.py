"""--inspect and --verify; pairs that megatron-core reads, and pairs that it wrote."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.corpus.conversations import conversation_fields
from megatron_lite.corpus.documents import TextFields
from megatron_lite.corpus.pieces import RULES, digest_of
from megatron_lite.corpus.prepare import CorpusOptions, prepare
from megatron_lite.corpus.prepared import (
    check_tokenizer,
    inspect,
    known_tokenizer,
    outdated,
    verify,
)
from megatron_lite.corpus.tokenizer_choice import TokenizerChoice
from megatron_lite.errors import DataError
from tests.support.loading import loaded


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    lines = [{"text": "ab" * (10 + number)} for number in range(20)] + [
        {"text": "\x1b[31m red\nline"}
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = CorpusOptions(
        (str(tmp_path / "x.jsonl"),), str(tmp_path / "x"), TokenizerChoice(begin="<|endoftext|>")
    )
    prepare(options)
    return str(tmp_path / "x")


def test_inspect(prefix: str) -> None:
    """Counts, lengths, frequent tokens, and documents whose control characters cannot steer a
    terminal."""
    shown = "\n".join(inspect(prefix))
    assert "documents         21" in shown and "bytes per token   0.950" in shown
    assert (
        "  up to          64            14  ####" in shown
        and "  up to          16             1  ###" in shown
    )
    assert "       97   46.65%  'a'" in shown and "document 20: 16 tokens" in shown
    assert r"<|endoftext|>\x1b[31m red\nline<|endoftext|>" in shown and "\x1b" not in shown


def test_a_tokenizer_that_is_not_the_datas_is_refused(prefix: str, tmp_path: Path) -> None:
    """By the summary: one line names both with digest and size. A file that says the same in
    another form is taken."""
    own = known_tokenizer(prefix + ".tokenizer.json", "the data's own")
    assert check_tokenizer([prefix], 257, own)[0] == check_tokenizer([prefix], 257, None)[0]
    content = json.loads(own.file.read_text())
    compact = tmp_path / "compact.json"
    compact.write_text(json.dumps(content, indent=None))
    again = known_tokenizer(str(compact), "another form")
    assert again.sha256 != own.sha256 and check_tokenizer([prefix], 257, again)[1] == []
    content["model"]["vocab"].pop("a")
    compact.write_text(json.dumps(content))
    other = known_tokenizer(str(compact), f"--tokenizer_file={compact}")
    with pytest.raises(DataError) as caught:
        check_tokenizer([prefix], 257, other)
    facts = (
        str(compact),
        other.sha256[:8],
        prefix,
        own.sha256[:8],
        "257 tokens",
        f"{prefix}.tokenizer.json",
    )
    assert all(fact in str(caught.value) for fact in facts) and "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"257 tokens.*has more tokens than --vocab_size=256"):
        check_tokenizer([prefix], 256, None)
    Path(prefix + ".summary.json").unlink()
    assert check_tokenizer([prefix, prefix], 256, other) == (None, [prefix])


def test_verify_finds_every_changed_byte(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A flipped bit anywhere in the four files is found, with exit code 3; an untouched pair gives
    0."""
    assert verify(prefix).endswith(
        "21 documents, 836 tokens: index, digests, tokens and tokenizer are as they were written"
    )
    generator = random.Random(0)
    for ending in (".bin", ".idx", ".tokenizer.json"):
        path = Path(prefix + ending)
        data = path.read_bytes()
        for _ in range(10):
            damaged = bytearray(data)
            damaged[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
            path.write_bytes(damaged)
            with pytest.raises(DataError):
                verify(prefix)
        path.write_bytes(data)
    with loaded("prepare_data") as module:
        assert module.main(["--verify", prefix]) == 0
        Path(prefix + ".bin").write_bytes(b"\0" * Path(prefix + ".bin").stat().st_size)
        assert module.main(["--verify", prefix]) == 3
    assert "x.bin: its SHA-256 is" in capsys.readouterr().err


def test_verify_checks_tokens_too(prefix: str) -> None:
    """A summary with the digest of wrong tokens does not help: ids and the ends of documents are
    checked."""
    summary, path = Path(prefix + ".summary.json"), Path(prefix + ".bin")
    values, tokens = json.loads(summary.read_text()), np.fromfile(path, dtype="<u2")
    for position, token, complaint in (
        (5, 257, "token 257 of document 0 is not below the vocabulary of 257"),
        (0, 97, "document 0 does not begin with token 256"),
        (len(tokens) - 1, 97, "document 20 does not end with token 256"),
    ):
        wrong = tokens.copy()
        wrong[position] = token
        path.write_bytes(wrong.tobytes())
        values["files"]["x.bin"]["sha256"] = digest_of(path)
        summary.write_text(json.dumps(values))
        with pytest.raises(DataError, match=complaint):
            verify(prefix)


def test_pairs_of_older_rules_are_told(prefix: str, tmp_path: Path) -> None:
    """Of pairs of today's rules, and of those without a summary, nothing is said."""
    (tmp_path / "y.jsonl").write_text(json.dumps({"prompt": "question", "completion": "answer"}))
    fields = conversation_fields("zephyr", TextFields(("text",)), TokenizerChoice())
    chats = str(tmp_path / "y")
    prepare(CorpusOptions((str(tmp_path / "y.jsonl"),), chats, TokenizerChoice(), fields))
    assert not list(outdated([prefix, chats, "nothing"]))
    for name in (prefix, chats):
        summary = Path(name + ".summary.json")
        values = json.loads(summary.read_text())
        assert values.pop("rules") == RULES
        summary.write_text(json.dumps(values))
    warnings = [*outdated([prefix, chats, chats])]
    assert [warning.partition(":")[0] for warning in warnings] == [prefix, chats]
    assert all("older rules prepared it" in warning for warning in warnings)
