"""scripts/evaluate.py: the loss of transformers on the same tokens, that of a training run's
validation, and bits per byte by their definition.
"""

import gzip
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.cli import prepare_data
from megatron_lite.commands import evaluate as script
from megatron_lite.corpus.pieces import digest_of
from megatron_lite.corpus.prepare import CorpusOptions, prepare
from megatron_lite.corpus.tokenizer_choice import TokenizerChoice
from megatron_lite.data.indexed_dataset import IndexedDatasetWriter
from megatron_lite.data.tokenizing import ByteTokenizer, JsonTokenizer, train_tokenizer
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.generation.evaluation import report
from megatron_lite.generation.model import text_batches
from tests.support.harness import run_distributed, tiny_config, train_whole
from tests.support.metrics import read_metrics
from tests.support.token_files import save_byte_tokenizer

OTHERS = [
    f"{word} quick brown foxes jump over the lazy dogs" for word in ("some", "many", "few", "no")
]
TEXTS = ("the cats' café\n", "a second one, of zoë", "日本語 🎉", "x" * 40)
MODEL: dict[str, Any] = dict(
    vocab_size=300, sequence_length=16, max_position_embeddings=32, init_method_std=0.3
)
MODEL |= dict(batch_size=4, train_iters=2, lr=1e-2, lr_warmup=0, ema_type="ema", ema_beta=0.5)
MODEL |= dict(dataset_source="list", split=(50, 50, 0), cross_document_attention=False)
MODEL |= dict(validation_iters="all", validation_interval=2, export_interval=2)


def train_run(distributed: Distributed, options: dict[str, Any]) -> None:
    train_whole(distributed, tiny_config(distributed.world_size, **options))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run with its data and tokenizer."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = train_tokenizer(iter(TEXTS), 300, str(folder / "tokenizer.json"))
    with IndexedDatasetWriter(str(folder / "data"), "<u2") as writer:
        for _ in range(12):
            for text in TEXTS:
                writer.add_document(np.array([*tokenizer.encode(text), tokenizer.end_of_document]))
    options = {"data_path": (str(folder / "data"),), "experiment_dir": str(folder / "run")}
    run_distributed(
        1, train_run, MODEL | options | {"tokenizer_file": str(folder / "tokenizer.json")}
    )
    return folder


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """The script's record, in this process."""

    def start(*arguments: Any) -> dict[str, Any]:
        assert script.main([str(argument) for argument in (*arguments, "--json")]) == 0
        record: dict[str, Any] = json.loads(capsys.readouterr().out)
        return record

    return start


@pytest.mark.parametrize("model, size", [("checkpoints", 4), ("export/2", 3)])
def test_the_loss_is_that_of_the_runs_validation(
    model: str, size: int, folder: Path, call: Callable[..., dict[str, Any]]
) -> None:
    """On the same split, whatever the micro-batch size, with documents kept apart as in the run,
    which counts."""
    (expected,) = (
        r for r in read_metrics(folder / "run" / "metrics.jsonl") if r["phase"] == "validation"
    )
    options = ("--model", folder / "run" / model, "--data_path", folder / "data", "--split=50,50,0")
    options += (
        "--sequence_length=16",
        f"--micro_batch_size={size}",
        "--cross_document_attention=0",
    )
    found = call(*options)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert found["tokens"] % 16 == 0 and found["perplexity"] == pytest.approx(
        math.exp(found["loss"])
    )
    assert call(*options[:-1])["loss"] != pytest.approx(expected["loss"], rel=1e-4)
    assert call(*options, "--samples=3")["tokens"] == 48
    if model == "checkpoints":
        averaged = call(*options, "--weights=average")["loss"]
        assert (
            averaged == pytest.approx(expected["averaged_loss"], rel=1e-6)
            and averaged != found["loss"]
        )


