"""Lines of the console: loss, rate and speed first, no repetition, at most 120 columns on a CPU."""

from datetime import datetime
from typing import Any

from megatron_lite.monitor.metric_lines import ConsoleLines, format_record
from megatron_lite.run.progress_line import format_duration


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
    """Loss, learning rate, norm, speed, time left; no GPU is mentioned, and the first line has no
    forecast."""
    console = ConsoleLines("cpu")
    first, second = console.training(values(iteration=1)), console.training(values())
    assert first == (
        "iteration      1/500000 | loss 11.2346 | lr 1.00e-04 | grad norm 1.23 | 4,850 ms/step | 1,153,574 tokens/s"
    )
    assert second == first.replace("     1/", "100000/") + " | 671:02:05 left"
    assert (
        len(
            console.training(values(train_iters=99_999, iteration=10_000, tokens_per_sec=153_574.0))
        )
        <= 120
    )


def test_a_gpu_has_its_own_units() -> None:
    """Tokens per second and GPU, and MFU where the peak of the GPU is known."""
    console = ConsoleLines("cuda")
    assert console.training(values()).endswith(" | 4,850 ms/step | 9,012 tokens/s/gpu | mfu 44%")
    assert console.training(values(mfu=None, iteration=500_000)).endswith(" | 9,012 tokens/s/gpu")


def test_what_rarely_changes_is_shown_when_it_has_changed() -> None:
    """Batch size, loss scale, memory and counts of bad steps: each once per change, none at the
    start."""
    console = ConsoleLines("cuda")
    plain = console.training(values())
    assert not any(
        word in plain for word in ("batch", "scale", "skipped", "nan", "memory", "consumed", "wait")
    )
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
    """A loss, and that of averaged weights; a number that is not finite is shown as it is.

    Where no label counts, there is no loss.
    """
    record = {
        "phase": "validation",
        "iteration": 5,
        "train_iters": 10,
        "loss": 2.5,
        "averaged_loss": 2.25,
        "run": 0,
    }
    console = ConsoleLines("cpu")
    assert (
        console.evaluation(record)
        == "validation @ iteration  5/10 | loss 2.5000 | averaged weights 2.2500"
    )
    assert console.evaluation({**record, "averaged_loss": None, "loss": float("nan")}).endswith(
        "10 | loss nan"
    )
    assert console.evaluation({**record, "averaged_loss": None, "loss": None}).endswith(
        "10 | loss -"
    )
    blend = {**record, "averaged_loss": None, "loss/code": 1.25, "loss/chats": None}
    assert console.evaluation(blend).endswith("10 | loss 2.5000 | code: 1.25000 | chats: -")


def test_small_and_large_numbers_keep_three_digits() -> None:
    """Of step times and gradient norms."""
    console = ConsoleLines("cpu")
    for norm, text in (
        (0.0012345, "0.00123"),
        (0.5, "0.500"),
        (12.0, "12.0"),
        (123.4, "123"),
        (2e7, "2.00e+07"),
    ):
        assert f"| grad norm {text} |" in console.training(values(grad_norm=norm))
    assert "| grad norm inf |" in console.training(values(grad_norm=float("inf")))


def test_log_line_of_a_training_record() -> None:
    record = values(
        iteration=20,
        train_iters=1000,
        loss=3.123456,
        learning_rate=3e-4,
        grad_norm=1.25,
        loss_scale=1.0,
        batch_size=32,
        consumed_samples=640,
        consumed_tokens=81920,
        step_time_ms=12.345,
        data_wait_ms=None,
        tokens_per_sec_per_gpu=12345.678,
        model_tflops=440.126,
        hardware_tflops=0.01234,
        mfu=0.4321,
        max_allocated_mib=1024.0,
        max_reserved_mib=2048.0,
        remaining_seconds=None,
        run=0,
        time=0.0,
    )
    completion = datetime(2030, 1, 2, 3, 4, 5)
    console = dict(
        average_step_time_ms=12.0,
        remaining_seconds=3725.0,
        completion_date=completion,
        allocated_mib=512.0,
    )
    assert format_record(record, console) == (
        "training @ iteration   20/1000 | consumed samples: 640 | consumed tokens: 81,920 | batch size: 32"
        " | step time: 12.35 ms | throughput: 440.13 tflop/s (model) | 0.0123 tflop/s (hardware) | mfu: 43.2%"
        " | 12,345.68 tokens/s/gpu | Memory allocated: 512 MiB | max allocated: 1,024 MiB | max reserved: 2,048 MiB"
        " | learning rate: 3.000e-04 | loss scale: 1 | grad norm: 1.2500 | skipped iterations: 0 | nan iterations: 0"
        " | average step time: 12.00 ms | remaining: 1:02:05 | completion: 2030-01-02 03:04:05 (2.00%)"
        " | language model loss: 3.12346"
    )


def test_log_line_shows_only_what_the_record_has() -> None:
    record = {"phase": "validation", "iteration": 5, "train_iters": 10, "loss": 2.5}
    assert format_record(record) == "validation @ iteration  5/10 | language model loss: 2.50000"
    assert format_record({**record, "loss": float("nan")}).endswith(
        " 5/10 | language model loss: nan"
    )
    assert format_record({**record, "loss": None}) == "validation @ iteration  5/10"


def test_durations() -> None:
    shown = [format_duration(seconds) for seconds in (0, 59.6, 3600, 360_000)]
    assert shown == ["0:00:00", "0:01:00", "1:00:00", "100:00:00"]
