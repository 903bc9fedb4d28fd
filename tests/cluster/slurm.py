"""A real Slurm of three nodes on one machine, each in namespaces of its own: network, name, mounts
and processes.

Debian's slurmd can be several nodes of one host (-N). Start this inside of a network and a process
namespace: there is nothing to take down but what ends with these. Jobs belong to `nobody` and start
in a copy of the checkout, where `VENV` has a torchrun that starts one rank a node.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import numpy as np

from scripts.cluster.machines import Machine, run
from scripts.docs.tables import ROOT
from tests.support.token_files import write_documents

NODES = {"mlc01": 1, "mlc02": 2, "mlc05": 5}
CORES = {"mlc01": 2, "mlc02": 2, "mlc05": 4}
BRIDGE, NETWORK = "mlc0", "10.77.0"
PATIENCE_S = 300.0  # no try fails because the machine is busy
FREEZER = Path("/sys/fs/cgroup/freezer")

CONFIGURATION = """\
ClusterName=tries
SlurmctldHost={host}({network}.254)
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
SlurmdTimeout=20
KillWait={kill_wait_s}
MinJobAge=100000
MpiDefault=none
ReturnToService=2
ProctrackType={tracking}
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=500
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobAcctGatherType=jobacct_gather/none
GresTypes=gpu
PartitionName=main Default=YES Nodes=ALL MaxTime=60
PartitionName=grace Nodes=ALL MaxTime=60 GraceTime={grace_s}
PartitionName=urgent Nodes=ALL MaxTime=60 PriorityTier=10
"""
NODE = (
    "NodeName={name} NodeAddr={network}.{number} CPUs={cores} CoresPerSocket={cores} RealMemory=200000 Gres=gpu:8 "
    "Port={port}\n"
)
GRACE_S, KILL_WAIT_S = 15, 15

# Flags after those of train_mistral.sh and of the planner's job: a model that two busy cores train.
TINY = (
    "--device=cpu --num_layers=2 --hidden_size=32 --ffn_hidden_size=64 --num_attention_heads=2 --head_groups=1 "
    "--kv_channels=16 --vocab_size=256 --window_size=16 --sequence_length=32 --batch_size=4 --micro_batch_size=1 "
    "--training_dtype=fp32 --num_workers=0 --split=1 --validation_iters=0 --export_interval=none --log_interval=1 "
    "--checkpoint_interval=none --lr_warmup_iters=2 --lr_decay_iters=none --save_retries=0"
).split()

ACTIVATE = """\
export PATH={folder}/bin:{python}:$PATH PYTHONPATH={folder}/slow
"""
TORCHRUN = """\
#!/usr/bin/env bash
# One rank a node: there are no GPUs. BROKEN_DRIVER: it fails before Python runs.
words=()
for word in "$@"; do
    case "$word" in --nproc-per-node=*) word=--nproc-per-node=1 ;; esac
    words+=("$word")
done
[ -z "${{BROKEN_DRIVER:-}}" ] || exit 1
exec {python}/python -m torch.distributed.run "${{words[@]}}"
"""
# Python reads it at its start.
SLOW = """\
import os, time
if seconds := float(os.environ.get("SLOW_FSYNC_S") or 0):
    quick = os.fsync
    def slow(descriptor):
        time.sleep(seconds)
        quick(descriptor)
    os.fsync = slow
"""


def until(condition: Callable[[], object], what: Callable[[], object] = lambda: "") -> float:
    """Wait until `condition` is true; return the seconds that it took. what: described if it never
    is."""
    begin_s = time.monotonic()
    while not condition():
        if time.monotonic() - begin_s > PATIENCE_S:
            raise TimeoutError(f"not within {PATIENCE_S:.0f} s; {what()}")
        time.sleep(0.5)
    return time.monotonic() - begin_s


class Node(Machine):
    """One machine of the cluster."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, BRIDGE, f"{NETWORK}.{NODES[name]}/24")
        self._folder = folder
        self.call("mount", "--bind", str(folder / "hosts"), "/etc/hosts")

    def start_slurmd(self) -> None:
        self.call(
            "env", f"SLURM_CONF={self._folder / 'slurm.conf'}", "nice", "slurmd", "-N", self.name
        )

    def kill_slurmd(self) -> None:
        """End slurmd, and not its steps, by SIGKILL."""
        (name,) = self._folder.glob(f"slurmd-{self.name}.pid")
        self.call("kill", "-KILL", name.read_text().strip())


