"""Properties that need a CUDA device: run with `pytest -m gpu tests/test_gpu.py`; skipped without
one."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_lite.checkpoint.writing import HostCopy
from megatron_lite.config import DistributedConfig, unflatten
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.distributed.startup import join, make_deterministic
from megatron_lite.distributed.step_watch import StepWatch
from megatron_lite.errors import PeerError
from megatron_lite.kernels.attention.choice import Work, machine_of, obstacle
from megatron_lite.kernels.choice import failure
from megatron_lite.monitor.watch import bin_places, summarize
from megatron_lite.validation import resolve
from tests.support.fakes import Layout, empty_model, make_specs
from tests.support.harness import TINY, start_run
from tests.support.launch import python_warnings

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

# Everything that a Llama has: each operation has a kernel of its own.
LLAMA = dict(
    gated=True, normalization_type="rms_norm", use_rotary_embeddings=True, head_groups=2
) | dict(add_linear_biases=False, tie_word_embeddings=False, num_layers=3)
NORMS = (
    LLAMA
    | dict(
        qk_layernorm=True, hybrid_norm=True, input_embedding_norm=True, full_precision_residual=True
    )
    | dict(zero_centered_normalization=True)
)


@pytest.fixture(scope="module")
def one_gpu() -> Any:
    distributed = join(DistributedConfig(device="cuda"), 0, 1, 0)
    yield distributed
    distributed.close()


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Behave as with --deterministic=1 inside the block."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    make_deterministic()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_cudnn_sdp(True)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def losses(distributed: Distributed, iterations: int = 20, **options: Any) -> list[float]:
    """Return the first losses of the tiny model on the device of `distributed`, from the program's
    own step."""
    from megatron_lite.schedules.batch_size import batch_schedule
    from megatron_lite.train import train_step

    config = resolve(
        unflatten(
            {**TINY, "device": distributed.device.type, "train_iters": iterations, **options}
        ),
        1,
    )
    run = start_run(distributed, config)
    batches = enumerate(run.data.batches("training", 0, iterations), start=1)
    schedule, length = batch_schedule(run.config.batch), run.config.batch.sequence_length
    return [
        float(train_step(run, batch, i).loss) / (schedule.batch_size(i) * length)
        for i, batch in batches
    ]


@pytest.mark.parametrize("model", [dict(num_layers=3), LLAMA, NORMS], ids=["gpt", "llama", "norms"])
@pytest.mark.parametrize("training_dtype", ["fp32", "bf16", "fp16"])
def test_zero_stages_agree_bit_for_bit_on_a_gpu(
    one_gpu: Distributed, training_dtype: str, model: dict[str, Any]
) -> None:
    with deterministic():
        options = dict(training_dtype=training_dtype, deterministic=True, **model)
        runs = [losses(one_gpu, zero_stage=stage, **options) for stage in (1, 2, 3)]
    assert runs[0] == runs[1] == runs[2] and len(set(runs[0])) == 20


@pytest.mark.parametrize("triton", [True, False])
def test_the_same_run_twice_is_the_same(one_gpu: Distributed, triton: bool) -> None:
    """With --deterministic=1; in bf16, where a sum in another order shows at once."""
    options = dict(training_dtype="bf16", deterministic=True, enable_triton_kernels=triton, **LLAMA)
    with deterministic():
        assert losses(one_gpu, **options) == losses(one_gpu, **options)


@pytest.mark.parametrize("kind", [dict(), dict(windowed=True), dict(documents=True)], ids=str)
@pytest.mark.parametrize("backend", ["cudnn", "flash3", "flash4", "flash", "varlen"])
def test_attention_passes_its_probe(backend: str, kind: dict[str, bool]) -> None:
    """Every backend that this device and its libraries have no known obstacle for, in the shape of
    a Mistral-7B."""
    device, work = torch.device("cuda", 0), Work(torch.bfloat16, 128, heads_per_group=4, **kind)
    if (reason := obstacle(backend, machine_of(device), work)) is not None:
        pytest.skip(reason)
    assert failure(backend, device, work) is None


def test_bf16_tracks_fp32(one_gpu: Distributed) -> None:
    np.testing.assert_allclose(losses(one_gpu, training_dtype="bf16"), losses(one_gpu), rtol=2e-2)


@pytest.mark.parametrize("model", [dict(num_layers=3), LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize(("training_dtype", "rtol"), [("fp32", 1e-4), ("bf16", 3e-3)])
def test_triton_changes_losses_by_rounding(
    one_gpu: Distributed, model: dict[str, Any], training_dtype: str, rtol: float
) -> None:
    """All kernels against all references, whole steps with the optimizer; and they are not the same
    code.

    The optimizer amplifies rounding errors: at ten times this learning rate they change losses in
    bf16 by 1.5 %.
    """
    options = dict(training_dtype=training_dtype, lr_warmup=0, **model)
    with_triton, without = (
        losses(one_gpu, enable_triton_kernels=on, **options) for on in (True, False)
    )
    np.testing.assert_allclose(with_triton, without, rtol=rtol)
    assert with_triton != without, "the option changes nothing"
    untrained = losses(one_gpu, lr=1e-12, **options)  # on the same batches
    assert abs(with_triton[-1] - untrained[-1]) > 2 * rtol * untrained[-1], "nothing is trained"


@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        dict(mlp_recompute_level="activation"),
        dict(mlp_recompute_level="full"),
        dict(recompute_layers=2),
    ],
    ids=str,
)
def test_recomputation_changes_nothing(
    one_gpu: Distributed, triton: bool, options: dict[str, Any]
) -> None:
    """The same kernels on the same values a second time: losses agree to the rounding of fp32."""
    common = dict(enable_triton_kernels=triton, deterministic=True, **LLAMA)
    with deterministic():
        np.testing.assert_allclose(
            losses(one_gpu, **common, **options), losses(one_gpu, **common), rtol=1e-6
        )


def test_a_late_step_is_noticed_while_the_device_works() -> None:
    """With real events: our message comes while the device is busy, and nothing is late once it is
    done."""
    watch = StepWatch(0.2)
    watch.end_step()
    torch.cuda._sleep(2_000_000_000)  # about a second
    watch.end_step()
    with pytest.raises(PeerError, match="did not end within"):
        watch.finish()
    torch.cuda.synchronize()
    assert watch.has_ended()


def test_the_copy_for_background_saves_is_pinned(one_gpu: Distributed) -> None:
    model: Any = empty_model(make_specs(), Layout(), 0)
    host_copy = HostCopy(model, one_gpu)
    assert all(copy.is_pinned() for (copy,) in host_copy._copies)


def test_histograms_are_those_of_a_cpu_without_a_wait() -> None:
    values = torch.randn(100_000) * 10.0 ** torch.randint(-30, 30, (100_000,))
    values[:3] = torch.tensor([0.0, torch.inf, torch.nan])
    expected = summarize([values], True, bin_places(values.device))
    on_gpu, bins = values.cuda(), bin_places(torch.device("cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = summarize([on_gpu], True, bins)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found[3:].cpu(), expected[3:])


# -- the program
# -----------------------------------------------------------------------------------------------------


def pretrain(experiment: Path, *more: str) -> str:
    """Run pretrain_gpt.py on the GPU as a user does, with defaults wherever possible; its
    output."""
    flags = {**TINY, "train_iters": 12, "checkpoint_interval": 4, "experiment_dir": experiment}
    del flags["device"]
    command = [
        sys.executable,
        str(ROOT / "pretrain_gpt.py"),
        *(f"--{name}={value}" for name, value in flags.items()),
    ]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CUBLAS", "PYTEST"))
    }
    environment |= {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *more], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def curve(experiment: Path) -> list[float]:
    records = map(json.loads, (experiment / "metrics.jsonl").read_text("utf-8").splitlines())
    last = {
        record["iteration"]: record["loss"] for record in records if record["phase"] == "training"
    }
    return [last[iteration] for iteration in sorted(last)]


def test_the_program_chooses_triton_and_resumes_to_the_bit(tmp_path: Path) -> None:
    """Without a flag about kernels they are Triton's, as the log says; a run that was stopped goes
    on as if it had not been, with --deterministic=1; and no library warns."""
    flags = ("--training_dtype=bf16", "--deterministic=1")
    output = pretrain(tmp_path / "whole", *flags)
    assert "kernels: Triton" in output
    assert not python_warnings(output), output
    pretrain(tmp_path / "stopped", *flags, "--stop_interval=6")
    assert len(curve(tmp_path / "stopped")) == 6
    pretrain(tmp_path / "stopped", *flags)
    assert (
        curve(tmp_path / "stopped") == curve(tmp_path / "whole")
        and len(curve(tmp_path / "whole")) == 12
    )


def test_the_program_runs_without_triton(tmp_path: Path) -> None:
    """The references, as the log says."""
    assert "kernels: torch" in pretrain(
        tmp_path, "--training_dtype=bf16", "--enable_triton_kernels=0"
    )


# -- memory
# ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def at_most_bytes(limit: float) -> Iterator[None]:
    """Check that the block allocates at most N bytes more than before at any time."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    assert torch.cuda.max_memory_allocated() - before < limit


