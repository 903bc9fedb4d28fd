"""fastokens: the ids of `tokenizers` in every text, a wrong id found at the start and in the work,
and mended."""

import importlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from megatron_lite.corpus import tokenizer_choice
from megatron_lite.corpus.fast_tokenizer import (
    FAST,
    ODD,
    PARTS,
    FastTokenizer,
    UnfitError,
    listed,
    shortened,
)
from megatron_lite.corpus.pieces import PieceWriter, make_pieces
from megatron_lite.corpus.prepare import CorpusOptions, prepare
from megatron_lite.corpus.tokenizer_choice import TokenizerChoice
from megatron_lite.data.tokenizing import JsonTokenizer, train_tokenizer
from megatron_lite.errors import UsageError
from scripts.proof.tokenizer_ids import code_points, differing, stress_texts, with_borders

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "prepare_data.py"
ENDINGS = (".bin", ".idx", ".tokenizer.json")
# which changes no id
OWN_PARTS = [line for line in listed(PARTS) if '"trim_offsets":false' not in line]
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def split(pattern: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    """Return a Split of a tokenizer.json."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [*parts, BYTES]}


def added(**flags: bool) -> dict[str, Any]:
    plain = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": False,
    }
    return {"id": 600, "content": "<x>", **plain, **flags}


# What is changed in a tokenizer.json, or why `tokenizers` must serve.
VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "lstrip": ({"added": added(lstrip=True)}, ""),
    "rstrip": ({"added": added(rstrip=True)}, ""),
    "both": ({"added": added(lstrip=True, rstrip=True)}, ""),
    "normalized": ({"added": added(normalized=True)}, ""),
    "single_word": ({"added": added(single_word=True)}, ""),
    "special": ({"added": added(special=True)}, ""),
    "ignore_merges": ({"model": {"ignore_merges": True}}, ""),
    "dropout": ({"model": {"dropout": 0.5}}, ""),
    "truncation": (
        {
            "truncation": {
                "direction": "Right",
                "max_length": 5,
                "strategy": "LongestFirst",
                "stride": 0,
            }
        },
        "",
    ),
    "padding": (
        {
            "padding": {
                "strategy": {"Fixed": 50},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "<|endoftext|>",
            }
        },
        "",
    ),
    "template": (
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [
                    {"Sequence": {"id": "A", "type_id": 0}},
                    {"Sequence": {"id": "B", "type_id": 1}},
                ],
                "special_tokens": {
                    "<|endoftext|>": {
                        "id": "<|endoftext|>",
                        "ids": [0],
                        "tokens": ["<|endoftext|>"],
                    }
                },
            }
        },
        "",
    ),
    "no rule": ({"pre_tokenizer": BYTES}, ""),
    "space in front": (
        {"pre_tokenizer": BYTES | {"add_prefix_space": True, "use_regex": True}},
        "",
    ),
    "own rule": (
        {"pre_tokenizer": sequence(split(r"\d|[aeiou]+\s*"))},
        "not known to be exact for .*Split",
    ),
    "a known rule elsewhere": (
        {"pre_tokenizer": sequence(split(r"\p{N}{1,3}"))},
        "not known to be exact for .*Split",
    ),
    "offsets": ({"pre_tokenizer": BYTES | {"use_regex": True, "trim_offsets": False}}, ""),
    "NFC": ({"normalizer": {"type": "NFC"}}, ""),
    "replaced": (
        {"normalizer": {"type": "Replace", "pattern": {"String": "e"}, "content": "xx "}},
        "Replace",
    ),
    "replaced by a rule": (
        {"normalizer": {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "}},
        "not known to be exact for .*Replace",
    ),
    "Lowercase": ({"normalizer": {"type": "Lowercase"}}, "not known to be exact for .*Lowercase"),
    "Punctuation": (
        {"pre_tokenizer": sequence({"type": "Punctuation", "behavior": "Isolated"})},
        "not known to be exact for .*Punctuation",
    ),
    "suffix": ({"model": {"end_of_word_suffix": "</w>"}}, ""),
    "no bytes": ({"pre_tokenizer": None}, "models other than BPE with every byte"),
    "unknown characters": ({"pre_tokenizer": None, "model": {"unk_token": "<|endoftext|>"}}, ""),
    "byte_fallback": (
        {
            "pre_tokenizer": None,
            "model": {"byte_fallback": True, "unk_token": "<|endoftext|>", "fuse_unk": True},
        },
        "",
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A byte-level BPE of 600 tokens, trained on prose, code and stress texts."""
    texts = [path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md"))[:3]]
    path = tmp_path_factory.mktemp("tokenizer") / "plain.json"
    train_tokenizer(iter([*texts, *stress_texts([], 400, seed=1)]), 600, str(path))
    return str(path)


def changed(path: str, folder: Path, **changes: Any) -> str:
    """Write a tokenizer.json with other parts; return its path."""
    content = json.loads(Path(path).read_text("utf-8"))
    content["added_tokens"] += [changes.pop("added")] if "added" in changes else []
    content["model"] |= changes.pop("model", {})
    target = folder / "changed.json"
    target.write_text(json.dumps(content | changes), "utf-8")
    return str(target)


# fastokens as `tokenizers` would have it, but for the first id of a text that holds the word in a
# file.
STUB = """
from pathlib import Path

import numpy as np
import tokenizers

WORD = Path(__file__).with_name("word")


class Tokenizer:
    def __init__(self, library):
        self.library = library

    @classmethod
    def from_json_str(cls, content):
        return cls(tokenizers.Tokenizer.from_str(content))

    def encode_batch_flat(self, texts, split_special_tokens):
        self.library.encode_special_tokens = split_special_tokens
        encodings = self.library.encode_batch_fast(texts, add_special_tokens=False)
        found = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        word = WORD.read_text("utf-8")
        for text, ids in zip(texts, found, strict=True):
            if word in text:
                ids[:1] += 1
        return np.concatenate(found).tobytes(), np.cumsum([0, *map(len, found)]).astype(np.uint64).tobytes()
"""


class Wrong:
    """A fastokens, also of workers, and the word that it gets wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "fastokens.py").write_text(STUB)
        self.word, self.version = "nowhere", "0.3.5"

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "word":
            (self.folder / "word").write_text(value, "utf-8")
        if name == "version":
            described = self.folder / "fastokens-0.3.5.dist-info" / "METADATA"
            described.parent.mkdir(exist_ok=True)
            described.write_text(f"Metadata-Version: 2.1\nName: fastokens\nVersion: {value}\n")


@pytest.fixture
def stub(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Wrong]:
    """Install a fastokens that is wrong where the test says so, for inputs of any size."""
    wrong = Wrong(tmp_path_factory.mktemp("stub"))
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, FAST, raising=False)
        patch.syspath_prepend(wrong.folder)
        patch.setattr(tokenizer_choice, "WORTHWHILE_BYTES", 0)
        yield wrong
        sys.modules.pop(FAST, None)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """2,300 documents, of which number 1,400 holds a word that no other has."""
    path = tmp_path / "x.jsonl"
    texts = (
        f"document {n} of {'a zebra in ' if n == 1400 else ''}many: é\n{n * n}" for n in range(2300)
    )
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def options(
    corpus: Path, tokenizer: str, output: Path, library: str = "auto", **changes: Any
) -> CorpusOptions:
    choice = TokenizerChoice(tokenizer, library=library)
    return replace(
        CorpusOptions((str(corpus),), str(output / "x"), choice, piece_bytes=20_000), **changes
    )


def files(output: Path) -> dict[str, bytes]:
    return {ending: (output / f"x{ending}").read_bytes() for ending in ENDINGS}


def test_a_wrong_id_is_found_at_the_start(
    corpus: Path, plain: str, tmp_path: Path, stub: Wrong, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line names the smallest text; all tokens come from `tokenizers`. Asked for by name, it is
    refused."""
    prepare(options(corpus, plain, tmp_path / "right", "tokenizers"))
    stub.word = "\u1680"
    capsys.readouterr()
    summary, _ = prepare(options(corpus, plain, tmp_path / "out"))
    said = capsys.readouterr().err
    assert (
        said.startswith("tokenizing without fastokens: fastokens has the ids [")
        and said.count("tokenizing with") == 1
    )
    assert "for '\\u1680', where tokenizers has [" in said
    assert FAST not in summary["versions"] and files(tmp_path / "out") == files(tmp_path / "right")
    with pytest.raises(
        UsageError, match=r"_library=fastokens: .* has the ids .*; write auto, or tokenizers"
    ):
        prepare(options(corpus, plain, tmp_path / "asked", FAST))


@pytest.mark.parametrize("guarded", [True, False])
def test_a_wrong_id_in_the_work_is_found_and_mended(
    corpus: Path,
    plain: str,
    tmp_path: Path,
    stub: Wrong,
    capsys: pytest.CaptureFixture[str],
    guarded: bool,
) -> None:
    """In the first document of a piece: what was finished is made anew, with the bytes of
    `tokenizers`, and the next start finds it. A wrong id in a document that is not compared goes
    out: the test sees a guard, not a repair."""
    prepare(options(corpus, plain, tmp_path / "right", "tokenizers"))
    lines = corpus.read_bytes().splitlines(keepends=True)
    piece = sum(map(len, lines[: 1400 if guarded else 1390]))
    stub.word = "zebra"
    capsys.readouterr()
    chosen = options(corpus, plain, tmp_path / "out", piece_bytes=piece)
    summary, _ = prepare(chosen)
    said = capsys.readouterr().err
    assert "tokenizing with fastokens: the ids of proof texts are those of tokenizers" in said
    assert (
        "for 'zebra', where tokenizers has [" in said
        and "making all tokens anew with tokenizers" in said
    ) == guarded
    assert (FAST in summary["versions"]) != guarded
    assert (files(tmp_path / "out") == files(tmp_path / "right")) == guarded
    assert prepare(chosen) == (summary, False) and not list((tmp_path / "out").glob("*.partial"))


def test_a_start_goes_on_where_a_killed_one_mended(
    corpus: Path,
    plain: str,
    tmp_path: Path,
    stub: Wrong,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It keeps the pieces of `tokenizers`, whatever may serve now; pieces that it cannot use are
    counted."""
    prepare(options(corpus, plain, tmp_path / "right", "tokenizers"))
    lines = corpus.read_bytes().splitlines(keepends=True)
    piece_bytes = sum(map(len, lines[:1400]))
    chosen = options(corpus, plain, tmp_path / "out", piece_bytes=piece_bytes)
    stub.word = "zebra"

    def killed(pieces: Any, writer: PieceWriter, *arguments: Any) -> Iterator[Any]:
        """End the start once `tokenizers` has made a piece."""
        for number, record in enumerate(make_pieces(pieces, writer, *arguments)):
            if number and FAST not in writer.recipe.versions:
                raise KeyboardInterrupt
            yield record

    def kill() -> None:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("megatron_lite.corpus.prepare.make_pieces", killed)
            prepare(chosen)
        assert "making all tokens anew with tokenizers" in capsys.readouterr().err

    kill()
    summary, _ = prepare(chosen)
    said = capsys.readouterr().err
    assert "going on with the pieces that tokenizers has made" in said and "made anew" not in said
    assert FAST not in summary["versions"] and files(tmp_path / "out") == files(tmp_path / "right")
    shutil.rmtree(tmp_path / "out")
    kill()
    prepare(replace(chosen, piece_bytes=piece_bytes // 2))
    assert re.search(
        r"^\d finished pieces? of other options or versions: made anew",
        capsys.readouterr().err,
        re.M,
    )


def fill(pipe: int, content: bytes) -> None:
    with open(pipe, "wb") as file:
        file.write(content)


def test_a_pipe_is_read_by_tokenizers(
    corpus: Path, plain: str, tmp_path: Path, stub: Wrong, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second reading would find only what the first one has not taken: no wrong id may ask for
    it."""
    prepare(options(corpus, plain, tmp_path / "right", "tokenizers"))
    stub.word = "document 0 of"
    reader, writer = os.pipe()
    (tmp_path / "pipe.jsonl").symlink_to(f"/dev/fd/{reader}")
    thread = threading.Thread(target=fill, args=(writer, corpus.read_bytes()))
    thread.start()
    summary, _ = prepare(options(tmp_path / "pipe.jsonl", plain, tmp_path / "out"))
    thread.join(60)
    os.close(reader)
    assert "tokenizing without fastokens: a pipe can be read only once" in capsys.readouterr().err
    assert FAST not in summary["versions"] and files(tmp_path / "out") == files(tmp_path / "right")


def test_a_worker_finds_a_wrong_id(
    corpus: Path,
    plain: str,
    tmp_path: Path,
    stub: Wrong,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two workers, of which one stops at the second piece; without a wrong id both make the bytes
    of `tokenizers`."""
    monkeypatch.setattr("megatron_lite.corpus.pieces.LIGHT_BYTES", 0)
    prepare(options(corpus, plain, tmp_path / "right", "tokenizers"))
    lines = corpus.read_bytes().splitlines(keepends=True)
    changes = {"num_processes": 4, "piece_bytes": sum(map(len, lines[:1400]))}
    for word in ("nowhere", "zebra"):
        stub.word = word
        summary, _ = prepare(options(corpus, plain, tmp_path / word, **changes))
        assert (FAST in summary["versions"]) == (word == "nowhere")
        assert ("making all tokens anew" in capsys.readouterr().err) == (word == "zebra")
        assert files(tmp_path / word) == files(tmp_path / "right")


def test_a_panic_while_loading(plain: str, stub: Wrong) -> None:
    """A panic of fastokens derives from BaseException: `tokenizers` serves then, too; Ctrl-C stays
    what it is."""
    raised: list[BaseException] = [BaseException("slice index"), KeyboardInterrupt()]
    source = "class Tokenizer:\n    def from_json_str(content):\n        raise Tokenizer.raised\n"
    (stub.folder / "fastokens.py").write_text(source)
    for error, expected in zip(raised, (UnfitError, KeyboardInterrupt), strict=True):
        importlib.import_module(FAST).Tokenizer.raised = error
        with pytest.raises(expected):
            FastTokenizer(JsonTokenizer(plain))


def test_the_memory_of_words_is_bounded(
    plain: str, stub: Wrong, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fastokens keeps every word that it has seen; after some text it is loaded anew, with the same
    ids."""
    monkeypatch.setattr("megatron_lite.corpus.fast_tokenizer.LOADED_CHARACTERS", 1000)
    fast = FastTokenizer(JsonTokenizer(plain))
    first, found = fast._fast, [fast.encode("x" * 400) for _ in range(5)]
    assert fast._fast is not first and found == found[:1] * 5


@pytest.mark.slow
def test_killed_fifty_times_with_either_library(corpus: Path, plain: str, tmp_path: Path) -> None:
    """SIGKILL at random moments of starts that draw their library: the bytes of an undisturbed
    start."""
    real(plain)
    corpus.write_bytes(corpus.read_bytes() * 40)
    words = [
        sys.executable,
        str(SCRIPT),
        str(corpus),
        "--tokenizer",
        plain,
        "--num_processes=1",
        "--output_prefix",
    ]
    assert (
        subprocess.run(
            [*words, str(tmp_path / "right" / "x"), "--tokenizer_library=tokenizers"]
        ).returncode
        == 0
    )
    draw = random.Random(0)
    output = tmp_path / "out"
    kills = 0
    while kills < 50:
        library = draw.choice(["tokenizers", FAST])
        command = [*words, str(output / "x"), f"--tokenizer_library={library}"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            _, said = process.communicate(timeout=draw.uniform(0.1, 4))
            assert process.returncode == 0 and not list(output.glob("*.partial")), said
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
        if (output / "x.idx").exists():  # then the whole pair is there
            assert files(output) == files(tmp_path / "right")
            for path in filter(Path.is_file, output.iterdir()):
                path.unlink()
    assert subprocess.run([*words, str(output / "x")]).returncode == 0
    assert files(output) == files(tmp_path / "right")


def test_every_thousandth_text_and_long_ones(plain: str, stub: Wrong) -> None:
    """The guard counts through batches, and reads the beginning of a text that is long."""
    fast, texts = FastTokenizer(JsonTokenizer(plain)), ["plain"] * 2500
    for wrong, found in (
        (0, True),
        (1, False),
        (999, False),
        (1000, True),
        (2000, True),
        (2499, False),
    ):
        texts[wrong] = "zebra"
        stub.word = "zebra"
        for batch in (300, 2500):
            with pytest.raises(UnfitError) if found else nullcontext():
                for start in range(0, 2500, batch):
                    fast.encode_flat(texts[start : start + batch], start)
        texts[wrong] = "plain"
    with pytest.raises(UnfitError, match="'zebra'"):
        fast.encode_flat(["zebra " + "x" * 100_000], 0)
    stub.word = "nowhere"
    ids, places = fast.encode_flat(["", "zebra " + "x" * 100_000, ""], 0)
    assert places.tolist() == [0, 0, len(ids), len(ids)]


def test_bytes_that_a_vocabulary_lacks(plain: str, tmp_path: Path) -> None:
    """GPT-NeoX lacks bytes that UTF-8 never has; without another byte, `tokenizers` serves: its
    texts would differ."""
    content = json.loads(Path(plain).read_text("utf-8"))
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    for symbols, is_exact in (("ÀÁõö÷øùúûüýþÿ", True), ("Ã", False)):
        kept = [
            token for token in sorted(vocabulary, key=vocabulary.get) if not {*token} & {*symbols}
        ]
        pairs = [pair for pair in merges if not {*"".join(pair)} & {*symbols}]
        path = changed(
            plain,
            tmp_path,
            model={"vocab": {token: n for n, token in enumerate(kept)}, "merges": pairs},
        )
        if is_exact:
            assert not list(differing(real(path), stress_texts([], 300)))
        else:
            with pytest.raises(UnfitError, match="models other than BPE with every byte"):
                real(path)


def test_a_long_s_after_an_apostrophe(tmp_path: Path) -> None:
    """Rules with (?i:'s) take it for a contraction in Oniguruma only: `tokenizers` encodes batches
    with such texts."""
    rule = next(line for line in listed(PARTS) if "(?i:'s" in line)
    text = f"gibt{ODD}of"
    symbols = text.encode().decode("latin-1")  # as a ByteLevel writes these bytes
    content = with_borders(rule, seed=2, paired=symbols).library.to_str()
    (tmp_path / "borders.json").write_text(content, "utf-8")
    fast = real(str(tmp_path / "borders.json"))
    own = np.frombuffer(
        fast._fast.encode_batch_flat([text], split_special_tokens=True)[0], np.uint32
    ).tolist()
    assert own != fast.encode(text) == JsonTokenizer(str(tmp_path / "borders.json")).encode(text)
    lines = [json.dumps({"text": words}) + "\n" for words in ("plain words 's", text, "more")]
    (tmp_path / "x.jsonl").write_text("".join(lines))
    for library in ("tokenizers", FAST):
        prepare(
            options(
                tmp_path / "x.jsonl", str(tmp_path / "borders.json"), tmp_path / library, library
            )
        )
    assert files(tmp_path / FAST) == files(tmp_path / "tokenizers")


def test_the_smallest_text(plain: str) -> None:
    """Halves to characters are left out as long as the rest differs."""
    text = "one two three " * 50 + "a zebra b" + "x" * 77
    assert shortened(text, lambda part: "z" in part and "b" in part.partition("z")[2]) == "zb"
    assert shortened("", lambda part: True) == ""


def test_where_fastokens_does_not_serve(
    corpus: Path, plain: str, tmp_path: Path, stub: Wrong, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reason is one line; whoever asks for fastokens by name gets it as an error."""
    reasons = {
        "only tokenizers may (--tokenizer_library, --per_token)": options(
            corpus, plain, tmp_path / "a", "tokenizers"
        )
    }
    word_pieces = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({"</s>": 0, "x": 1}, unk_token="</s>")
    )
    word_pieces.save(str(tmp_path / "words.json"))
    every_byte = "fastokens is not known to be exact for models other than BPE with every byte in their vocabulary"
    reasons[every_byte] = options(corpus, str(tmp_path / "words.json"), tmp_path / "c")
    capture = list[str]()
    monkeypatch.setattr(
        "builtins.print", lambda *words, file=None: capture.append(" ".join(map(str, words)))
    )
    for reason, chosen in reasons.items():
        capture.clear()
        summary, _ = prepare(chosen)
        assert (
            f"tokenizing without fastokens: {reason}" in capture and FAST not in summary["versions"]
        )
    capture.clear()
    prepare(options(corpus, "byte", tmp_path / "b"))
    assert not any("fastokens" in line for line in capture)
    with pytest.raises(
        UsageError, match="_library=fastokens: bytes need no library; write auto, or tokenizers"
    ):
        prepare(options(corpus, "byte", tmp_path / "b", FAST, overwrite=True))
    monkeypatch.setattr(tokenizer_choice.metadata, "distributions", lambda name: iter(()))
    with pytest.raises(
        UsageError, match=r"fastokens, which is faster, is not installed: pip install '.\[fast\]'"
    ):
        prepare(options(corpus, plain, tmp_path / "d", FAST))


def test_a_pair_of_tokenizers_serves_fastokens_too(
    corpus: Path, plain: str, tmp_path: Path, stub: Wrong, capsys: pytest.CaptureFixture[str]
) -> None:
    """An old pair is not made anew because fastokens is installed; a new one says what made it."""
    first, is_new = prepare(options(corpus, plain, tmp_path / "out", "tokenizers"))
    assert is_new and prepare(options(corpus, plain, tmp_path / "out")) == (first, False)
    fast, _ = prepare(options(corpus, plain, tmp_path / "fast"))
    assert (
        fast["versions"] == first["versions"] | {FAST: "0.3.5"}
        and fast["fingerprint"] != first["fingerprint"]
    )
    assert files(tmp_path / "fast") == files(tmp_path / "out")
    with pytest.raises(UsageError, match="exists; choose another --output_prefix"):
        prepare(options(corpus, plain, tmp_path / "fast", "tokenizers"))


def test_marks_around_documents(tmp_path: Path, plain: str, stub: Wrong) -> None:
    """Begin and end of documents, empty ones too, stand as `tokenizers` places them."""
    end = JsonTokenizer(plain).end_of_document
    (tmp_path / "x.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("ab", "c" * 3000, "d e"))
    )
    for number, (begin, last) in enumerate(
        ((None, None), ("<|endoftext|>", "none"), ("<|endoftext|>", None))
    ):
        outputs = []
        for library in ("tokenizers", FAST):
            output = tmp_path / f"{number}{library}"
            choice = TokenizerChoice(plain, begin=begin, end=last, library=library)
            prepare(replace(options(tmp_path / "x.jsonl", plain, output), tokenizer=choice))
            outputs.append(files(output))
        assert outputs[0] == outputs[1]
        tokens = np.frombuffer(outputs[0][".bin"], "<u2")
        assert np.count_nonzero(tokens == end) == (6 if begin and last is None else 3)


def real(path: str, special_tokens: bool = False) -> FastTokenizer:
    """Load a tokenizer with the fastokens that is installed."""
    pytest.importorskip(FAST, reason="pip install 'fastokens>=0.3.5,<0.4' compares its ids")
    return FastTokenizer(JsonTokenizer(path, special_tokens, needs_end=False))


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_have_the_same_ids(plain: str, tmp_path: Path, variant: str) -> None:
    """One setting of a file each, special tokens as text and as tokens: equal, or not for
    fastokens."""
    changes, reason = VARIANTS[variant]
    path = changed(plain, tmp_path, **changes)
    for special_tokens in (False, True):
        if reason:
            with pytest.raises(UnfitError, match=reason):
                real(path, special_tokens)
            continue
        fast = real(path, special_tokens)
        fast.prove()
        texts = stress_texts(["<x>", "<|endoftext|>", "a<x>b", " <x> "], 120)
        assert not list(differing(fast, texts))
    if not reason:
        assert len(fast.encode("x" * 20)) > 5


@pytest.mark.parametrize("number", range(len(OWN_PARTS)))
def test_listed_parts_have_the_same_ids(plain: str, tmp_path: Path, number: int) -> None:
    """Texts of all kinds with each listed part, a pre-tokenizer without a normalizer and with
    NFC."""
    part = json.loads(OWN_PARTS[number])
    is_normalizer = part is not None and (
        "normalizers" in part or part["type"] in ("NFC", "Replace")
    )
    fallback = {} if "ByteLevel" in json.dumps(part) else VARIANTS["byte_fallback"][0]["model"]
    for normalizer in [part] if is_normalizer else [None, {"type": "NFC"}]:
        splits = None if is_normalizer else part
        path = changed(plain, tmp_path, pre_tokenizer=splits, normalizer=normalizer, model=fallback)
        assert not list(differing(real(path), stress_texts(["<|endoftext|>"], 100, seed=2)))


@pytest.mark.slow
@pytest.mark.parametrize("normalizer", ["", "NFC"])
@pytest.mark.parametrize("splits", [line for line in OWN_PARTS if "ByteLevel" in line])
def test_every_code_point(splits: str, normalizer: str) -> None:
    """Every assigned code point in five contexts, and 7,000 stress texts, where each border
    shows."""
    fast = FastTokenizer(with_borders(splits, len(normalizer), normalizer))
    assert not list(differing(fast, code_points()))
    assert not list(differing(fast, stress_texts(["<|endoftext|>"])))


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["lstrip", "rstrip", "both", "single_word", "normalized"])
def test_every_code_point_beside_a_token(plain: str, tmp_path: Path, flags: str) -> None:
    """Flags of added tokens ask what white space is, and what a word is."""
    fast = real(changed(plain, tmp_path, normalizer={"type": "NFC"}, **VARIANTS[flags][0]))
    texts = (f"{text[1]}<x>{text[1]} <x> {text[1]}" for text in code_points())
    assert not list(differing(fast, texts))
