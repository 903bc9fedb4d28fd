"""Time the preparation of a .jsonl corpus against other ways to tokenize it, with equal tokenizer
and processes.

    python -m scripts.benchmarks.preparing corpus.jsonl --folder=/data/scratch --output=preparing.json

Rows: this program's command end to end, with its digests and files, also with
`--tokenizer_library=tokenizers`; the recipe of Megatron-LM's tools/preprocess_data.py, a pool that
tokenizes line by line for megatron-core's IndexedDatasetBuilder; `datasets.map` with batches of
1,000; datatrove's DocumentTokenizer, in one
process; and gigatoken's reader of files, which writes nothing. Each row runs in a separate process,
imports included. Each turn measures every row once, in rotating order, and ratios are taken within
a turn, of the CPU time of all processes. Peers that are not installed are skipped. Prints a
Markdown table.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks.commands import measuring_parser, names_in, words_for
from scripts.benchmarks.pipeline import Figures, Turns, describe, over, publish, spread, table
from scripts.docs.tables import ROOT

ROWS = {  # row -> the package that it needs, and the function that tokenizes
    "ours": ("tokenizers", ""),
    "ours by tokenizers": ("tokenizers", ""),
    "megatron-core": ("megatron", "megatron_recipe"),
    "datasets.map": ("datasets", "datasets_map"),
    "datatrove": ("datatrove", "datatrove_tokens"),
    "gigatoken": ("gigatoken", "gigatoken_files"),
}
HERE = "scripts.benchmarks.preparing"
BATCH = 1000  # documents per call
COLUMNS = (spread("CPU s", "cpu_seconds", 1), spread("s", "seconds", 1), over("CPU / ours", "ours"))


def texts(corpus: str) -> Iterator[str]:
    """Yield the documents of a .jsonl file."""
    with open(corpus, encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


class LineEncoder:
    """Tokenizes lines in a pool's processes, like Megatron-LM's Encoder."""

    tokenizer: Any = None

    @classmethod
    def start(cls, tokenizer_file: str) -> None:
        """Load the tokenizer in a pool process."""
        from tokenizers import Tokenizer

        cls.tokenizer = Tokenizer.from_file(tokenizer_file)

    @classmethod
    def encode(cls, line: str) -> list[int]:
        """Return the tokens of a line."""
        ids: list[int] = cls.tokenizer.encode(
            json.loads(line)["text"], add_special_tokens=False
        ).ids
        return [*ids, 0]


def megatron_recipe(corpus: str, tokenizer_file: str, output: str, processes: int) -> int:
    """Tokenize with a pool and write with megatron-core's builder; return the number of tokens."""
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_file(tokenizer_file).get_vocab_size()
    builder = IndexedDatasetBuilder(f"{output}.bin", dtype=DType.optimal_dtype(vocabulary))
    tokens = 0
    pool = multiprocessing.get_context("fork").Pool(processes, LineEncoder.start, (tokenizer_file,))
    with pool, open(corpus, encoding="utf-8") as file:
        for ids in pool.imap(LineEncoder.encode, file, 32):
            builder.add_document(torch.IntTensor(ids), [len(ids)])
            tokens += len(ids) - 1
    builder.finalize(f"{output}.idx")
    return tokens


def datasets_map(corpus: str, tokenizer_file: str, output: str, processes: int) -> int:
    """Tokenize with `datasets.map`, which writes an arrow file; return the number of tokens."""
    from tokenizers import Tokenizer

    datasets: Any = importlib.import_module("datasets")
    tokenizer = Tokenizer.from_file(tokenizer_file)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encodings = tokenizer.encode_batch(batch["text"], add_special_tokens=False)
        return {"ids": [encoding.ids for encoding in encodings]}

    datasets.disable_progress_bars()
    data = datasets.load_dataset("json", data_files=corpus, split="train", cache_dir=output)
    data = data.map(
        encode, batched=True, batch_size=BATCH, num_proc=processes, remove_columns=data.column_names
    )
    return sum(len(column) for chunk in data.data["ids"].chunks for column in chunk)


