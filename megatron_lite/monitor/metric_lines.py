"""Format metrics as lines: long in the log file, about 120 columns on the console.

Only these lines round; metrics.jsonl contains the unrounded numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_lite.run.progress_line import format_duration

Record = Mapping[str, Any]  # a line of metrics.jsonl
Show = str | Callable[[Any], str]  # a format string for the value, or a function
MOST_DATASETS = 20  # data sets whose losses are shown
WAITING = 0.1  # share of the step time from which the console shows the wait for data


def _text(show: Show, value: Any) -> str:
    """Return a value as text."""
    return show.format(value) if isinstance(show, str) else show(value)


def _three_digits(text: str) -> Show:
    return lambda value: text.format(f"{value:,.0f}" if 100 <= value < 1e6 else f"{value:#.3g}")


def _tflops(text: str) -> Show:
    """Show three significant digits below 1 TFLOP/s, as for small models."""
    return lambda value: text.format(f"{value:.2f}" if value >= 1 else f"{value:.3g}")


# How to show each value of a record in the log file, in this order, and on the console.
FIELDS: dict[str, tuple[Show | None, Show | None]] = {
    "consumed_samples": ("consumed samples: {:,}", None),
    "consumed_tokens": ("consumed tokens: {:,}", None),
    "batch_size": ("batch size: {}", "batch size {}"),
    "step_time_ms": ("step time: {:.2f} ms", _three_digits("{} ms/step")),
    "data_wait_ms": ("data wait: {:.2f} ms", "data wait {:.3g} ms"),
    "model_tflops": (_tflops("throughput: {} tflop/s (model)"), None),
    "hardware_tflops": (_tflops("{} tflop/s (hardware)"), None),
    "mfu": ("mfu: {:.1%}", "mfu {:.0%}"),
    "tokens_per_sec": (None, "{:,.0f} tokens/s"),
    "tokens_per_sec_per_gpu": ("{:,.2f} tokens/s/gpu", "{:,.0f} tokens/s/gpu"),
    "allocated_mib": ("Memory allocated: {:,.0f} MiB", None),
    "max_allocated_mib": ("max allocated: {:,.0f} MiB", None),
    "reserved_mib": ("reserved: {:,.0f} MiB", None),
    "max_reserved_mib": ("max reserved: {:,.0f} MiB", "memory {:,.0f} MiB"),
    "learning_rate": ("learning rate: {:.3e}", "lr {:.2e}"),
    "loss_scale": ("loss scale: {:g}", "loss scale {:g}"),
    "grad_norm": ("grad norm: {:.4f}", _three_digits("grad norm {}")),
    "update_norm": ("update norm: {:.4f}", None),
    "clipped_iters": ("clipped updates: {}", None),
    "skipped_iters": ("skipped iterations: {}", "skipped iterations {}"),
    "nan_iters": ("nan iterations: {}", "nan iterations {}"),
    "skip_reason": ("skip reason: {}", None),
    "average_step_time_ms": ("average step time: {:.2f} ms", None),
    "remaining_seconds": (
        lambda value: f"remaining: {format_duration(value)}",
        lambda value: f"{format_duration(value)} left",
    ),
    "completion_date": ("completion: {:%Y-%m-%d %H:%M:%S}", None),
    "averaged_loss": ("averaged weights loss: {:.5f}", "averaged weights {:.4f}"),
    "loss": ("language model loss: {:.5f}", "loss {:.4f}"),
}
LOSSES = ("loss", "averaged_loss")
SPEED = {"cpu": ("tokens_per_sec",), "cuda": ("tokens_per_sec_per_gpu", "mfu")}  # by device type
BAR = ("loss", "tokens_per_sec", "mfu", "remaining_seconds")  # all ranks' tokens, as the time left
# The console shows these only when they change.
RARELY_CHANGING = ("batch_size", "loss_scale", "max_reserved_mib", "skipped_iters", "nan_iters")


def format_record(record: Record, more: Record | None = None) -> str:
    """Return a record's log line: `training @ iteration 20/1000 | step time: ... | language model
    loss: ...`.

    Args:
        record: keys of metrics.jsonl; absent fields are not shown.
        more: values for the log file only: `allocated_mib`, `reserved_mib`, `average_step_time_ms`,
            `remaining_seconds`, `completion_date`.
    """
    values = {**record, **(more or {})}
    parts = [f"{values['phase']} @ {_head(values)}"]
    for key, (show, _) in FIELDS.items():
        if (value := values.get(key)) is None or show is None:
            continue
        part = _text(show, value)
        if key == "completion_date":
            part += f" ({values['iteration'] / values['train_iters']:.2%})"
        parts.append(part)
    return " | ".join([*parts, *dataset_losses(values)])


class ConsoleLines:
    """Formats the console lines of one start; rarely changing values are shown only when they
    change.

    Args:
        device_type: cpu or cuda, which determines the unit of speed.
    """

    def __init__(self, device_type: str) -> None:
        self._keys = ("loss", "learning_rate", "grad_norm", "step_time_ms", *SPEED[device_type])
        self._last: dict[str, Any] = {"max_reserved_mib": 0.0, "skipped_iters": 0, "nan_iters": 0}
        self._last_loss: float | None = None
        self._forecasts = False  # not in the first line: compilation and allocation would spoil it

    def training(self, values: Record) -> str:
        """Return a training record's console line and the values shown; absent values are skipped.

        `iteration 20/1000 | loss 3.1235 | lr 3.00e-04 | grad norm 1.25 | 12.3 ms/step | 12,346
        tokens/s | 0:01:05 left`
        """
        keys = list(self._keys)
        if values.get("loss") is not None:
            self._last_loss = values["loss"]
        if self._forecasts and values["iteration"] < values["train_iters"]:
            keys.append("remaining_seconds")
        self._forecasts = True
        if values.get("data_wait_ms", 0.0) > WAITING * values.get("step_time_ms", 0.0):
            keys.append("data_wait_ms")
        for key in RARELY_CHANGING:
            if (value := values.get(key)) is not None and value != self._last.setdefault(
                key, value
            ):
                self._last[key] = value
                keys.append(key)
        return " | ".join([_head(values), *_no_loss(values), *_shown(keys, values)])

    def bar(self, pace: Mapping[str, float]) -> str:
        """Return the progress bar's text: `loss 3.1235, 12,346 tokens/s, mfu 41%, 0:01:05 left`.

        The loss is the last training line's.
        """
        return ", ".join(_shown(BAR, {"loss": self._last_loss, **pace}))

    def evaluation(self, values: Record) -> str:
        """Return the line of a validation or test: `validation @ iteration 20/1000 | loss
        3.1235`."""
        head = [f"{values['phase']} @ {_head(values)}", *_no_loss(values)]
        return " | ".join([*head, *_shown(LOSSES, values), *dataset_losses(values)])


def dataset_losses(values: Record) -> list[str]:
    """Return the losses of up to 20 data sets, `loss/<name>`; metrics.jsonl contains all of
    them."""
    names = [key for key in values if key.startswith("loss/")]
    found = [(key.removeprefix("loss/"), values[key]) for key in names[:MOST_DATASETS]]
    shown = [f"{name}: -" if loss is None else f"{name}: {loss:.5f}" for name, loss in found]
    return [
        *shown,
        *([f"{len(names) - MOST_DATASETS:,} more data sets"] if len(names) > MOST_DATASETS else []),
    ]


def _no_loss(values: Record) -> list[str]:
    """Return "loss -" if there is no loss: every update was dropped, or no label counted."""
    return ["loss -"] * (values.get("loss") is None)


def _shown(keys: Iterable[str], values: Record) -> list[str]:
    """Return values as shown on the console; absent ones are skipped."""
    shows = ((FIELDS[key][1], values.get(key)) for key in keys)
    return [_text(show, value) for show, value in shows if show is not None and value is not None]


def _head(values: Record) -> str:
    iteration, total = values["iteration"], values["train_iters"]
    return (
        f"iteration {iteration:{len(str(total))}d}/{total}" if total else f"iteration {iteration}"
    )
