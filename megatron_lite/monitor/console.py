"""The console's lines of numbers: loss, learning rate and speed first, in about 120 columns.

The log file has the long line of `metrics.format_record` instead, and metrics.jsonl the unrounded numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron_lite.run.progress_line import format_duration


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if 100 <= value < 1e6 else f"{value:#.3g}"


Field = tuple[str, Callable[[Any], str]]  # the key of a value, and how to show the value
MOST_DATASETS = 20  # whose losses are shown
LOSSES: tuple[Field, ...] = (("loss", "loss {:.4f}".format), ("averaged_loss", "averaged weights {:.4f}".format))
PROGRESS: tuple[Field, ...] = (
    ("learning_rate", "lr {:.2e}".format),
    ("grad_norm", lambda norm: f"grad norm {_three_digits(norm)}"),
)
STEP_TIME: Field = ("step_time_ms", lambda ms: f"{_three_digits(ms)} ms/step")
SPEED: dict[str, tuple[Field, ...]] = {  # by type of device
    "cpu": (("tokens_per_sec", "{:,.0f} tokens/s".format),),
    "cuda": (("tokens_per_sec_per_gpu", "{:,.0f} tokens/s/gpu".format), ("mfu", "mfu {:.0%}".format)),
}
TIME_LEFT: Field = ("remaining_seconds", lambda seconds: f"{format_duration(seconds)} left")
BAR: tuple[Field, ...] = (LOSSES[0], *SPEED["cpu"], SPEED["cuda"][1], TIME_LEFT)  # all ranks' tokens, as the time left
WAITING = 0.1  # of the step time, from which on waiting for data is shown
# Shown only where they differ from the last line.
RARELY_CHANGING: tuple[Field, ...] = (
    ("batch_size", "batch size {}".format),
    ("loss_scale", "loss scale {:g}".format),
    ("max_reserved_mib", "memory {:,.0f} MiB".format),
    ("skipped_iters", "skipped iterations {}".format),
    ("nan_iters", "nan iterations {}".format),
)


class ConsoleLines:
    """The lines of one start; values that rarely change are shown only when they have changed.

    Args:
        device_type: cpu or cuda, which decides the unit of the speed.
    """

    def __init__(self, device_type: str) -> None:
        self._fields = (LOSSES[0], *PROGRESS, STEP_TIME, *SPEED[device_type])
        self._last: dict[str, Any] = {"max_reserved_mib": 0.0, "skipped_iters": 0, "nan_iters": 0}
        self._last_loss: float | None = None
        self._forecasts = False  # not in the first line: compilation and allocation would spoil it

    def training(self, values: Mapping[str, Any]) -> str:
        """Return the line of a training record and its values for the console; absent values are left out.

        `iteration 20/1000 | loss 3.1235 | lr 3.00e-04 | grad norm 1.25 | 12.3 ms/step | 12,346 tokens/s | 0:01:05 left`
        """
        fields = list(self._fields)
        if values.get("loss") is not None:
            self._last_loss = values["loss"]
        if self._forecasts and values["iteration"] < values["train_iters"]:
            fields.append(TIME_LEFT)
        self._forecasts = True
        if values.get("data_wait_ms", 0.0) > WAITING * values.get("step_time_ms", 0.0):
            fields.append(("data_wait_ms", "data wait {:.3g} ms".format))
        for key, show in RARELY_CHANGING:
            if (value := values.get(key)) is not None and value != self._last.setdefault(key, value):
                self._last[key] = value
                fields.append((key, show))
        no_loss = ["loss -"] * (values.get("loss") is None)  # every update since the last line was dropped
        return " | ".join([_head(values), *no_loss, *_shown(fields, values)])

    def bar(self, pace: Mapping[str, float]) -> str:
        """Return the words of the progress bar: `loss 3.1235, 12,346 tokens/s, mfu 41%, 0:01:05 left`.

        The loss is that of the last training line.
        """
        return ", ".join(_shown(BAR, {"loss": self._last_loss, **pace}))

    def evaluation(self, values: Mapping[str, Any]) -> str:
        """Return the line of a validation or test: `validation @ iteration 20/1000 | loss 3.1235`."""
        return " | ".join([f"{values['phase']} @ {_head(values)}", *_shown(LOSSES, values), *dataset_losses(values)])


def dataset_losses(values: Mapping[str, Any]) -> list[str]:
    """Show the losses of single data sets, `loss/<name>`; those beyond 20 are only in metrics.jsonl."""
    names = [key for key in values if key.startswith("loss/")]
    shown = [f"{key.removeprefix('loss/')}: {values[key]:.5f}" for key in names[:MOST_DATASETS]]
    return [*shown, *([f"{len(names) - MOST_DATASETS:,} more data sets"] if len(names) > MOST_DATASETS else [])]


def _shown(fields: Iterable[Field], values: Mapping[str, Any]) -> list[str]:
    return [show(value) for key, show in fields if (value := values.get(key)) is not None]


def _head(values: Mapping[str, Any]) -> str:
    total = str(values["train_iters"])
    return f"iteration {values['iteration']:{len(total)}d}/{total}"