def open_interpreter(stash: Path) -> None:
    """Let other users reach the interpreter, in this mount namespace alone: a home such as /root
    may be closed."""
    for part in (Path(sys.base_prefix), Path(sys.prefix)):
        for path in reversed((part, *part.parents)):
            if path != Path("/") and not path.parent.stat().st_mode & 0o001:
                stash.mkdir()
                run("mount", "--bind", str(path), str(stash))
                run("mount", "-t", "tmpfs", "-o", "mode=755", "none", str(path.parent))
                path.mkdir()
                run("mount", "--move", str(stash), str(path))


class Run:
    """An experiment directory that jobs train in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def exit(self) -> dict[str, object]:
        """Return exit.json; empty if there is none."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.folder / "exit.json").read_text())
        return {}

    def iteration(self) -> int:
        """Return the newest iteration in metrics.jsonl."""
        with contextlib.suppress(OSError, IndexError):
            return int(
                json.loads((self.folder / "metrics.jsonl").read_text().splitlines()[-1])[
                    "iteration"
                ]
            )
        return 0

    def checkpoints(self) -> list[int]:
        return sorted(
            int(path.name)
            for path in (self.folder / "checkpoints").glob("[0-9]*")
            if path.name.isdigit()
        )

    def losses(self) -> dict[int, float]:
        """Return the loss of each iteration, that of the newest start where several have trained
        it."""
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return {line["iteration"]: line["loss"] for line in lines if line["phase"] == "training"}

    def trains(self, after: int = 0) -> None:
        """Wait until the run has trained some iterations after `after`."""
        until(lambda: self.iteration() > after + 2, lambda: f"{self.folder}: {self.exit()}")


