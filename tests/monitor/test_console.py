"""Lines of the console: loss, rate and speed first, no repetition, at most 120 columns on a CPU."""

from __future__ import annotations

from typing import Any

from megatron_lite.monitor.console import ConsoleLines


def values(**more: Any) -> dict[str, Any]:
    """Return a training record of a long run with its values for the console."""
    return {
        "phase": "training",
        "iteration": 100_000,
        "train_iters": 500_000,
        "loss": 11.23456,
        "learning_rate": 1e-4,
        "grad_norm": 1.2345,
        "loss_scale": 65536.0,
        "batch_size": 128,
        "consumed_tokens": 10**12,
        "step_time_ms": 4850.123,
        "data_wait_ms": 0.5,
        "tokens_per_sec_per_gpu": 9012.3,
        "tokens_per_sec": 1_153_574.4,
        "model_tflops": 440.0,
        "mfu": 0.4449,
        "skipped_iters": 0,
        "nan_iters": 0,
        "remaining_seconds": 2_415_725.0,
        **more,
    }


def test_order_width_and_units_on_a_cpu() -> None:
    """Loss, learning rate, norm, speed, time left; no GPU is mentioned, and the first line has no forecast."""
    console = ConsoleLines("cpu")
    first, second = console.training(values(iteration=1)), console.training(values())
    assert first == (
        "iteration      1/500000 | loss 11.2346 | lr 1.00e-04 | grad norm 1.23 | 4,850 ms/step | 1,153,574 tokens/s"
    )
    assert second == first.replace("     1/", "100000/") + " | 671:02:05 left"
    assert len(console.training(values(train_iters=99_999, iteration=10_000, tokens_per_sec=153_574.0))) <= 120


def test_a_gpu_has_its_own_units() -> None:
    """Tokens per second and GPU, and MFU where the peak of the GPU is known."""
    console = ConsoleLines("cuda")
    assert console.training(values()).endswith(" | 4,850 ms/step | 9,012 tokens/s/gpu | mfu 44%")
    assert console.training(values(mfu=None, iteration=500_000)).endswith(" | 9,012 tokens/s/gpu")


def test_what_rarely_changes_is_shown_when_it_has_changed() -> None:
    """Batch size, loss scale, memory and counts of bad steps: each once per change, none at the start."""
    console = ConsoleLines("cuda")
    plain = console.training(values())
    assert not any(word in plain for word in ("batch", "scale", "skipped", "nan", "memory", "consumed", "wait"))
    now: dict[str, Any] = {}
    for name, value, text in (
        ("batch_size", 256, "batch size 256"),
        ("loss_scale", 32768.0, "loss scale 32768"),
        ("max_reserved_mib", 70_000.0, "memory 70,000 MiB"),
        ("skipped_iters", 2, "skipped iterations 2"),
        ("nan_iters", 1, "nan iterations 1"),
    ):
        now[name] = value
        for shown in (f" left | {text}", " left"):
            assert console.training(values(**now)).endswith(shown)


def test_waiting_for_data_is_shown_where_it_counts() -> None:
    """From a tenth of the step time on."""
    console = ConsoleLines("cpu")
    assert "data wait" not in console.training(values(data_wait_ms=400.0))
    assert console.training(values(data_wait_ms=600.0)).endswith(" left | data wait 600 ms")


def test_a_line_without_a_loss_says_so() -> None:
    """Its updates were all dropped; the other numbers keep their places."""
    assert " | loss - | lr 1.00e-04 | grad norm nan | " in ConsoleLines("cpu").training(
        values(loss=None, grad_norm=float("nan"))
    )


def test_evaluations_are_short() -> None:
    """A loss, and that of averaged weights; a number that is not finite is shown as it is."""
    record = {"phase": "validation", "iteration": 5, "train_iters": 10, "loss": 2.5, "averaged_loss": 2.25, "run": 0}
    console = ConsoleLines("cpu")
    assert console.evaluation(record) == "validation @ iteration  5/10 | loss 2.5000 | averaged weights 2.2500"
    assert console.evaluation({**record, "averaged_loss": None, "loss": float("nan")}).endswith("10 | loss nan")
    assert console.evaluation({**record, "averaged_loss": None, "loss": None}) == "validation @ iteration  5/10"


def test_small_and_large_numbers_keep_three_digits() -> None:
    """Of step times and gradient norms."""
    console = ConsoleLines("cpu")
    for norm, text in ((0.0012345, "0.00123"), (0.5, "0.500"), (12.0, "12.0"), (123.4, "123"), (2e7, "2.00e+07")):
        assert f"| grad norm {text} |" in console.training(values(grad_norm=norm))
    assert "| grad norm inf |" in console.training(values(grad_norm=float("inf")))
