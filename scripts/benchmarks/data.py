"""Time opening a large data set and loading samples: ours, megatron-core's GPTDataset, and a memory
map of the tokens.

    python -m scripts.benchmarks.data --folder=/data/scratch --output=data.json

Opening: a data set of 10 billion tokens in 10 million documents with a sparse `.bin`, from the call
to the first batch of 8 samples of 2,048 tokens, with the memory that the process gained.
megatron-core builds its index for 1,000 iterations, and reads it from its cache the second time.
Loading: samples of 2,048 tokens in batches of 32 from 100 million tokens, with 1 and 2 workers per
loader; the peers use torch's DataLoader. Every measurement runs in a separate process and starts
after the imports. Each turn measures every row once, in rotating order, and ratios are taken within
a turn. megatron-core (`pip install --no-deps megatron-core`) is skipped if not installed. Prints
Markdown tables.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.data.indexed_dataset import HEADER, MAGIC, VERSION
from scripts.benchmarks import processor
from scripts.benchmarks.commands import measured_alone, measuring_parser
from scripts.benchmarks.pipeline import MIB, Turns, describe, first_ratio, publish, spread, table

HERE = "scripts.benchmarks.data"
LENGTH = 2048
VOCABULARY = 50_000
OPENED, LOADED = 8, 32  # samples per batch
ITERATIONS = 1000  # length of the run that opens the large set
OPENING = ("ours", "megatron-core", "megatron-core cached")
LOADERS = ("ours", "megatron-core", "memory map")
WARM_UP = 20  # untimed batches


def write_set(prefix: Path, documents: int, tokens: int, filled: bool) -> None:
    """Write a .bin/.idx pair of 16-bit tokens in documents of equal length. filled: random tokens,
    else sparse."""
    size, generator = tokens // documents, np.random.default_rng(0)
    with open(f"{prefix}.bin", "wb") as file:
        if filled:
            for _ in range(10):
                file.write(
                    generator.integers(
                        1, VOCABULARY, documents * size // 10, dtype=np.uint16
                    ).tobytes()
                )
        file.truncate(2 * documents * size)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 8, documents, documents + 1))
        file.write(np.full(documents, size, dtype="<i4").tobytes())
        file.write((np.arange(documents, dtype="<i8") * (2 * size)).tobytes())
        file.write(np.arange(documents + 1, dtype="<i8").tobytes())


def our_batches(prefix: str, samples: int, iterations: int, workers: int) -> Iterator[Any]:
    """Yield the batches of this program."""
    from megatron_lite.config import unflatten
    from megatron_lite.data.open_data import open_data
    from megatron_lite.validation import resolve

    options: dict[str, Any] = dict(
        num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=VOCABULARY
    )
    options |= dict(
        sequence_length=LENGTH,
        batch_size=samples,
        data_path=(prefix,),
        split=(1.0,),
        num_workers=workers,
    )
    config = resolve(unflatten({**options, "train_iters": iterations, "device": "cpu"}), 1)
    source = open_data(config, 0, 1)
    yield from source.batches("training", 0, iterations)


def their_set(prefix: str, samples: int, cache: str | None) -> Any:
    """Return megatron-core's data set of `samples` samples, without attention masks, (s, s)
    each."""
    import torch
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    class Tokenizer:
        # noqa: RUF012
        eod = 0
        pad = -1
        vocab_size = VOCABULARY
        unique_identifiers = {"class": "none"}
        special_tokens_dict: dict[str, str] = {}  # noqa: RUF012

    if not torch.distributed.is_initialized():  # megatron-core queries the rank
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=LENGTH,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=cache,
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    low_level = GPTDataset.build_low_level_dataset(prefix, config)
    documents = np.arange(GPTDataset.numel_low_level_dataset(low_level), dtype=np.int32)
    return GPTDataset(low_level, prefix, documents, samples, Split.train, config)


def mapped_set(prefix: str, samples: int) -> Any:
    """Return a minimal data set: random windows of a memory map."""
    import torch

    class Mapped(torch.utils.data.Dataset):
        def __init__(self) -> None:
            self.tokens = np.memmap(f"{prefix}.bin", dtype=np.uint16, mode="r")
            self.order = np.random.default_rng(0).permutation((len(self.tokens) - 1) // LENGTH)

        def __len__(self) -> int:
            return samples

        def __getitem__(self, index: int) -> tuple[Any, Any]:
            start = int(self.order[index % len(self.order)]) * LENGTH
            tokens = torch.from_numpy(self.tokens[start : start + LENGTH + 1].astype(np.int64))
            return tokens[:-1], tokens[1:]

    return Mapped()


def opened(row: str, prefix: str, cache: str) -> dict[str, float]:
    """Open a data set and read its first batch; return time and memory."""
    ours = ("megatron_lite.data.open_data", "megatron_lite.validation")
    for module in ours if row == "ours" else ("megatron.core.datasets.gpt_dataset",):
        importlib.import_module(module)
    before, begun_s = processor.reset_peak(), time.perf_counter()
    if row == "ours":
        assert len(next(our_batches(prefix, OPENED, ITERATIONS, 0))[0].tokens) == OPENED
    else:
        dataset = their_set(prefix, OPENED * ITERATIONS, cache)
        assert len([dataset[index] for index in range(OPENED)]) == OPENED
    seconds = time.perf_counter() - begun_s
    return {"seconds": seconds, "memory_bytes": processor.memory_bytes("VmHWM") - before}


def loaded(row: str, workers: int, prefix: str, batches: int) -> dict[str, float]:
    """Return a loader's time per sample, after warm-up."""
    import torch

    torch.set_num_threads(1)
    total = WARM_UP + batches
    if row == "ours":
        stream: Iterator[Any] = our_batches(prefix, LOADED, total, workers)
    else:
        dataset = (
            their_set(prefix, LOADED * total, None)
            if row == "megatron-core"
            else mapped_set(prefix, LOADED * total)
        )
        loader = torch.utils.data.DataLoader(
            dataset, LOADED, num_workers=workers, prefetch_factor=2
        )
        stream = iter(loader)
    for _ in range(WARM_UP):
        next(stream)
    begun_s = time.perf_counter()
    for _ in range(batches):
        next(stream)
    seconds = (time.perf_counter() - begun_s) / (LOADED * batches)
    return {"seconds": seconds, "samples_per_s": 1 / seconds}