def test_the_loss_is_that_of_transformers(
    folder: Path, call: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """A text of several samples: transformers' own loss of each, weighted by its tokens; and the
    bytes spelled out."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS) + "\n")
    export = folder / "run" / "export" / "2"
    options = ("--model", export, "--text", path, "--json_key=body", "--micro_batch_size=2")
    found = call(*options, "--sequence_length=16")

    tokenizer = JsonTokenizer(str(folder / "tokenizer.json"))
    stream = [
        token for text in TEXTS for token in [*tokenizer.encode(text), tokenizer.end_of_document]
    ]
    model = transformers.AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    nats = 0.0
    for start in range(0, len(stream) - 1, 16):
        sample = torch.tensor([stream[start : start + 17]])
        with torch.no_grad():
            nats += float(model(input_ids=sample, labels=sample).loss) * (sample.shape[1] - 1)
    assert found["tokens"] == len(stream) - 1
    assert found["loss"] == pytest.approx(nats / (len(stream) - 1), rel=1e-5)
    first = tokenizer.decode(stream[:1]).encode()
    spelled = sum(len(text.encode()) for text in TEXTS) - len(first)
    assert found["bytes"] == spelled
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / spelled, rel=1e-5)


@pytest.mark.parametrize("model", ["checkpoints", "export/2"])
def test_samples_are_as_long_as_in_training(
    model: str, folder: Path, call: Callable[..., dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """By default; the model has 32 positions, of which 16 were trained. Longer samples are possible
    with a warning."""
    options = ("--model", folder / "run" / model, "--data_path", folder / "data", "--split=50,50,0")
    assert call(*options) == call(*options, "--sequence_length=16")
    assert not caplog.messages
    assert call(*options, "--sequence_length=32")["sequence_length"] == 32
    assert caplog.messages == ["--sequence_length=32: the model was trained with at most 16 tokens"]


@pytest.mark.parametrize("model", ["checkpoints", "export/2"])
def test_data_of_another_tokenizer(
    model: str,
    folder: Path,
    call: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Is refused with both named: the loss of its ids says nothing about the model."""
    prefix = shutil.copy(folder / "data.bin", tmp_path / "data.bin").with_suffix("")
    shutil.copy(folder / "data.idx", tmp_path)
    options = ("--model", folder / "run" / model, "--data_path", prefix, "--split=50,50,0")
    own = digest_of(folder / "tokenizer.json")
    summary = tmp_path / "data.summary.json"
    summary.write_text(json.dumps({"tokenizer_sha256": own, "vocab_size": 300}))
    assert call(*options)["tokens"]
    summary.write_text(json.dumps({"tokenizer_sha256": "ab" * 32, "vocab_size": 299}))
    assert script.main([str(option) for option in options]) == 3
    error = capsys.readouterr().err
    assert all(
        text in error
        for text in (str(folder / "run" / model), own[:8], str(prefix), "299 tokens", "abababab")
    )


def test_folders_that_say_nothing_of_their_training(
    folder: Path, call: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Exports of older versions and models of others are measured at their number of positions."""
    export = shutil.copytree(folder / "run" / "export" / "2", tmp_path / "export")
    content = json.loads((export / "config.json").read_text())
    assert content.pop("megatron_lite")["sequence_length"] == 16
    (export / "config.json").write_text(json.dumps(content))
    assert (
        call("--model", export, "--data_path", folder / "data", "--split=50,50,0")[
            "sequence_length"
        ]
        == 32
    )


def test_samples_of_texts_and_their_documents() -> None:
    """Every token but the first is a label once; documents end with their token and at the borders
    of samples."""
    tokenizer, texts = ByteTokenizer(), ["abc", "", "defghi"]
    stream = [*b"abc", 256, 256, *b"defghi", 256]
    batches = list(text_batches(texts, tokenizer, 257, 4, 2, torch.device("cpu"), separate=True))
    inputs, labels = (
        torch.cat([getattr(batch, name) for batch in batches]) for name in ("tokens", "labels")
    )
    assert [batch.tokens.shape for batch in batches] == [(2, 4), (1, 4)]
    assert inputs.tolist() == [stream[0:4], stream[4:8], stream[8:12]]
    assert labels.tolist() == [stream[1:5], stream[5:9], [*stream[9:12], -1]]
    pieces = [batch.documents for batch in batches]
    assert [piece.lengths for piece in pieces if piece is not None] == [(4, 1, 3), (3, 1)]
    assert [piece.starts.tolist() for piece in pieces if piece is not None] == [
        [0, 4, 5, 8],
        [0, 3, 4],
    ]
    (whole,) = text_batches(texts, tokenizer, 257, 4, 9, torch.device("cpu"))
    assert whole.documents is None and torch.equal(whole.labels, labels)


def test_without_a_tokenizer_there_are_no_bytes(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Token files need no tokenizer; texts do."""
    export = tmp_path / "export"
    export.mkdir()
    for name in ("config.json", "model.safetensors"):
        (export / name).write_bytes((folder / "run" / "export" / "2" / name).read_bytes())
    options = ["--model", str(export), "--data_path", str(folder / "data"), "--sequence_length=16"]
    assert script.main([*options, "--split=0,1,0"]) == 0
    assert "bits per byte unknown (no tokenizer)" in capsys.readouterr().out
    (tmp_path / "text.txt").write_text("text")
    assert script.main(["--model", str(export), "--text", str(tmp_path / "text.txt")]) == 3
    assert "--tokenizer_file" in capsys.readouterr().err
    save_byte_tokenizer(str(tmp_path / "tokenizer.json"))
    more = ["--tokenizer_file", str(tmp_path / "tokenizer.json"), "--json"]
    assert script.main(["--model", str(export), "--text", str(tmp_path / "text.txt"), *more]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["tokens"], record["bytes"]) == (4, 3)


def test_the_mask_and_the_tokenizer_of_the_data(
    folder: Path,
    call: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Are those that its summary names, as in training, unless typed; `none` leaves either out."""
    turns = [
        {"role": "user", "content": "the cats"},
        {"role": "assistant", "content": "a second one"},
    ]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 12)
    prefix, given = tmp_path / "chats", folder / "tokenizer.json"
    words = [
        str(prefix) + ".jsonl",
        "--chat_template=chatml",
        f"--tokenizer={given}",
        f"--output_prefix={prefix}",
    ]
    assert prepare_data.main(words) == 0
    mask = f"{prefix}_mask"
    options = {"data_path": (str(prefix),), "experiment_dir": str(tmp_path / "run")}
    run_distributed(
        1, train_run, MODEL | options | {"loss_mask": (mask,), "tokenizer_file": str(given)}
    )
    (expected,) = (
        r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["phase"] == "validation"
    )
    capsys.readouterr()
    words = ["--data_path", str(prefix), "--split=50,50,0", "--cross_document_attention=0"]
    found = call("--model", tmp_path / "run", *words)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6) and found["loss_mask"] == [
        mask
    ]
    assert found == call("--model", tmp_path / "run", *words, f"--loss_mask={mask}")
    everything = call("--model", tmp_path / "run", *words, "--loss_mask=none")
    assert everything["tokens"] > found["tokens"] and "loss_mask" not in everything
    assert script.main(["--model", str(tmp_path / "run"), *words]) == 0
    assert "in samples of 16, with a loss mask" in capsys.readouterr().out

    export = shutil.copytree(tmp_path / "run" / "export" / "2", tmp_path / "export")
    (export / "tokenizer.json").unlink()
    assert call("--model", export, *words) == found | {"model": str(export)}
    assert call("--model", export, *words, "--tokenizer_file=none")["bytes"] is None


def test_several_models_at_one_length(
    folder: Path,
    call: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """That of the shortest training, which the table says; one that says nothing of its training
    has 32 positions."""
    base = shutil.copytree(folder / "run" / "export" / "2", tmp_path / "base")
    content = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(
        json.dumps({k: v for k, v in content.items() if k != "megatron_lite"})
    )
    (tmp_path / "text.txt").write_text("".join(OTHERS))
    models, text = (base, folder / "run"), ("--text", tmp_path / "text.txt")
    alone = [call("--model", model, *text, "--sequence_length=16") for model in models]
    assert call("--model", base, *text)["loss"] != alone[0]["loss"]
    words = [str(word) for word in ("--model", *models, *text)]
    assert script.main([*words, "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == alone
    assert script.main(words) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[1:3] for row in rows] == [
        ["loss", f"{record['loss']:.6f}"] for record in alone
    ]
    assert rows[0].index("perplexity") == rows[1].index("perplexity") and all(
        "samples of 16" in row for row in rows
    )
    assert (
        script.main([*words, "--sequence_length=8"]) == 0
        and "samples of 8" in capsys.readouterr().out
    )
    assert script.main(["--model", str(base), str(tmp_path), *words[3:]]) == 4
    assert capsys.readouterr().out == "", "nothing was measured: the length is unknown"
    assert (
        script.main(["--model", str(base), str(tmp_path), *words[3:], "--sequence_length=16"]) == 4
    )
    assert f"{alone[0]['loss']:.6f}" in capsys.readouterr().out, (
        "what was measured before the error"
    )
    large = alone[0] | {"tokens": 1_234_567_890, "bytes": 4_567_890_123}
    assert "1,234,567,890 tokens  4,567,890,123 bytes" in next(report([large, large]))
    *_, last = report([alone[0], large | {"bytes": None, "bits_per_byte": None}])
    assert "only bits per byte are comparable" in last and all(
        "tokenizers" not in row for row in rows
    )


def test_folders_and_compressed_files(
    folder: Path, call: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """--text reads what prepare_data does, in its order; --data_path prepares text and reads its
    split."""
    held_out = tmp_path / "held_out"
    held_out.mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n\n" for text in OTHERS[1:])
    (held_out / "a.txt").write_text(OTHERS[0])
    (held_out / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "all.jsonl").write_text(json.dumps({"text": OTHERS[0]}) + "\n" + lines)
    model = ("--model", folder / "run" / "export" / "2")
    assert call(*model, "--text", held_out) == call(*model, "--text", tmp_path / "all.jsonl")
    prefix, split = str(tmp_path / "pair"), "--split=50,50,0"
    prepare(
        CorpusOptions((str(held_out),), prefix, TokenizerChoice(str(folder / "tokenizer.json")))
    )
    expected = call(*model, "--data_path", prefix, split)
    assert call(*model, "--data_path", held_out, split) == expected
    both = call(*model, "--data_path", 0.5, held_out, 0.5, prefix, split)
    assert (
        both["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        and both["tokens"] == 2 * expected["tokens"]
    )


def test_errors_are_one_clear_line(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "LINES.jsonl").write_text('{"text": "a"}\n' + "\n" * 12 + '{"words": "b"}\n')
    (tmp_path / "EMPTY.txt").write_text(" \n")
    (tmp_path / "ONE.txt").write_text("one text")
    data = str(folder / "data")
    cases = [
        (["--data_path", "nowhere"], 3, "nowhere: no such file, folder or pair"),
        (["--data_path", data, "--split=1,0,0"], 2, "--split"),
        (["--data_path", data, "--split=x"], 2, "--split=x"),
        (["--data_path", data, "--sequence_length=33"], 2, "--sequence_length=33"),
        (["--text", "nowhere.txt"], 3, "nowhere.txt"),
        (
            ["--text", str(tmp_path / "EMPTY.txt"), "--loss_mask=none"],
            2,
            "--loss_mask: has no effect with --text",
        ),
        (
            ["--data_path", str(tmp_path / "ONE.txt")],
            3,
            "is one document); give validation a larger share",
        ),
        (["--text", data], 2, f"{data} is a pair of token files; write --data_path={data}"),
        (
            ["--text", f"{data}.bin"],
            2,
            f"{data}.bin is a pair of token files; write --data_path={data}",
        ),
        (["--text", str(tmp_path / "LINES.jsonl")], 3, "line 14: no text"),
        (["--text", str(tmp_path / "EMPTY.txt")], 3, "nothing to predict"),
    ]
    for options, code, fact in cases:
        try:
            ended: Any = script.main(["--model", str(folder / "run" / "export" / "2"), *options])
        except SystemExit as end:
            ended = end.code
        assert ended == code, options
        error = capsys.readouterr().err
        assert error.startswith("ERROR: ") and fact in error and error.count("\n") == 1, options
        assert "_iters" not in error and "valid_data_path" not in error, "flags of training"
