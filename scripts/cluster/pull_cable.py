"""Pull the cable between two machines of a run at random moments: both sides must end in time, and
the run resume.

    sudo -E python -m scripts.cluster.pull_cable --folder=NEW --cuts=30

It writes a line for each cut, and ends with exit code 1 if a promise is broken.

The machines are network, host-name, mount and process namespaces on a bridge, with one rank each. A
pulled cable is a port of the bridge that is down: no connection closes. A process that is killed
leaves no namespace of its own behind but those named below, which the next call removes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from scripts.docs.tables import ROOT

BRIDGE = "mlcable"
NODES = ("mlcable1", "mlcable2")
NET = "10.213.77"
# --distributed_timeout, --startup_timeout, and what may pass after them
TIMEOUT_S = 10
STARTUP_S = 60
LATE_S = 20
READY_S = 120.0  # limit on a resumed run's end
IMPORTS_S = 60  # limit on what comes before a rank looks at its clock, on a busy machine
FLAGS = (
    "--num_layers=2 --hidden_size=32 --num_attention_heads=4 --sequence_length=16 --micro_batch_size=2 --batch_size=4 "
    "--dataset_source=random --vocab_size=64 --device=cpu --zero_stage=2 --max_checkpoints=2 "
    f"--distributed_timeout={TIMEOUT_S} --startup_timeout={STARTUP_S}"
).split()


class Outcome(NamedTuple):
    """The end of one side after a cut."""

    code: int | None  # None: it had not ended
    took_s: float
    words: str


def ip(*words: str, check: bool = True) -> None:
    """Run `ip`, and raise CalledProcessError if it fails."""
    subprocess.run(["ip", *words], check=check, capture_output=not check)


@contextlib.contextmanager
def machines() -> Iterator[None]:
    """Make two machines on a bridge, and remove them."""
    remove()
    ip("link", "add", BRIDGE, "type", "bridge")
    ip("link", "set", BRIDGE, "up")
    try:
        for number, node in enumerate(NODES, 1):
            ip("netns", "add", node)
            ip("link", "add", f"{node}p", "type", "veth", "peer", "name", "cable", "netns", node)
            ip("link", "set", f"{node}p", "master", BRIDGE, "up")
            ip("-n", node, "link", "set", "lo", "up")
            ip("-n", node, "address", "add", f"{NET}.{number}/24", "dev", "cable")
            ip("-n", node, "link", "set", "cable", "up")
        yield
    finally:
        remove()


def remove() -> None:
    """Remove what this program, and nothing else, has made."""
    for node in NODES:
        ip("netns", "delete", node, check=False)
        ip("link", "delete", f"{node}p", check=False)
    ip("link", "delete", BRIDGE, check=False)


def start(rank: int, folder: Path, iterations: int, interval: int) -> subprocess.Popen[str]:
    """Start a rank on its machine; its output goes to a file beside the run."""
    node = NODES[rank]
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": f"{NET}.1",
        "MASTER_PORT": "29577",
        "GLOO_SOCKET_IFNAME": "cable",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    own = [
        f"--train_iters={iterations}",
        f"--checkpoint_interval={interval}",
        f"--experiment_dir={folder / 'run'}",
    ]
    inside = [
        "sh",
        "-c",
        'hostname "$0"; exec "$@"',
        node,
        sys.executable,
        "pretrain_gpt.py",
        *FLAGS,
        *own,
    ]
    outside = [
        "nsenter",
        f"--net=/run/netns/{node}",
        "unshare",
        "-ump",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]
    with open(folder / f"rank_{rank}.txt", "w", encoding="utf-8") as output:
        return subprocess.Popen(
            [*outside, *inside],
            cwd=ROOT,
            env={**os.environ, **variables},
            stdout=output,
            stderr=output,
            text=True,
        )


def cable(state: str) -> None:
    """Pull the second machine's cable (down), or put it back (up)."""
    ip("link", "set", f"{NODES[1]}p", state)


def ends(sides: Sequence[subprocess.Popen[str]], folder: Path, limit_s: float) -> list[Outcome]:
    """Wait for both sides; kill what has not ended within the limit."""
    begin_s, took_s = time.monotonic(), dict[int, float]()
    while len(took_s) < len(sides) and time.monotonic() - begin_s < limit_s:
        for rank, side in enumerate(sides):
            if rank not in took_s and side.poll() is not None:
                took_s[rank] = time.monotonic() - begin_s
        time.sleep(0.1)
    found = []
    for rank, side in enumerate(sides):
        lines = (folder / f"rank_{rank}.txt").read_text("utf-8", "replace").splitlines()
        words = next(
            (line for line in lines if line.startswith("ERROR")), lines[-1] if lines else ""
        )
        found.append(Outcome(side.poll(), took_s.get(rank, limit_s), words))
        side.kill()
        side.wait()
    return found


def cut(folder: Path, generator: random.Random) -> tuple[float, list[Outcome]]:
    """Start a run, pull the cable at a random moment, and return the moment and how both sides
    end."""
    interval = generator.choice([3, 1000])
    sides = [start(rank, folder, 10**6, interval) for rank in (0, 1)]
    begin_s = time.monotonic()
    if generator.random() > 0.2:  # once it trains
        while "loss" not in (folder / "rank_0.txt").read_text("utf-8") and sides[0].poll() is None:
            time.sleep(0.1)
    time.sleep(generator.uniform(0.0, 5.0))
    moment_s = time.monotonic() - begin_s
    cable("down")
    found = ends(sides, folder, STARTUP_S + IMPORTS_S + LATE_S + 10)
    cable("up")
    return moment_s, found


def phase(folder: Path) -> str:
    """Return what rank 0 was in, by its message or exit.json."""
    with contextlib.suppress(OSError, ValueError):
        return str(json.loads((folder / "run" / "exit.json").read_text())["message"])[:200]
    return "no exit.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Make the cuts, then let the run resume; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cuts", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, required=True, help="an empty folder for the run and its output"
    )
    options = parser.parse_args(argv)
    if "SLURM_JOB_ID" in os.environ:
        raise SystemExit("not inside a job: this changes the network of the machine")
    if os.geteuid() != 0:
        raise SystemExit("needs root, for namespaces")
    options.folder.mkdir(parents=True)
    generator, broken = random.Random(options.seed), 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with machines():
        for number in range(1, options.cuts + 1):
            moment_s, found = cut(options.folder, generator)
            limits = [
                STARTUP_S + IMPORTS_S if "--startup" in one.words else TIMEOUT_S for one in found
            ]
            good = all(
                one.code == 6 and one.took_s <= limit + LATE_S
                for one, limit in zip(found, limits, strict=True)
            )
            broken += not good
            print(
                f"{number} {'ok' if good else 'BROKEN'} cut after {moment_s:.1f} s; {phase(options.folder)!r}",
                flush=True,
            )
            for rank, one in enumerate(found):
                print(
                    f"    rank {rank}: code {one.code} after {one.took_s:.1f} s: {one.words[:300]}",
                    flush=True,
                )
        names = [
            path.name
            for path in (options.folder / "run" / "checkpoints").glob("*")
            if path.name.isdecimal()
        ]
        reached = max(map(int, names), default=0)
        found = ends(
            [start(rank, options.folder, reached + 10, 1000) for rank in (0, 1)],
            options.folder,
            READY_S,
        )
        print("resumed", found, flush=True)
        broken += any(one.code != 0 for one in found)
    return int(broken > 0)


if __name__ == "__main__":
    raise SystemExit(main())
