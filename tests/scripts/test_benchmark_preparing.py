"""scripts/benchmarks/preparing.py: each row tokenizes the whole corpus, and the table has them all."""

import json
from pathlib import Path

import pytest

from scripts.benchmarks import preparing

pytestmark = pytest.mark.guides


def test_rows_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One turn of the rows that need no peer, on a small corpus."""
    corpus = tmp_path / "x.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"some words {number}"}) + "\n" for number in range(500)))
    words = [str(corpus), f"--folder={tmp_path / 'work'}", "--turns=1", f"--output={tmp_path / 'x.json'}"]
    assert preparing.main([*words, "--rows=ours,encode_batch,encode_batch_fast"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0].removeprefix("| ") for line in table[2:5]] == [
        "ours",
        "encode_batch",
        "encode_batch_fast",
    ]
    assert json.loads((tmp_path / "x.json").read_text())["rows"]["ours"]["ratios"]["ours"]["median"] == 1.0
    tokenizer = str(tmp_path / "work" / "tokenizer.json")
    assert preparing.library_loop(str(corpus), tokenizer, "encode_batch") > 500
