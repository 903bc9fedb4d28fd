"""The same records as lines of JSON and as tables of all common writers: the same tokens."""

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.corpus.documents import TextFields
from megatron_lite.corpus.prepare import CorpusOptions, prepare
from megatron_lite.corpus.tokenizer_choice import TokenizerChoice
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.errors import DataError

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool|tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls %}{{ call|tojson }}{% endfor %}\n{% endfor %}"
)


def conversation(
    question: str, name: str, arguments: dict[str, Any], answer: str
) -> dict[str, Any]:
    """A record with a tool and a call of it; the arguments' keys differ from record to record."""
    properties = {key: {"type": type(value).__name__} for key, value in arguments.items()}
    function = {"name": name, "arguments": arguments}
    tool = {"name": name, "parameters": {"type": "object", "properties": properties}}
    return {
        "text": f"{question} {answer}",
        "meta": {"title": question, "number": len(answer)},
        "messages": [
            {"role": "user", "content": question},
            {
                "role": "assistant",
                "content": answer,
                "tool_calls": [{"type": "function", "function": function}],
            },
        ],
        "tools": [{"type": "function", "function": tool}],
    }


RECORDS = [
    conversation("What is the weather in Paris?", "weather", {"city": "Paris"}, "sunny"),
    conversation("What is 1 + 2?", "sum", {"expression": "1+2", "digits": 3}, "3"),
    conversation(
        "größe? \u2028 \x85", "größe", {"deep": {"list": [1, 2], "flag": True}}, "ünïcode"
    ),
    conversation("Nothing to say", "nothing", {"city": "Rome", "flag": False}, "a" * 3000),
    conversation("Empty?", "empty", {}, "yes"),
]


def _lines(path: Path) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))


def _pyarrow(path: Path) -> None:
    pytest.importorskip("pyarrow.parquet").write_table(
        pytest.importorskip("pyarrow").Table.from_pylist(RECORDS), path, row_group_size=2
    )


def _polars(path: Path) -> None:
    pytest.importorskip("polars").DataFrame(
        RECORDS, strict=False, infer_schema_length=None
    ).write_parquet(path)


def _polars_ipc(path: Path) -> None:
    pytest.importorskip("polars").DataFrame(
        RECORDS, strict=False, infer_schema_length=None
    ).write_ipc(path)


def _duckdb(path: Path) -> None:
    lines = path.with_name("duckdb.jsonl")
    _lines(lines)
    pytest.importorskip("duckdb").sql(
        f"copy (from read_json('{lines}')) to '{path}' (format parquet)"
    )


def _duckdb_json(path: Path) -> None:
    """All columns but the text of the type JSON."""
    lines = path.with_name("duckdb.jsonl")
    _lines(lines)
    kinds = "{text: 'VARCHAR', meta: 'JSON', messages: 'JSON', tools: 'JSON'}"
    query = f"copy (from read_json('{lines}', columns={kinds})) to '{path}' (format parquet)"
    pytest.importorskip("duckdb").sql(query)


def _datasets(path: Path) -> Any:
    """Load with `datasets`, whose feature Json holds what differs from record to record."""
    lines = path.with_name("datasets.jsonl")
    _lines(lines)
    load = pytest.importorskip("datasets").load_dataset
    return load(
        "json", data_files=str(lines), split="train", cache_dir=str(path.with_name("cache"))
    )


def _ipc(form: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        arrow = pytest.importorskip("pyarrow")
        table = arrow.Table.from_pylist(RECORDS)
        with getattr(arrow.ipc, form)(str(path), table.schema) as output:
            output.write_table(table, max_chunksize=1)

    return write


def _list_of(path: Path) -> None:
    pytest.importorskip("datasets").Dataset.from_list(RECORDS).to_parquet(str(path))


WRITERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "an array": (".json", lambda path: path.write_text(json.dumps(RECORDS))),
    "pyarrow": (".parquet", _pyarrow),
    "polars": (".parquet", _polars),
    "duckdb": (".parquet", _duckdb),
    "duckdb, JSON": (".parquet", _duckdb_json),
    "datasets, Json": (".parquet", lambda path: _datasets(path).to_parquet(str(path))),
    "datasets, a list": (".parquet", _list_of),
    "datasets, saved": ("", lambda path: _datasets(path).save_to_disk(str(path))),
    "polars, IPC": (".arrow", _polars_ipc),
    "an arrow stream": (".arrow", _ipc("new_stream")),
    "an arrow file": (".arrow", _ipc("new_file")),
}


def tokens(path: Path, fields: TextFields) -> list[list[int]]:
    """Prepare a file; return the tokens of each document."""
    prefix = str(path.with_name(f"pair of {path.name}, {'_'.join(fields.keys)}"))
    summary, _ = prepare(
        CorpusOptions((str(path),), prefix, TokenizerChoice(), fields, strict=True)
    )
    assert not summary["skipped"]
    pair = IndexedDataset(prefix)
    return [pair.document(number).tolist() for number in range(pair.num_documents)]


@pytest.mark.parametrize("writer", WRITERS)
def test_the_same_records_are_the_same_tokens(writer: str, tmp_path: Path) -> None:
    """Texts, a text in an object, and conversations with tools and calls."""
    from megatron_lite.corpus.conversations import conversation_fields

    (tmp_path / "t.jinja").write_text(TEMPLATE)
    ending, write = WRITERS[writer]
    lines, path = tmp_path / "lines.jsonl", tmp_path / f"x{ending}"
    _lines(lines)
    write(path)
    template = conversation_fields(
        str(tmp_path / "t.jinja"), TextFields(("text",)), TokenizerChoice()
    )
    for fields in (TextFields(("text",)), TextFields(("meta.title",)), template):
        found = tokens(path, fields)
        assert found == tokens(lines, fields) and len(found) == len(RECORDS)
    assert b'"city": "Paris"}' in bytes(np.array(found[0], np.uint8))


def test_columns_that_are_no_text(tmp_path: Path) -> None:
    """Bytes, times and numbers are refused with their type; JSON that is none, and times without a
    Python type, too."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    now = datetime.datetime(2026, 1, 2, 3)
    for value, kind in (
        (b"a", "bytes"),
        (now, "datetime"),
        (now.date(), "date"),
        (1.5, "float"),
        (["a"], "list"),
    ):
        parquet.write_table(arrow.table({"text": [value]}), tmp_path / "x.parquet")
        with pytest.raises(
            DataError, match=rf"x.parquet: row 1: no text under the key 'text' \({kind}\)"
        ):
            tokens(tmp_path / "x.parquet", TextFields(("text",)))
    (tmp_path / "x.jsonl").write_text('{"text": 5}')
    with pytest.raises(DataError, match=r"x.jsonl: line 1: no text under the key 'text' \(int\)"):
        tokens(tmp_path / "x.jsonl", TextFields(("text",)))
    for column in (arrow.array([1], arrow.timestamp("ns")), arrow.array(["{"], arrow.json_())):
        parquet.write_table(arrow.table({"text": column}), tmp_path / "x.parquet")
        with pytest.raises(
            DataError,
            match=r"x.parquet: (damaged or not what its name|row 1: no text under the key)",
        ):
            tokens(tmp_path / "x.parquet", TextFields(("text",)))
