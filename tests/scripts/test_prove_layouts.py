"""Layouts compute the same, and a planted mistake is found and reduced to what it needs."""

import json
import math
import os
import re
import shlex
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_lite.config.source import PRESETS
from megatron_lite.distributed.processes import has_ended
from megatron_lite.errors import UsageError
from megatron_lite.zero.replicas import Replicas
from scripts import prove_layouts
from scripts.proof.cases import LAYOUT, case_of, flags_of
from scripts.proof.comparison import (
    BF16,
    EXACT,
    FP32,
    Judge,
    differences,
    first_limits,
    moved_by,
    smallest,
)
from scripts.proof.like import shrunk
from scripts.proof.pairs import Draws
from scripts.proof.ranks import Ranks, Step
from tests.support import harness

FIXED = {"device": "cpu", "deterministic": "0"}


@pytest.mark.parametrize(
    ("count", "ranks", "seed"), [(1, 2, 3), pytest.param(300, 4, 1, marks=pytest.mark.slow)]
)
def test_drawn_layouts_compute_the_same(
    count: int, ranks: int, seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The JSON has a command for each. The third seed begins with a pipeline, in eight bits."""
    words = [
        f"--count={count}",
        f"--ranks={ranks}",
        f"--seed={seed}",
        f"--output={tmp_path / 'proof.json'}",
    ]
    assert prove_layouts.main(words) == 0
    output = capsys.readouterr().out
    assert "every layout computes the same" in output
    report = json.loads((tmp_path / "proof.json").read_text())
    cases, pairs = report["cases"], report["pairs"]
    assert count < 300 or any(case["same_bits_as"] for case in cases)
    assert f"{pairs['met']:,} met" in output and (count < 300 or not pairs["missed"])
    assert len(cases) == count and not any(case["problem"] for case in cases)
    assert all(
        case["command"].startswith("python scripts/prove_layouts.py --ranks=") for case in cases
    )


def test_the_same_seed_draws_the_same_layouts() -> None:
    """Another one draws others."""
    one, same, other = (Draws(seed, 2, [flags_of("--optimizer=sgd")], FIXED) for seed in (1, 1, 2))
    drawn = [one.case() for _ in range(3)]
    assert drawn == [same.case() for _ in range(3)] != [other.case() for _ in range(3)]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--lora_targets=up --lr_scales=*.down.*:0.5", "lr_scales: .* matches no parameter"),
        (
            "--num_experts=4 --expert_auxiliary_loss_coefficient=0.1 --lora_dropout=0.1",
            "adapters of experts have none.*; write --lora_dropout=0 or --lora_targets=attention ",
        ),
    ],
)
def test_adapters_that_the_program_refuses_are_not_drawn(words: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        case_of(flags_of(f"--lora_rank=1 {words}"), 1, None).parts(FIXED)


def test_a_limit_that_values_cross_by_rounding_is_not_proved() -> None:
    """A gradient begins or ends there; a command with one gets another."""
    with pytest.raises(UsageError, match="activation_limit=0.01: rounding moves values across it"):
        case_of(flags_of("--gated=1 --activation_limit=0.01"), 2, None).parts(FIXED)
    assert shrunk(["--gated=1", "--activation_limit=1"], 2)[0].options["activation_limit"] == "4"
    like = ["--gated=1", "--activation_limit=7"]
    assert shrunk(like, 2)[0].options["activation_limit"] == "7"


def test_a_frozen_weight_keeps_its_own_scale_in_8_bits() -> None:
    """A rounded weight that is not rounded again must not have a scale that moves on, on one rank
    already."""
    assert (
        prove_layouts.main(["--ranks=1", "--case=--fp8=delayed --freeze=blocks.0 --num_layers=2"])
        == 0
    )


def test_a_thawed_layer_and_an_evaluation_are_those_of_one_rank() -> None:
    """A layer that was frozen before a restart trains after it; averages begin there; evaluations
    change nothing."""
    options = "--freeze=blocks.0 --ema_type=ema --ema_beta=0.5 --validation_iters=1 --validation_interval=1"
    with Ranks() as ranks:
        case = case_of(flags_of(f"{options} --num_layers=2"), 2, "1 --freeze=")
        steps = ranks.train(case.parts(FIXED))
        name = next(name for _, name in steps[0].tensors if name.startswith("blocks.0"))
        assert [("gradients", name) in step.tensors for step in steps] == [
            False,
            False,
            False,
            True,
            True,
        ]
        assert all("averaged_loss of the validation" in step.numbers for step in steps[1:])
        verdict = Judge(ranks, FIXED)(case)
    assert (
        not verdict.problem
        and {"update of the average", "loss of the validation"} <= verdict.worst.keys()
    )


def hold_ranks(folder: str, sender: Connection) -> None:
    """Start two ranks, tell their processes, and wait to be killed."""
    tempfile.tempdir = folder
    with Ranks() as ranks:
        ranks.train(case_of({}, 2, None).parts(FIXED))
        sender.send([process.submit(os.getpid).result() for process in ranks._processes])
        time.sleep(60)


def test_ranks_end_with_a_killed_parent(tmp_path: Path) -> None:
    """SIGKILL to the command leaves no process."""
    receiver, sender = harness.FORKSERVER.Pipe(duplex=False)
    parent = harness.FORKSERVER.Process(target=hold_ranks, args=(str(tmp_path), sender))
    parent.start()
    pids = receiver.recv()
    parent.kill()
    parent.join()
    deadline = time.monotonic() + 30
    while not all(has_ended(pid) for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.01)


def forget_gradients() -> None:
    """Plant a mistake into a rank: gradients of copied parameters are those of its own tokens."""

    def nothing(self: Replicas, shard: Tensor) -> None:
        pass

    Replicas.sum_gradients = nothing  # type: ignore[method-assign]


def test_a_planted_mistake_is_reduced_to_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 5, the first parameter and step, and a command with two flags of three."""
    case = "--training_dtype=bf16 --tensor_parallel=2 --sequence_tensor_parallel=1"
    words = ["--ranks=2", f"--case={case}", "--then=3"]
    assert prove_layouts.main(words, forget_gradients) == 5
    output = capsys.readouterr()
    assert (
        "DIFFERENT: ranks hold different gradients of embedding.position.weight at step 1"
        in output.out
    )
    command = output.err.strip().splitlines()[-1].removeprefix("shown again by: ")
    assert shlex.split(command) == [
        *("python", "scripts/prove_layouts.py", "--ranks=2"),
        "--case=--tensor_parallel=2 --sequence_tensor_parallel=1",
    ]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--then=2"], "--then continues a --case"),
        (["--case=--zero_stage=7"], "ERROR: --zero_stage=7: must be >= 1"),
        (["--case=--zero_stage=2", "--then=--zero_stage=3"], "begin with the number of ranks"),
        (["--like=--hidden_sise=64"], "did you mean --hidden_size?"),
        (["--like=--tensor_parallel=2", "--case=--zero_stage=2"], "not allowed with"),
    ],
)
def test_mistakes_are_named(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, with exit code 2, before any process starts."""
    try:
        code = prove_layouts.main(words)
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr().err
    assert code == 2 and error in said and said.count("\n") == 1, said


def a_run(**changes: float) -> list[Step]:
    """A start and two iterations of one parameter of 40 elements and a frozen one; changes: of the
    last iteration."""
    ramp, ones = torch.linspace(0.1, 1, 40), torch.ones(40)
    steps = [Step(0, {}, {("weights", "w"): ramp, ("weights", "frozen"): ones})]
    for number, more in ((1, dict[str, float]()), (2, changes)):
        gradient, moved = ramp.clone(), (ramp * (1 + 0.01 * number)).clone()
        gradient[7] *= 1 + more.get("gradient", 0.0)
        moved *= 1 + more.get("update", 0.0)
        tensors = {("gradients", "w"): gradient, ("weights", "w"): moved}
        tensors["weights", "frozen"] = ones * (1 + more.get("frozen", 0.0))
        numbers = {"loss": 2.0 * (1 + more.get("loss", 0.0)), "norm": 1.0 + more.get("norm", 0.0)}
        numbers["counted samples"] = 10**7 * number + more.get("counted", 0.0)
        steps.append(Step(number, numbers, tensors))
    return steps


def test_every_number_is_compared() -> None:
    """Rounding passes, and a little more does not; to the bit, nothing passes. NaN is a
    difference."""
    small = {"loss": 8e-7, "norm": 8e-6, "gradient": 4e-5, "update": 2e-6}
    assert not [found for found in differences(a_run(**small), a_run(), FP32) if found.is_beyond]
    large = {
        "loss": 2e-6,
        "norm": 2e-5,
        "gradient": 1e-3,
        "update": 1e-4,
        "frozen": 1e-6,
        "counted": 1,
    }
    for what, change in [*large.items(), ("loss", math.nan), ("gradient", math.nan)]:
        beyond = [
            found
            for found in differences(a_run(**{what: change}), a_run(), FP32)
            if found.is_beyond
        ]
        assert [found.step for found in beyond] == [2] and beyond[0].what.startswith(what), (
            what,
            beyond,
        )
    for what, change in large.items():
        assert any(
            found.is_beyond for found in differences(a_run(**{what: change}), a_run(), EXACT)
        ), what


def test_limits_with_8_bits_follow_from_a_disturbance() -> None:
    """A parameter's, of its step; a loss's, of the step that moved most; a norm's, of all gradients
    as one vector."""
    measured = moved_by(a_run(loss=-0.02, gradient=0.5, update=0.01), a_run(), FP32)
    worst = {
        found.what: measured(found)
        for found in differences(a_run(), a_run(), FP32)
        if found.step == 2
    }
    assert worst["loss"] == pytest.approx(0.02) and worst["gradient"] == pytest.approx(
        0.5 * (0.1 + 0.9 * 7 / 39)
    )
    ramp = torch.linspace(0.1, 1, 40)
    assert worst["norm"] == pytest.approx(0.5 * float(ramp[7] / ramp.norm()))
    first = [measured(found) for found in differences(a_run(), a_run(), FP32) if found.step == 1]
    assert max(first) == pytest.approx(0.02)  # the loss


def test_the_first_iteration_with_8_bits_has_the_limits_of_fp32() -> None:
    """Without tensor parallelism, unless gradients are summed in 16 bits."""
    bits = "--fp8=rowwise --training_dtype=bf16"
    assert first_limits(case_of(flags_of(bits), 2, None)) == FP32
    assert first_limits(case_of(flags_of(f"{bits} --full_precision_gradients=0"), 2, None)) == BF16
    for flags in ("--training_dtype=bf16", f"{bits} --tensor_parallel=2"):
        assert first_limits(case_of(flags_of(flags), 2, None)) is None


def test_limits_of_experts_in_16_bits_are_measured() -> None:
    """Their gradients sum few tokens; in fp32 the limits are those of dense models."""
    experts = "--num_experts=4 --num_experts_per_token=2"
    for dtype, measured in (("fp32", False), ("fp16", True), ("bf16", True)):
        case = case_of(flags_of(f"{experts} --training_dtype={dtype}"), 2, None)
        assert case.is_measured == measured
        assert not case_of(flags_of(f"--training_dtype={dtype}"), 2, None).is_measured


def test_smallest_keeps_what_the_failure_needs() -> None:
    """Any subset of the units, however they lie."""
    for needed in ([], [0], [12], [3, 4], [0, 6, 12], [1, 3, 5, 7, 9, 11]):
        tried: list[list[int]] = []

        def fails(
            kept: list[int], needed: list[int] = needed, tried: list[list[int]] = tried
        ) -> bool:
            tried.append(kept)
            return set(needed) <= set(kept)

        assert smallest(range(13), fails) == needed  # type: ignore[arg-type]
        assert len(tried) < 60


def test_a_command_is_shrunk_with_its_options_and_layout() -> None:
    """Sizes are small, ratios are kept, and what cannot be is named."""
    flags = (
        "--num_layers=32 --hidden_size=4096 --num_attention_heads=32 --head_groups=8 --ffn_hidden_size=14336 "
        "--sequence_length=8192 --window_size=4096 --training_dtype=bf16 --hidden_dropout=0.1 --optimizer=muon "
        "--freeze=blocks.17.mlp --tensor_parallel=8 --zero_stage=3 --mlp_recompute_level=activation,full:8"
    )
    case, remarks = shrunk(shlex.split(flags), 4)
    assert case.options == {
        **flags_of(
            "--head_groups=4 --ffn_hidden_size=168 --window_size=12 --training_dtype=bf16 --optimizer=muon"
        ),
        "freeze": "blocks.1.mlp",
    }
    assert (
        dict(case.layout.flags) == {"tensor_parallel": "4", "zero_stage": "3"}
        and case.layout.ranks == 4
    )
    assert re.findall(r"dropout is 0|left out --mlp_recompute_level", "\n".join(remarks)) == [
        "dropout is 0",
        "left out --mlp_recompute_level",
    ]
    assert case.layout.flags.keys() <= LAYOUT.keys()


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (place % 16 > 0))
        for place, name in enumerate(PRESETS)
    ],
)
def test_layouts_of_each_published_model_can_be_drawn(preset: str) -> None:
    """With tensor parallelism, also in fp32; nothing of the architecture is left out but
    dropout."""
    case, remarks = shrunk([f"--model={preset}", "--training_dtype=bf16"], 4)
    assert not [remark for remark in remarks if not remark.startswith("dropout")]
    draws = Draws(1, 4, [case.options], FIXED)
    drawn = [draws.case() for _ in range(4)]
    assert any("tensor_parallel" in found.layout.flags for found in drawn)
