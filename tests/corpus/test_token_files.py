"""Token files of other programs and pairs without borders, as pairs: against the writers of these
programs."""

import gzip
import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.cli.prepare_data import main
from megatron_lite.corpus import token_files
from megatron_lite.data.indexed_dataset import IndexedDataset
from tests.support.token_files import write_documents

END = 90
DOCUMENTS = [[*range(size % 50, size % 50 + size), END] for size in (3, 1, 30, 0, 7, 12, 25)]
TOKENS = list(itertools.chain(*DOCUMENTS))


def convert(tmp_path: Path, *words: Any) -> list[list[int]]:
    """Run the command; return the documents of its pair."""
    prefix = str(tmp_path / "new" / "pair")
    assert main([*map(str, words), "--output_prefix", prefix, "--overwrite"]) == 0
    pair = IndexedDataset(prefix)
    return [pair.document(number).tolist() for number in range(pair.num_documents)]


def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: Any) -> str:
    """Run a command that writes nothing; return what it says."""
    try:
        code = main([*map(str, words), "--output_prefix", str(tmp_path / "none")])
    except SystemExit as error:
        code = int(str(error.code))
    assert code in (2, 3) and not list(tmp_path.glob("none*"))
    return " ".join(capsys.readouterr().err.split())


def write_numpy_header(path: Path, tokens: Any, kind: str) -> None:
    np.save(path, np.array(tokens, kind))


def write_raw(path: Path, tokens: Any, kind: str) -> None:
    """As nanoGPT's data/openwebtext/prepare.py and the dolma toolkit of OLMo-core do: a memory map
    without a header."""
    array = np.memmap(path, kind, "w+", shape=(len(tokens),))
    array[:] = tokens
    array.flush()


@pytest.mark.parametrize("write", [write_raw, write_numpy_header])
@pytest.mark.parametrize("kind", ["uint8", "uint16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("per_read", [1, 7, 1 << 22])
def test_flat_files(
    write: Any, kind: str, per_read: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut after the end token, wherever reads are cut; what follows the last one is a document,
    too."""
    monkeypatch.setattr(token_files, "TOKENS_PER_READ", per_read)
    (tmp_path / "raw").mkdir()
    write(tmp_path / "raw" / "a.npy", TOKENS, kind)
    write(tmp_path / "raw" / "b.npy", [*TOKENS, 1, 2], kind)
    found = convert(
        tmp_path, tmp_path / "raw", f"--from_tokens={kind}", f"--split_documents_at={END}"
    )
    assert found == [*DOCUMENTS, *DOCUMENTS, [1, 2]]
    pattern = convert(
        tmp_path, tmp_path / "raw" / "[b]*", f"--from_tokens={kind}", f"--split_documents_at={END}"
    )
    assert pattern == [*DOCUMENTS, [1, 2]]


@pytest.mark.parametrize("size", [2, 4])
def test_files_of_datatrove(size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own writer, with the index, in both sizes of tokens; the wrong type and a loss mask are
    told."""
    tokenization = pytest.importorskip("datatrove.pipeline.tokens.tokenizer")
    file = tokenization.TokenizedFile(
        str(tmp_path / "ds"), "0_tokens.ds", token_size=size, save_final_metadata=True
    )
    for document in DOCUMENTS:
        file.write(document, None)
    file.close()
    kind, other = ("uint16", "uint32") if size == 2 else ("uint32", "uint16")
    assert convert(tmp_path, tmp_path / "ds", f"--from_tokens={kind}") == DOCUMENTS
    assert "0_tokens.ds: is not what" in refused(
        capsys, tmp_path, tmp_path / "ds", f"--from_tokens={other}"
    )
    (tmp_path / "ds" / "0_tokens.ds.loss").touch()
    assert "no loss mask (.loss)" in refused(
        capsys, tmp_path, tmp_path / "ds", f"--from_tokens={kind}"
    )


def test_a_pair_gets_its_borders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Borders that are there stay; the pair itself may be replaced, and its old summary goes."""
    generator = random.Random(0)
    for _ in range(20):
        cuts = sorted(generator.sample(range(1, len(TOKENS)), generator.randrange(4)))
        write_documents(tmp_path / "x", np.split(TOKENS, cuts))
        borders = sorted({*cuts, *itertools.accumulate(map(len, DOCUMENTS))} - {len(TOKENS)})
        expected = [part.tolist() for part in np.split(TOKENS, borders)]
        assert convert(tmp_path, tmp_path / "x.bin", f"--split_documents_at={END}") == expected
    (tmp_path / "x.summary.json").touch()
    assert (
        main(
            [
                str(tmp_path / "x.bin"),
                "--split_documents_at=90",
                f"--output_prefix={tmp_path / 'x'}",
            ]
        )
        == 2
    )
    assert "exists" in capsys.readouterr().err
    again = ["--split_documents_at=90", "--overwrite", f"--output_prefix={tmp_path / 'x'}"]
    assert (
        main([str(tmp_path / "x.bin"), *again]) == 0
        and IndexedDataset(str(tmp_path / "x")).num_documents >= 7
    )
    assert not (tmp_path / "x.summary.json").exists()


def test_what_is_no_such_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each wrong or missing word, other kinds of files, and flags that say nothing about tokens."""
    raw = tmp_path / "raw.bin"
    typed = "--from_tokens=uint16"
    end = "--split_documents_at=90"
    write_raw(raw, TOKENS, "uint16")
    np.save(tmp_path / "object.npy", np.array(["a", None], object))
    for name, kind in (
        ("real", "f4"),
        ("complex", "c8"),
        ("truth", "?"),
        ("negative", "i8"),
        ("short", "i2"),
    ):
        np.save(tmp_path / f"{name}.npy", np.array([1.5, -100, 90]).astype(kind))
    write_raw(tmp_path / "large.bin", [2**31, END], "uint32")
    (tmp_path / "odd.bin").write_bytes(raw.read_bytes() + b"1")
    (tmp_path / "packed.bin.gz").write_bytes(gzip.compress(raw.read_bytes()))
    pair = write_documents(tmp_path / "pair", DOCUMENTS) + ".bin"
    for words, said in {
        (raw, typed): "--split_documents_at",
        (raw, end): "--from_tokens",
        (raw, typed, "--split_documents_at=91"): "cannot tell where its documents end",
        (raw, "--from_tokens=uint32", end): "raw.bin",
        (pair, "--split_documents_at=91"): "cannot tell where its documents end",
        (pair, "--from_tokens=int32", end): "pair.bin: is not what",
        (tmp_path / "object.npy", end): "object.npy: is not what",
        (
            tmp_path / "real.npy",
            typed,
            end,
        ): "real.npy: is not what its name, its index or --from_tokens say: float32",
        (tmp_path / "complex.npy", typed, end): "say: complex64, not integers",
        (tmp_path / "truth.npy", "--split_documents_at=1"): "say: bool, not integers",
        (tmp_path / "negative.npy", typed, end): "negative.npy: a token id is negative: -100",
        (tmp_path / "short.npy", typed, end): "short.npy: a token id is negative: -100",
        (tmp_path / "large.bin", "--from_tokens=uint32", end): "does not fit int32",
        (tmp_path / "odd.bin", typed, end): "odd.bin: is not what",
        (tmp_path / "packed.bin.gz", typed, end): "decompress it",
        (tmp_path / "nothing.bin", typed, end): "no such file or folder",
        (raw, typed, end, "--json_key=a", "--strict"): "leave out json_key, strict",
    }.items():
        assert said in refused(capsys, tmp_path, *words), words
