"""Compare the ids of fastokens with those of `tokenizers` for tokenizer files: stress texts,
documents, code points.

    python -m scripts.proof.tokenizer_ids gpt2/tokenizer.json llama/tokenizer.json --documents=corpus.jsonl

Of each file, 7,000 stress texts, with special tokens as text and as tokens, and the first
--documents of a .jsonl file are encoded by both; with --code_points also every assigned code point
in five contexts. Without files, so is each listed pre-tokenizer, over a vocabulary that shows its
borders. A row says how many texts differ, or why prepare_data uses `tokenizers` for the file. Exit
code 1 if any text differs.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import random
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from megatron_lite.corpus.fast_tokenizer import ODD, PARTS, FastTokenizer, UnfitError, listed
from megatron_lite.data.tokenizing import END_OF_DOCUMENT, JsonTokenizer, TokenizerFiles

STRESS_TEXTS, BATCH = 7000, 1000
PLANES = (
    *range(0xD800),
    *range(0xE000, 0x32000),
    *range(0xE0000, 0xE1000),
    *range(0xF0000, 0xF0100),
    0x10FFFF,
)
WORDS = "the of The OF naïve über Straße ЁЖ слово 東京 한국어 עברית عربى हिन्दी ไทย x1 42 3.14 _id {} => // 🦙".split()
SPACES = [character for character in map(chr, PLANES) if character.isspace()] + [
    "\u200b",
    "\ufeff",
    "\u180e",
    "\r\n",
]
MARKS = [character for character in map(chr, PLANES) if unicodedata.combining(character)]
CONTRACTIONS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "\u2019s", "'\u017f", "''")


def stress_texts(special: Sequence[str], count: int = STRESS_TEXTS, seed: int = 0) -> Iterator[str]:
    """Yield texts of ten kinds in turn. special: tokens to spell out."""
    draw = random.Random(seed)

    def some(parts: Sequence[str], least: int = 1, most: int = 20) -> str:
        return "".join(draw.choices(parts, k=draw.randint(least, most)))

    kinds = (
        lambda: _page(draw),
        lambda: _page(draw, " "),
        lambda: "".join(
            itertools.chain(*((draw.choice(WORDS), some(SPACES, 0, 4)) for _ in range(12)))
        ),
        lambda: "".join(
            "".join(
                draw.choice((c.lower(), c.upper()))
                for c in draw.choice(WORDS) + draw.choice(CONTRACTIONS)
            )
            + draw.choice(("", " ", "x", "1"))
            for _ in range(12)
        ),
        lambda: "".join(chr(draw.choice(PLANES[32:0x3000])) + some(MARKS, 0, 4) for _ in range(12)),
        lambda: draw.choice(WORDS + SPACES + MARKS) * draw.randint(2, 80),
        lambda: base64.b64encode(draw.randbytes(draw.randint(1, 90))).decode(),
        lambda: "".join(
            some(WORDS, 0, 4) + draw.choice(("\r\n", "\r", "\n", "\n\n\n", "\t\r\n "))
            for _ in range(9)
        ),
        lambda: "".join(
            draw.choice((*special, "<|x|>", "<s>")) + some([" ", "a", "\n", ""], 0, 3)
            for _ in range(6)
        ),
        lambda: some([chr(code) for code in (*range(32, 127), 10, 9, 160, 0x2019, 0xE9)], 1, 120),
    )
    for number in range(count):
        yield kinds[number % len(kinds)]()


def _page(draw: random.Random, joint: str = "") -> str:
    """Return characters of 256 neighbours, assigned or not."""
    start = draw.randrange(0, len(PLANES), 256)
    return joint.join(chr(code) for code in draw.choices(PLANES[start : start + 256], k=24))


def code_points() -> Iterator[str]:
    """Yield a text for each assigned code point, with five contexts."""
    for character in map(chr, range(0x110000)):
        if unicodedata.category(character) not in ("Cn", "Cs"):
            yield "\n".join(
                context.format(character)
                for context in ("a{0}b", " {0} ", "{0}{0}1{0}", "'{0}s", "e{0}\u0301")
            )


def with_borders(
    pre_tokenizer: str, seed: int, normalizer: str = "NFC", paired: str = ""
) -> JsonTokenizer:
    """Return a tokenizer in which a border between two bytes changes the ids: any two bytes may be
    one token.

    pre_tokenizer: its JSON, of bytes; others have no borders. seed: of the order in which pairs are
    merged. paired: the symbols of which two may be one token; all by default.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = sorted(set(paired)) or symbols
    pairs = [(left, right) for left in letters for right in letters]
    random.Random(seed).shuffle(pairs)
    tokens = [*symbols, *map("".join, pairs)]
    library = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, pairs))
    library.add_special_tokens([END_OF_DOCUMENT])
    content = json.loads(library.to_str()) | {"pre_tokenizer": json.loads(pre_tokenizer)}
    content["normalizer"] = {"type": normalizer} if normalizer else None
    return JsonTokenizer("borders", said=TokenizerFiles(json.dumps(content).encode(), {}))


def differing(fast: FastTokenizer, texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts that both libraries encode differently, of those that fastokens may
    encode."""
    stream = (text for text in texts if ODD not in text)  # which `tokenizers` encodes
    while batch := list(itertools.islice(stream, BATCH)):
        ids, places = fast.encode_flat(batch, 1)
        found = np.split(ids, places[1:-1])
        for text, expected, own in zip(batch, fast.encode_batch(batch), found, strict=True):
            if not np.array_equal(expected, own):
                yield text


def compared(path: str, documents: Sequence[str], every_code_point: bool) -> Iterator[str]:
    """Yield what a row says of a tokenizer file: each kind of texts, with the number of those that
    differ."""
    for special_tokens in (False, True):
        reference = JsonTokenizer(path, special_tokens, needs_end=False)
        try:
            fast = FastTokenizer(reference)
            fast.prove()
        except UnfitError as reason:
            yield f"tokenizers: {reason}"
            return
        special = [token.content for token in fast.library.get_added_tokens_decoder().values()]
        kinds: dict[str, Iterable[str]] = {"stress": stress_texts(special), "documents": documents}
        if every_code_point and not special_tokens:
            kinds["code points"] = code_points()
        for kind, texts in kinds.items():
            found = list(differing(fast, texts))
            yield f"{kind}{' (special)' if special_tokens else ''} {len(found)} differ" + (
                f": {found[0]!r}" if found else ""
            )


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", help="tokenizer.json files")
    parser.add_argument("--documents", type=Path, help=".jsonl file with the key text")
    parser.add_argument("--count", type=int, default=300, help="documents to read (300)")
    parser.add_argument(
        "--code_points", action="store_true", help="every assigned code point, too: a minute a file"
    )
    options = parser.parse_args(argv)
    documents = list[str]()
    if options.documents:
        with options.documents.open(encoding="utf-8") as file:
            documents = [json.loads(line)["text"] for line in itertools.islice(file, options.count)]
    failed = False
    for path in options.files:
        said = list(compared(path, documents, options.code_points))
        failed |= any("differ:" in part for part in said)
        print(f"{path}: {'; '.join(said)}", flush=True)
    for pre_tokenizer in () if options.files else listed(PARTS):
        if '"trim_offsets":true' in pre_tokenizer:  # the other setting changes no id
            fast = FastTokenizer(with_borders(pre_tokenizer, seed=0))
            found = [
                *differing(fast, stress_texts([END_OF_DOCUMENT])),
                *differing(fast, code_points()),
            ]
            failed |= bool(found)
            print(f"{pre_tokenizer}: {len(found)} differ {found[:1]}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
