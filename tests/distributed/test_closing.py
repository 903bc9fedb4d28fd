"""A process ends with its own exit code whatever gloo's threads do, and its message is clean."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lite.errors import CheckpointError
from megatron_lite.run import exit_status
from tests.support.launch import ROOT

# Two ranks train a few steps, then start a collective that completes while the main thread holds
# Python's lock and gives it to nobody, as it may on a busy machine: a thread of gloo is left to
# wait for the lock, to drop its tensor. `kept` keeps everything there is until the interpreter
# ends, and `last` makes the interpreter give the lock away then.
PROGRAM = """
import os, sys, time, weakref
import torch
import torch.distributed as dist
from megatron_lite.setup_run import build
from megatron_lite.config import DistributedConfig
from megatron_lite.distributed.startup import join
from megatron_lite.run.experiment import Experiment
from megatron_lite.run.stop_signal import StopSignal
from megatron_lite.train import train_step
from tests.support.harness import tiny_config

class Last:
    def __del__(self, sleep=time.sleep):
        sleep(0.2)

store, children = sys.argv[1], []
for rank in range(2):  # each ends as an interpreter does
    children.append(os.fork())
    if not children[-1]:
        break
else:
    sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
torch.set_num_threads(1)
group = join(DistributedConfig(device="cpu"), rank, 2, rank, meet=lambda: dist.FileStore(store, 2))
config = tiny_config(2, zero_stage=2, depth_first_micro_batches=2, batch_size=8, micro_batch_size=2)
run = build(config, group, Experiment(config, rank), StopSignal(), ())
for iteration, batch in enumerate(run.data.batches("training", 0, 2), start=1):
    train_step(run, batch, iteration)
run.data.close()
run.model.finish()
sys.kept = [run, group, Last()]

sys.setswitchinterval(1000)
group.barrier()
if rank == 1:
    time.sleep(0.2)
dist.all_reduce(torch.zeros(1), group=group.group, async_op=True)
end = time.monotonic() + 0.5
while time.monotonic() < end:
    pass
groups = [weakref.ref(one) for one in (group.group, dist.group.WORLD)]
group.close()
sys.exit(3 if any(one() for one in groups) else 0)
"""


def test_a_finished_run_ends_with_its_own_exit_code(tmp_path: Path) -> None:
    """`close` waits for the threads of its groups, although the engine and the groups' owner live
    on.

    Without that both ranks, done with everything, die of SIGABRT.
    """
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done


def test_an_error_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Names in a downloaded file may hold anything: control characters and undecodable bytes are
    escaped."""
    assert (
        exit_status.report(
            CheckpointError("key \x1b[2J\r\udcff\u2028is\nnot known, für alle"), None, prints=True
        )
        == 4
    )
    assert (
        capsys.readouterr().err == "ERROR: key \\x1b[2J\\r\\udcff\\u2028is\nnot known, für alle\n"
    )