def opening(options: argparse.Namespace, peers: bool) -> Turns:
    """Measure the rows of opening."""
    prefix, cache = options.folder / "large", options.folder / "cache"
    write_set(prefix, options.documents, 1000 * options.documents, filled=False)

    def one(row: str, turn: int) -> dict[str, float]:
        if row == "megatron-core":
            shutil.rmtree(cache, ignore_errors=True)
        if row == "megatron-core cached" and not cache.exists():
            measured_alone(HERE, "opened", row, prefix, cache)
        return measured_alone(HERE, "opened", row, prefix, cache)

    return Turns(OPENING if peers else OPENING[:1], one, options.turns, warm_up=1)


def loading(options: argparse.Namespace, peers: bool) -> Turns:
    """Measure the rows of loading."""
    prefix = options.folder / "filled"
    write_set(prefix, options.documents // 100, 10 * options.documents, filled=True)
    rows = {f"{name}, {workers} workers": (name, workers) for workers in (1, 2) for name in LOADERS}
    names = [row for row, (name, _) in rows.items() if peers or name != "megatron-core"]

    def one(row: str, turn: int) -> dict[str, float]:
        return measured_alone(HERE, "loaded", *rows[row], prefix, options.batches)

    return Turns(names, one, options.turns, warm_up=1)


def ours_with_as_many_workers(name: str) -> list[str]:
    """Return our row with the same number of workers."""
    return [name.replace(name.partition(",")[0], "ours")]


# A row's time per sample over ours equals our speed over the row's.
COLUMNS = {
    "opening": (
        spread("s", "seconds", 3),
        spread("MiB", "memory_bytes", 0, 1 / MIB),
        first_ratio("time / ours", 1),
    ),
    "loading": (spread("samples/s", "samples_per_s", 0), first_ratio("ours / this")),
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    # documents: of 1,000 tokens, in the large set; batches: timed ones of each loader
    parser = measuring_parser(__doc__, turns=5, documents=10_000_000, batches=300)
    parser.add_argument(
        "--folder", type=Path, required=True, help="new folder for the data; deleted at the end"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measure, print and write; return the exit code."""
    options = parse(argv)
    peers = importlib.util.find_spec("megatron") is not None
    options.folder.mkdir(parents=True)
    try:
        rows = {
            "opening": opening(options, peers).measured(
                "seconds", "memory_bytes", others=ours_with_as_many_workers
            ),
            "loading": loading(options, peers).measured(
                "seconds", "samples_per_s", others=ours_with_as_many_workers
            ),
        }
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)
    result = describe(f"python -m {HERE}", argv, vars(options))
    result |= {
        "rows": rows["opening"] | rows["loading"],
        "missing": {} if peers else {"megatron-core": "not installed"},
    }
    tables = [table(rows[title], columns, title) for title, columns in COLUMNS.items()]
    publish(result, options.output, "", *tables)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
