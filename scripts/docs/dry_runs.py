"""Write the output of each dry run shown in docs/planner.md, docs/multi_stage.md and
docs/performance.md.

    python -m scripts.docs.dry_runs            run the commands and write their output
    python -m scripts.docs.dry_runs --check    compare only; exit code 1 if a document is stale

Planning for GPUs touches no device, so every machine prints the same. Commands run as typed, from
the checkout.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_lite.cli.parse import parse, words_of
from megatron_lite.planner.devices import data_sheet
from megatron_lite.planner.plan import Plan, make_plan
from megatron_lite.planner.work_time import StepTime, predict_step
from megatron_lite.validation import resolve
from scripts.docs.tables import ROOT, markdown_table, with_tables, write_documents

MODEL = ROOT / "scripts" / "examples" / "mistral_7b.flags"
# GPU, ranks, flags, tokens per second and GPU. The tutorial reports "around 9000" on 128 H100s.
PUBLISHED_SPEEDS = (
    ("a100", 4, "--batch_size=64 --zero_stage=2", 4234.09),
    ("a100", 4, "--batch_size=64 --zero_stage=2 --mlp_recompute_level=activation", 4218.63),
    ("a100", 4, "--batch_size=64 --zero_stage=2 --mlp_recompute_level=full", 3804.49),
    ("h100", 128, "", 9000.0),
)
PYTHON_FOLDER = Path(sys.executable).parent  # has the `python` that commands start
DOCUMENTS = ("planner.md", "multi_stage.md", "performance.md")
# A command, up to three lines of prose, and its output.
SHOWN = re.compile(
    r"^(```bash\n([^`]*?--dry_run=1[^`]*?)\n```\n\n(?:[^\n`]+\n){0,3}\n?```text\n)(.*?)(^```$)",
    re.MULTILINE | re.DOTALL,
)


def output(command: str) -> str:
    """Return the stdout and stderr of a bash command run in the checkout.

    Raises:
        subprocess.CalledProcessError: if the command fails.
    """
    environment = {**os.environ, "PATH": f"{PYTHON_FOLDER}{os.pathsep}{os.environ.get('PATH', '')}"}
    words = ["bash", "-o", "pipefail", "-c", command]
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return (done.stdout + done.stderr).rstrip("\n")


def renewed(text: str) -> str:
    """Return a document with current outputs."""
    with ThreadPoolExecutor() as pool:
        outputs = iter(list(pool.map(output, [found[2] for found in SHOWN.finditer(text)])))
    text = SHOWN.sub(lambda found: f"{found[1]}{next(outputs)}\n{found[4]}", text)
    tables = {"published": published_table} if "<!-- table: published -->" in text else {}
    return with_tables(text, tables, separated=False)


def published_table() -> list[str]:
    """Compare the Mistral-7B speeds in Fast-LLM's tutorial with predicted ones."""
    rows = []
    for gpu, ranks, flags, reported in PUBLISHED_SPEEDS:
        plan, time = planned_step(gpu, ranks, flags)
        ours, level = time.tokens_per_s / ranks, plan.config.performance.mlp_recompute_level
        rows.append(
            [f"{ranks} {gpu}", level, f"{reported:,.0f}", f"{ours:,.0f}", f"{ours / reported:.2f}"]
        )
    return markdown_table(["GPUs", "MLPs recomputed", "reported", "predicted", "ratio"], rows)


def planned_step(gpu: str, ranks: int, flags: str) -> tuple[Plan, StepTime]:
    """Plan the Mistral-7B example and predict its step."""
    words = [
        *words_of(MODEL.read_text("utf-8")),
        *flags.split(),
        "--dataset_source=random",
        "--dry_run=1",
        f"--gpu={gpu}",
    ]
    plan = make_plan(resolve(parse([*words, "--micro_batch_size=1"]).config, ranks), ranks, "cuda")
    return plan, predict_step(plan, data_sheet(plan.config.distributed, "cuda", ranks))


def main(argv: Sequence[str]) -> int:
    """Write or compare; return the exit code."""
    documents = {ROOT / "docs" / name: renewed for name in DOCUMENTS}
    return write_documents(documents, "--check" in argv, "python -m scripts.docs.dry_runs")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
