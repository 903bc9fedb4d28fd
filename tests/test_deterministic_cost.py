"""scripts/deterministic_cost.py: step times of the real program, without and with --deterministic=1 in turns."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "deterministic_cost.py"
TINY = (
    "--num_layers=1 --hidden_size=16 --num_attention_heads=2 --vocab_size=64 --sequence_length=16 --batch_size=1"
    " --device=cpu --train_iters=8"
).split()  # fmt: skip


def load() -> Any:
    spec = importlib.util.spec_from_file_location("deterministic_cost", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_step_times_are_those_of_a_real_run_after_its_first_iterations() -> None:
    script = load()
    times = script.step_times_ms(TINY, deterministic=True)
    assert len(times) == 8 - script.WARMUP_ITERS and min(times) > 0


def test_flags_that_the_program_refuses_end_it_as_the_program_ends(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        load().step_times_ms(["--num_layers=x"], deterministic=False)
    assert error.value.code == 2 and "--num_layers=x: not an integer" in capfd.readouterr().err


def test_turns_alternate_and_medians_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, calls = load(), []

    def fake(flags: list[str], deterministic: bool) -> list[float]:
        calls.append((flags, deterministic))
        return [11.0, 12.0, 90.0] if deterministic else [10.0, 10.0, 50.0]

    monkeypatch.setattr(script, "step_times_ms", fake)
    assert script.main(["--turns=2", "--num_layers=3"]) == 0
    assert calls == [(["--num_layers=3"], False), (["--num_layers=3"], True)] * 2
    assert "--deterministic=1: 12.00 ms a step, without it 10.00 ms: +20.0%" in capsys.readouterr().out
