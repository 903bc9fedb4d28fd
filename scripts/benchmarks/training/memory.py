"""Peak resident memory of a rank while training: ZeRO-1, 2 and 3 beside plain torch, DistributedDataParallel and FSDP2.

    python -m scripts.benchmarks.training.memory --output=memory.json
    python -m scripts.benchmarks.training.memory --layers=plain --micro_batches=4

Starts the benchmark on two CPU ranks once for each configuration, with that configuration alone, for a few
steps, and once bare: everything imported, the process group open, no model. What is reported is the kernel's peak of
resident memory (VmHWM) of the largest rank, from the start of the process to its end, less that of the bare process.
Options that are not listed below go to the benchmark. Prints a Markdown table; docs/benchmarks.md explains it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks.training import report
from scripts.benchmarks.training.rows import catalogue
from scripts.benchmarks.training.settings import parse

BARE = "bare"
REFERENCES = ("torch", "DDP", "FSDP2", "FSDP2 all resharded")
# (configuration, peer, ratio of peaks at most)
TARGETS = (
    *((f"ZeRO-{stage}", peer, 1.0) for stage, peers in ((1, ("torch", "DDP")), (2, ("DDP",))) for peer in peers),
    *(("ZeRO-3", peer, 1.0) for peer in REFERENCES[2:]),
    *(("ZeRO-3 breadth-first", peer, 1.0) for peer in REFERENCES[2:]),
    *(("plain ZeRO-3", peer, 0.7) for peer in REFERENCES[2:]),
)


def main(argv: Sequence[str]) -> int:
    """Measure one configuration after the other, print, write; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--ranks", type=int, default=2, help="default 2")
    parser.add_argument("--only", default="", help="comma-separated configurations; default: all of the layers chosen")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options, passed_on = parser.parse_known_args(argv)
    rows = catalogue(parse(passed_on), options.ranks)
    names = [name.strip() for name in options.only.split(",") if name.strip()]
    # A compiler, and a library that others do not import, would count as a configuration's memory.
    names = names or [name for name, row in rows.items() if row.default and not row.compiled and "HF" not in row.model]
    measured = {name: measure(name, options.ranks, passed_on) for name in (BARE, *names)}
    result = {
        "command": f"python -m scripts.benchmarks.training.memory {' '.join(argv)}".strip(),
        "settings": measured[BARE]["settings"],
        "versions": measured[BARE]["versions"],
        "ranks": options.ranks,
        "bare_bytes": max(measured[BARE]["peak_rss_bytes"]),
        "configurations": compare({name: value for name, value in measured.items() if name != BARE}, measured[BARE]),
    }
    print(to_markdown(result), flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    return 0


def measure(name: str, ranks: int, passed_on: Sequence[str]) -> dict[str, Any]:
    """What scripts/benchmarks/training writes when it runs one configuration alone.

    Raises:
        SystemExit: if it fails; what it said has been shown.
    """
    print(f"benchmark_memory: {name}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "results.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=localhost:0",
            f"--nproc-per-node={ranks}",
            "-m",
            "scripts.benchmarks.training",
            "--device=cpu",
            "--turns=3",
            "--steps_per_turn=2",
            "--warmup_turns=0",
            *passed_on,
            f"--only={name}",
            f"--output={output}",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{done.stdout}{done.stderr}benchmark_memory: {name}: exit code {done.returncode}")
        result: dict[str, Any] = json.loads(output.read_text("utf-8"))
    return result


def compare(measured: dict[str, dict[str, Any]], bare: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Peak above a bare process, per configuration, and its ratios to the peers'."""
    above = {name: max(one["peak_rss_bytes"]) - max(bare["peak_rss_bytes"]) for name, one in measured.items()}
    return {
        name: {
            "peak_bytes": value,
            "state_bytes": measured[name]["configurations"][name]["state_bytes"],
            "ratios": {peer: value / above[peer] for peer in REFERENCES if peer in above},
        }
        for name, value in above.items()
    }


def to_markdown(result: dict[str, Any]) -> str:
    """The table of docs/benchmarks.md."""
    rows = [
        {
            "": name,
            "peak above bare, MiB": f"{row['peak_bytes'] / report.MIB:.0f}",
            "state, MiB": f"{row['state_bytes'] / report.MIB:.0f}",
            **{f"/ {peer}": f"{row['ratios'][peer]:.2f}" if peer in row["ratios"] else "" for peer in REFERENCES},
        }
        for name, row in result["configurations"].items()
    ]
    lines = [*report.table(rows), "", f"a bare process: {result['bare_bytes'] / report.MIB:.0f} MiB"]
    for name, peer, limit in TARGETS:
        ratio = result["configurations"].get(name, {}).get("ratios", {}).get(peer)
        if ratio is not None:
            verdict = "met" if ratio <= limit else "missed"
            lines.append(f"{name} / {peer}: {ratio:.3f}, aim: at most {limit:g}: {verdict}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