def datatrove_tokens(corpus: str, tokenizer_file: str, output: str, processes: int) -> int:
    """Tokenize with datatrove's pipeline, in this process, as it gives a file to one task; return
    the documents."""
    readers: Any = importlib.import_module("datatrove.pipeline.readers")
    tokens: Any = importlib.import_module("datatrove.pipeline.tokens")
    reader = readers.JsonlReader(str(Path(corpus).parent), glob_pattern=Path(corpus).name)
    writer = tokens.DocumentTokenizer(
        output, tokenizer_file, eos_token="<|endoftext|>", shuffle_documents=False
    )
    writer.run(reader.run())
    return len(list(Path(output).iterdir()))


def gigatoken_files(corpus: str, tokenizer_file: str, output: str, processes: int) -> int:
    """Tokenize with gigatoken's reader of files, into memory; return the number of documents."""
    gigatoken: Any = importlib.import_module("gigatoken")
    return len(
        gigatoken.Tokenizer(tokenizer_file).encode_files(gigatoken.JsonlFileSource([corpus]))
    )


def prepared(row: str, options: argparse.Namespace, tokenizer_file: str) -> Figures:
    """Run a row in an empty folder; return its time."""
    folder = options.folder / "preparing"
    corpus = str(options.corpus)
    processes = str(options.num_processes)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if row.startswith("ours"):
        command = ["scripts/prepare_data.py", corpus, f"--output_prefix={folder / 'x'}"]
        command += [f"--tokenizer={tokenizer_file}", f"--num_processes={processes}"]
        command += [f"--tokenizer_library={row.partition(' by ')[2] or 'auto'}"]
    else:
        command = words_for(
            HERE, ROWS[row][1], corpus, tokenizer_file, folder / "x", options.num_processes
        )
    threads = {
        "RAYON_NUM_THREADS": processes,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "cache"),
    }
    threads["TOKENIZERS_PARALLELISM"] = str(row.startswith("ours")).lower()
    begun_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **threads},
        capture_output=True,
        text=True,
    )
    taken_s, after = time.monotonic() - begun_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if result.returncode:
        sys.exit(f"{row} failed with exit code {result.returncode}: {result.stderr[-2000:]}")
    shutil.rmtree(folder)
    return {"seconds": taken_s, "cpu_seconds": cpu_s}


def tokenizer_of(options: argparse.Namespace) -> str:
    """Return the given tokenizer, or one trained on the first documents of the corpus."""
    from megatron_lite.data.tokenizing import train_tokenizer

    if options.tokenizer:
        return str(Path(options.tokenizer).absolute())
    path = options.folder / "tokenizer.json"
    train_tokenizer(itertools.islice(texts(str(options.corpus)), 1000), 32_000, str(path))
    return str(path)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    # num_processes: or threads of the library
    parser = measuring_parser(__doc__, turns=3, num_processes=2)
    parser.add_argument("corpus", type=Path, help=".jsonl file with the key text")
    parser.add_argument("--folder", type=Path, required=True, help="folder for temporary files")
    parser.add_argument(
        "--tokenizer",
        help="tokenizer.json (default: a BPE of 32,000 tokens, trained on the corpus)",
    )
    parser.add_argument(
        "--rows", default=",".join(ROWS), help="rows to measure, ours among them (all)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    options = parse(argv)
    options.corpus, options.folder = options.corpus.absolute(), options.folder.absolute()
    options.folder.mkdir(parents=True, exist_ok=True)
    tokenizer_file = tokenizer_of(options)
    wanted = names_in(options.rows)
    missing = {
        row: f"{ROWS[row][0]} is not installed"
        for row in wanted
        if importlib.util.find_spec(ROWS[row][0]) is None
    }
    turns = Turns(
        [row for row in wanted if row not in missing],
        lambda row, turn: prepared(row, options, tokenizer_file),
        options.turns,
        main="cpu_seconds",
    )
    rows = turns.measured("cpu_seconds", "seconds", others=lambda row: ["ours"])
    result = describe(f"python -m {HERE}", argv, vars(options))
    result |= {"rows": rows, "missing": missing}
    publish(result, options.output, "", table(rows, COLUMNS, "preparing"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
