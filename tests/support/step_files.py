"""Count the files that a reader of one training step passes, and how often one call after another
is in another file: `python -m tests.support.step_files` lists them.

The step is a plain one: AdamW at a constant rate, two blocks, one rank, two micro-batches, on a
CPU. A file counts with all its tokens of code if a function of it runs in `train_step`; the second
step is traced, after what a run makes once.
"""

import itertools
import sys
from pathlib import Path
from types import FrameType

import megatron_lite
from megatron_lite.distributed.process_group import Distributed
from tests.support.code_tokens import code_tokens
from tests.support.harness import run_distributed, start_run, tiny_config

PACKAGE = Path(megatron_lite.__file__).parent


def step_calls() -> list[str]:
    """Return the file of the package in which each call of a step runs, in order."""
    paths = map(Path, run_distributed(1, _entered)[0])
    return [str(path.relative_to(PACKAGE)) for path in paths if path.is_relative_to(PACKAGE)]


def tokens_of(calls: list[str]) -> dict[str, int]:
    """Map each file to its number of tokens of code."""
    return {name: code_tokens((PACKAGE / name).read_text("utf-8")) for name in sorted({*calls})}


def changes_of(calls: list[str]) -> int:
    """Count the calls that follow one in another file."""
    return sum(before != after for before, after in itertools.pairwise(calls))


def _entered(distributed: Distributed) -> list[str]:
    """Return the file of each call of a step, other packages' included."""
    from megatron_lite.train import train_step

    run = start_run(distributed, tiny_config(micro_batch_size=2, batch_size=4, lr_warmup=0))
    batches = run.data.batches("training", 0, 2)
    train_step(run, next(batches), 1)
    micro_batches = next(batches)
    entered: list[str] = []

    def enter(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered.append(frame.f_code.co_filename)

    sys.setprofile(enter)
    try:
        train_step(run, micro_batches, 2)
    finally:
        sys.setprofile(None)
    run.data.close()
    return entered


if __name__ == "__main__":
    calls = step_calls()
    files = tokens_of(calls)
    for name, tokens in files.items():
        print(f"{tokens:6} {name}")
    print(f"{sum(files.values()):6} tokens of code in {len(files)} files")
    print(f"{changes_of(calls):6} changes of file in {len(calls)} calls")