class Slurm:
    """The cluster: munged, slurmctld and a slurmd for each node."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.nodes = folder, dict[str, Node]()
        self.checkout = folder / "checkout"
        self.venv = folder / "venv"
        self._daemons = list[subprocess.Popen[bytes]]()
        self._runs = 0
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder / "home"),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
            "LANG": "C.UTF-8",
        }

    def __enter__(self) -> "Slurm":
        try:
            self._write_files()
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for node in self.nodes.values():
            node.end()
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        time.sleep(1)
        for group in sorted(Path("/sys/fs/cgroup").glob("*/slurm_mlc0*/**/"), reverse=True):
            with contextlib.suppress(OSError):
                group.rmdir()

    def _write_files(self) -> None:
        folder = self.folder
        folder.chmod(0o755)
        for name in ("state", "bin", "slow", "gpus", "data", "runs", "home", "venv/bin"):
            (folder / name).mkdir(parents=True)
        for name in ("runs", "home"):
            (folder / name).chmod(0o777)
        for name in ("megatron_lite", "scripts"):
            shutil.copytree(
                ROOT / name, self.checkout / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        shutil.copy(ROOT / "pretrain_gpt.py", self.checkout)
        self.checkout.chmod(0o777)
        write_documents(
            folder / "data" / "corpus", np.random.default_rng(0).integers(0, 256, (400, 100))
        )
        for number in range(8):
            os.mknod(folder / "gpus" / f"gpu{number}", 0o20666, os.makedev(1, 3))
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpus/gpu[0-7]\n")
        host = socket.gethostname()
        addresses = {host: 254, **NODES}
        lines = [f"{NETWORK}.{number} {name}\n" for name, number in addresses.items()]
        (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
        tracking = "proctrack/cgroup" if FREEZER.is_dir() else "proctrack/linuxproc"
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        nodes = [
            NODE.format(
                name=name, number=number, network=NETWORK, cores=CORES[name], port=7000 + number
            )
            for name, number in NODES.items()
        ]
        words = {
            "grace_s": GRACE_S,
            "kill_wait_s": KILL_WAIT_S,
            "tracking": tracking,
            "network": NETWORK,
        }
        text = CONFIGURATION.format(folder=folder, host=host, **words)
        (folder / "slurm.conf").write_text(text + "".join(nodes))
        python = Path(sys.executable).parent
        (folder / "venv/bin/activate").write_text(ACTIVATE.format(folder=folder, python=python))
        (folder / "bin/torchrun").write_text(TORCHRUN.format(python=python))
        (folder / "bin/torchrun").chmod(0o755)
        (folder / "slow/sitecustomize.py").write_text(SLOW)

    def _start(self) -> None:
        open_interpreter(self.folder / "stash")
        run("ip", "link", "set", "lo", "up")
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "address", "add", f"{NETWORK}.254/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        run("mount", "--bind", str(self.folder / "hosts"), "/etc/hosts")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        options = ["--socket", "munge.socket", "--key-file", "munge.key", "--log-file", "munge.log"]
        options += ["--pid-file", "munge.pid", "--seed-file", "munge.seed"]
        absolute = [word if word.startswith("--") else str(self.folder / word) for word in options]
        self._daemon("munged", "--foreground", *absolute)
        until(
            lambda: (self.folder / "munge.socket").exists(),
            lambda: (self.folder / "munge.out").read_text(),
        )
        self._daemon("slurmctld", "-D", "-c")
        for name in NODES:
            self.nodes[name] = Node(name, self.folder)
            self.nodes[name].start_slurmd()
        self.restore()

    def _daemon(self, *words: str) -> None:
        with (self.folder / f"{words[0]}.out").open("w") as file:
            daemon = subprocess.Popen(
                words, env=self._environment, stdout=file, stderr=subprocess.STDOUT
            )
        self._daemons.append(daemon)

    def restore(self) -> None:
        """End all jobs and wait until all nodes are idle."""
        for node in self.nodes.values():
            node.plug("up")
            if not node.processes("slurmd -N"):
                node.start_slurmd()

        def idle() -> bool:
            with contextlib.suppress(RuntimeError):
                self.call("scancel", "--user=nobody")
                self.call("scancel", "--user=nobody", "--signal=KILL", "--full")
                return self.call("sinfo", "-h", "-o", "%T") == "idle"
            return False

        until(idle, lambda: self.call("sinfo", "-R"))

    def call(self, *words: str) -> str:
        """Run a command of Slurm's as root; return its output."""
        return run(*words, environment=self._environment)

    def run(self) -> Run:
        """Return a new experiment directory, which does not exist yet."""
        self._runs += 1
        return Run(self.folder / "runs" / f"run-{self._runs}")

    def submit(self, run_: Run, *words: str, **variables: str) -> int:
        """Submit as nobody, from the copy of the checkout, with the variables of our scripts;
        return the job's id.

        words: options, a script and its flags.
        """
        environment = {
            "DATA_PATH": str(self.folder / "data" / "corpus"),
            "EXP_BASE_DIR": str(run_.folder),
        }
        environment |= {"VENV": str(self.venv), **variables}
        return int(
            self.as_nobody(
                "sbatch", "--parsable", f"--output={run_.folder}-%j.log", *words, **environment
            )
        )

    def submit_tasks(self, run_: Run, options: str, flags: str, **variables: str) -> int:
        """Submit a job whose srun starts the program itself, without torchrun; return its id.

        options: those of sbatch, then, after `srun`, those of srun.
        """
        of_sbatch, _, of_srun = options.partition("srun")
        flags = f"{' '.join(TINY)} {flags} --data_path=$DATA_PATH --experiment_dir=$EXP_BASE_DIR"
        command = f". $VENV/bin/activate; srun {of_srun} python pretrain_gpt.py {flags}"
        return self.submit(run_, *of_sbatch.split(), f"--wrap={command}", **variables)

    def as_nobody(self, *words: str, **variables: str) -> str:
        """Run a command in the copy of the checkout as the user of the jobs; return its output."""
        user = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
        return run(*user, *words, environment={**self._environment, **variables}, cwd=self.checkout)

    def job(self, number: int) -> dict[str, str]:
        """Return what `scontrol show job` says."""
        words = self.call("scontrol", "--oneliner", "show", "job", str(number)).split()
        return dict(word.partition("=")[::2] for word in words)

    def preempt(self) -> None:
        """Let a short job of a higher priority take all nodes."""
        take_all = ["--partition=urgent", "--nodes=3", "--exclusive", "--time=1"]
        self.as_nobody(
            "sbatch", *take_all, f"--output={self.folder}/runs/urgent.log", "--wrap=sleep 1"
        )

    def comes_back(self, number: int) -> None:
        """Wait until the job runs for the second time."""
        until(
            lambda: self.job(number)["Restarts"] != "0",
            lambda: f"{self.job(number)}\n{self.log(number)}",
        )
        self.wait(number, "RUNNING")

    def wait(self, number: int, *states: str) -> str:
        """Wait until the job is in one of these states; return it."""
        until(
            lambda: self.job(number)["JobState"] in states,
            lambda: f"{self.job(number)}\n{self.log(number)}",
        )
        return self.job(number)["JobState"]

    def ends(self, number: int) -> str:
        """Wait until the job has ended for good; return its state."""
        return self.wait(
            number, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"
        )

    def log(self, number: int) -> str:
        """Return what the job has written, without the lines of iterations."""
        lines = [
            line
            for path in (self.folder / "runs").glob(f"*-{number}.log")
            for line in path.read_text().split("\n")
        ]
        return "\n".join(line for line in lines if not line.startswith("iteration "))

    def save_s(self, number: int) -> float:
        """Wait until the job's log has the line of its only save; return how long that took."""
        found = list[str]()

        def saved() -> bool:
            found[:] = re.findall(r"^saved .* ([0-9.]+) s\)$", self.log(number), re.M)
            return bool(found)

        until(saved, lambda: self.log(number))
        return float(found[0])

    def version(self) -> str:
        return self.call("sinfo", "--version")
