"""What --deterministic=1 costs: a training run without and with it, in turns, and the ratio of their step times.

    python scripts/deterministic_cost.py [--turns=2] --num_layers=8 --hidden_size=1024 ...

takes the flags of pretrain_gpt.py. Batches are random tokens and nothing is saved, but for what they say otherwise.
Each run is a process of its own, because cuBLAS and PyTorch choose their algorithms once. The last line is JSON: the
median step times in ms, without and with it, and their ratio.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARMUP_ITERS = 5
MEASURED_ITERS = 20
FLAGS = (
    "--dataset_source=random", f"--train_iters={WARMUP_ITERS + MEASURED_ITERS}", "--log_interval=1", "--num_workers=1",
    "--lr_warmup_iters=0",
)  # fmt: skip


def step_times_ms(flags: list[str], deterministic: bool) -> list[float]:
    """Of the iterations of one run after the first ones.

    Raises:
        SystemExit: with the run's own exit code and words, if it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *FLAGS, *flags]
        command += [f"--deterministic={int(deterministic)}", f"--experiment_dir={run}"]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            sys.stderr.write(result.stderr)
            raise SystemExit(result.returncode)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    times = [line["step_time_ms"] for line in lines if line["phase"] == "training"]
    return times[WARMUP_ITERS:]


def main(arguments: list[str]) -> int:
    """Measure and print; the exit code."""
    turns, flags = 2, []
    for argument in arguments:
        if argument.startswith("--turns="):
            turns = int(argument.removeprefix("--turns="))
        else:
            flags.append(argument)
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(turns):
        for deterministic in times:
            times[deterministic] += step_times_ms(flags, deterministic)
    off, on = (statistics.median(times[deterministic]) for deterministic in (False, True))
    print(f"--deterministic=1: {on:.2f} ms a step, without it {off:.2f} ms: {on / off - 1:+.1%}")
    print(json.dumps({"off_ms": off, "on_ms": on, "ratio": on / off}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