@pytest.mark.parametrize("block_size", [None, 32064])
def test_the_loss_keeps_no_logits(block_size: int | None) -> None:
    """Llama-3's head: 8192 x 128,256 logits take 2.1 GB in bf16 and 4.2 GB in fp32; a quarter of
    the tokens at a time, in blocks of a quarter of the vocabulary besides, take a fraction of the
    former."""
    from megatron_lite.kernels.cross_entropy import linear_cross_entropy
    from megatron_lite.parameter import Parameter

    hidden = torch.randn(8192, 4096, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight: Any = Parameter(torch.randn(128256, 4096, dtype=torch.bfloat16, device="cuda") / 64)
    weight.main_grad = torch.zeros(weight.shape, dtype=torch.float32, device="cuda")
    labels, scale = torch.randint(128256, (8192,), device="cuda"), torch.tensor(1.0, device="cuda")
    torch.mm(hidden.detach()[:16], weight.detach().t())  # the library's own memory
    logits = 2 * 8192 * 128256 / (4 if block_size is None else 16)
    with at_most_bytes(1.1 * logits + 3 * 2 * hidden.numel()):
        loss = linear_cross_entropy(hidden, weight, labels, scale, 2048, block_size, triton=True)
        loss.backward()


# -- two simulated ranks on one GPU; tests/zero/test_slow_collectives.py runs the same code on CPU
# -------------------

# Of nothing, on the stream of the collectives: about 5 ms, far more than a stage of the tiny model
# takes.
DELAY_CYCLES = 10_000_000


def gpu_layouts() -> list[dict[str, Any]]:
    from tests.zero.test_slow_collectives import SOME

    return [options | {"device": "cuda"} for options in SOME]


def simulated(options: dict[str, Any], delay_cycles: int) -> Any:
    from tests.support.engine_runs import Engine, SimulatedRanks

    with deterministic():
        return Engine(SimulatedRanks("cuda", delay_cycles), options).run(3, evaluate_every=2)


def test_slow_collectives_change_no_bit_on_a_stream() -> None:
    """Every collective on a stream of its own, late behind the computation: the numbers are the
    same."""
    for options in gpu_layouts():
        assert simulated(options, DELAY_CYCLES) == simulated(options, 0), options


@pytest.mark.parametrize("site", ["accumulate", "require_weights", "finish_reduction"])
def test_a_missing_wait_is_noticed_on_a_stream(site: str) -> None:
    """The test above can fail: without any one of the waits the numbers are others.

    The host takes some 5 ms from the last reduction to the optimizer, so collectives are later
    here.
    """
    options = next(options for options in gpu_layouts() if options.get("zero_stage") == 3)
    right = simulated(options, 0)
    from tests.zero.test_slow_collectives import removed_wait

    seen = set[str]()
    with removed_wait(site, seen):
        assert simulated(options, 10 * DELAY_CYCLES) != right
    assert site in seen


def tensor_layouts() -> list[dict[str, Any]]:
    from tests.zero.test_slow_tensor_collectives import SIMULATED

    return [options | {"device": "cuda"} for options in SIMULATED]


def simulated_tensor_parallel(options: dict[str, Any], delay_cycles: int) -> Any:
    from tests.support.engine_runs import Engine, simulated_tensor_ranks

    with deterministic():
        return Engine(simulated_tensor_ranks("cuda", delay_cycles), options).run(
            2, evaluate_every=2
        )


def test_slow_collectives_of_hidden_states_change_no_bit_on_a_stream() -> None:
    """What arrives on another stream, late, is not read before: `wait` lets the stream of the
    layers wait."""
    for options in tensor_layouts():
        assert simulated_tensor_parallel(options, DELAY_CYCLES) == simulated_tensor_parallel(
            options, 0
        ), options


def test_a_missing_wait_for_hidden_states_is_noticed_on_a_stream() -> None:
    """The test above can fail."""
    from megatron_lite.kernels.linear import Pending

    for options in tensor_layouts():
        right = simulated_tensor_parallel(options, DELAY_CYCLES)
        with mock.patch.object(Pending, "wait", lambda pending, copies=True: pending._tensor):
            assert simulated_tensor_parallel(options, DELAY_CYCLES) != right
