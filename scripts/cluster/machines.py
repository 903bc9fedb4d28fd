"""Machines made of namespaces of this one: network, host name, mounts and processes of their own.

They are connected by a bridge. A pulled cable is a port of the bridge that is down: no connection
closes. All of it ends with the process that has made it, but for the bridge.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.docs.tables import ROOT

CARD = "eth0"  # the network device of each machine
LIMIT_S = 300.0  # on a command
PORT = "29577"  # where the ranks of a run meet


def run(*words: str, environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run a command; return its output.

    Raises:
        RuntimeError: with the output, if the command fails.
    """
    done = subprocess.run(
        words,
        env=environment,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise RuntimeError(f"{words} ended with {done.returncode}: {done.stdout}")
    return done.stdout.strip()


class Machine:
    """One machine at a bridge. address: its own, with the length of the network's prefix."""

    def __init__(self, name: str, bridge: str, address: str) -> None:
        self.name, self.port = name, f"{name}-port"
        self.address, _, _ = address.partition("/")
        # The first process of the namespace adopts orphans, and must outlive all others.
        forever = ("bash", "-c", "while :; do sleep 1000 & wait; done")
        spaces = ("--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        self._root = subprocess.Popen(["setpriv", "--pdeathsig=KILL", "unshare", *spaces, *forever])
        children = Path(f"/proc/{self._root.pid}/task/{self._root.pid}/children")
        while not (init := children.read_text().strip()):
            time.sleep(0.01)
        self.inside = ("nsenter", "-a", "-t", init)
        while self.call("readlink", "/proc/self/ns/net") == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)
        cable = ("link", "add", self.port, "type", "veth", "peer", "name", CARD, "netns", init)
        run("ip", *cable)
        run("ip", "link", "set", self.port, "master", bridge, "up")
        self.call("ip", "address", "add", address, "dev", CARD)
        self.call("ip", "link", "set", CARD, "up")
        self.call("ip", "link", "set", "lo", "up")
        self.call("hostname", name)

    def call(self, *words: str) -> str:
        """Run a command on the machine; return its output."""
        return run(*self.inside, *words)

    def plug(self, state: str) -> None:
        """Pull the cable (down), or plug it in again (up)."""
        run("ip", "link", "set", self.port, state)

    def processes(self, word: str) -> list[str]:
        """Return the command lines on the machine that contain a word."""
        lines = self.call("ps", "-eo", "args").splitlines()
        return [line for line in lines if word in line and "ps -eo" not in line]

    def end(self) -> None:
        """End all of its processes, and the machine."""
        self._root.kill()
        self._root.wait()


class Pair:
    """`with Pair() as pair: ...`: two machines of a run, one rank on each."""

    BRIDGE, NETWORK = "mlcable", "10.213.77"

    def __init__(self) -> None:
        self.machines = list[Machine]()

    def __enter__(self) -> Pair:
        subprocess.run(
            ["ip", "link", "delete", self.BRIDGE], capture_output=True
        )  # of a killed one
        run("ip", "link", "add", self.BRIDGE, "type", "bridge")
        try:
            run("ip", "link", "set", self.BRIDGE, "up")
            for number in (1, 2):
                address = f"{self.NETWORK}.{number}/24"
                self.machines.append(Machine(f"{self.BRIDGE}{number}", self.BRIDGE, address))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.machines:
            machine.end()
        run("ip", "link", "delete", self.BRIDGE)

    def start(
        self, rank: int, flags: Sequence[str], log: Path, before: str = "", **variables: str
    ) -> subprocess.Popen[str]:
        """Start a rank on its machine. log: gets its output. before: Python that runs first."""
        of_rank = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": self.machines[0].address,
            "MASTER_PORT": PORT,
            "GLOO_SOCKET_IFNAME": CARD,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        code = f"{before}\nimport sys, pretrain_gpt\nsys.exit(pretrain_gpt.main(sys.argv[1:]))"
        with log.open("w", encoding="utf-8") as output:
            return subprocess.Popen(
                [*self.machines[rank].inside, sys.executable, "-c", code, *flags],
                cwd=ROOT,
                env={**os.environ, **of_rank, **variables},
                stdout=output,
                stderr=output,
                text=True,
            )

    def left_over(self) -> list[str]:
        """Return the command lines of programs that still run on the machines."""
        return [line for machine in self.machines for line in machine.processes("pretrain_gpt")]

    def kill(self) -> None:
        """Kill what still runs on the machines."""
        for machine in self.machines:
            machine.call("sh", "-c", "pkill -KILL -f pretrain_gp[t] || true")
