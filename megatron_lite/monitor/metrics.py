"""Compute numbers about a run: FLOPs, peak rates, mean losses, step times, rates, remaining time.
Names end in units."""

from __future__ import annotations

import contextlib
import re
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.config import Config, JsonObject, ModelConfig, PerformanceConfig
from megatron_lite.schedules.batch_size import batch_schedule

Clock = Callable[[], float]  # seconds, monotonic
Numbers = dict[str, float]  # by name
WARM_UP_STEPS = 1  # per start; these compile kernels and allocate memory
STEPS = 1000  # the newest steps, which determine the pace
STALL = 3.0  # times the median: longer steps waited for something not expected again
# Dense bf16 tensor-core peaks (fp16 for V100 and T4) in TFLOP/s, from the vendor's data sheets; the
# first match wins. PCIe and NVL boards run at lower clocks than SXM modules of the same name.
PEAK_TFLOPS = """
    GB200: 2500, B200: 2250, GH200: 989.4, H(100|200) NVL: 835.5, H(100|200) PCIe: 756, H(100|200|800): 989.4, H20: 148,
    A(100|800): 312, A30: 165, A40: 149.7, A10: 125, L40S: 362, L40: 181, L4: 121, V100: 125, T4: 65,
    RTX 6000 Ada: 364.2, (RTX )?A6000: 154.8, RTX ?5090: 209.5, RTX ?4090: 165.2, RTX ?3090: 71, MI300X: 1307.4
"""


def known_peak_tflops(device_name: str) -> float | None:
    """Return the dense bf16 peak in TFLOP/s by the driver's device name, or ours; None if the table
    lacks it."""
    name = device_name.replace("-", " ").replace("_", " ")
    for entry in PEAK_TFLOPS.split(","):
        pattern, tflops = entry.split(":")
        if re.search(rf"\b{pattern.strip()}\b", name, re.IGNORECASE):
            return float(tflops)
    return None


def _mlp_width(model: ModelConfig, block: int) -> int:
    """Return the channels that a token passes in a block's MLP, or in all its experts."""
    if not model.has_experts(block):
        return model.ffn_hidden_size
    return model.moe_ffn_hidden_size * (model.num_experts_per_token + model.num_shared_experts)


def _block_flops(model: ModelConfig, tokens: int, blocks: int | None = None) -> float:
    """Return the FLOPs of one pass through the blocks' matrix products: 2 per weight and token.
    blocks: of the first ones; None: of all."""
    attention = 2 * (model.num_attention_heads + model.head_groups) * model.kv_channels
    rows = 0
    for block in range(model.num_layers)[:blocks]:
        router = model.num_experts if model.has_experts(block) else 0
        rows += attention + (2 + model.gated) * _mlp_width(model, block) + router
    return 2.0 * tokens * model.hidden_size * rows


def _head_flops(model: ModelConfig, tokens: int) -> float:
    """Return the FLOPs of one pass through the output head."""
    return 2.0 * tokens * model.hidden_size * model.vocab_size


def _attention_flops(
    model: ModelConfig,
    sequence_length: int,
    tokens: int,
    full: bool = False,
    blocks: int | None = None,
) -> float:
    """Return the FLOPs of scores and context, one pass: under causal mask and windows, or the full
    square. blocks: of the first ones; None: of all."""
    seen = 0.0  # keys that a query sees on average, over the blocks
    for window in model.windows[:blocks]:
        # Under the causal mask s / 2 keys; with a window w, w * (1 - w / 2s).
        window = min(window or sequence_length, sequence_length)
        seen += sequence_length if full else window * (1 - window / (2 * sequence_length))
    return 4.0 * tokens * model.num_attention_heads * model.kv_channels * seen


def model_flops(
    model: ModelConfig, sequence_length: int, tokens: int, full_attention: bool = False
) -> float:
    """Return the FLOPs of training on `tokens` tokens: forward and backward (twice the forward),
    without recomputation.

        6 * T * L * h * [2 * (heads + head_groups) * d + (2 + gated) * f]      linear layers
      + 6 * T * h * v                                                         output head
      + 6 * T * L * heads * d * s                                             attention, causal: half the square

    with 2 * w * (1 - w / 2s) instead of s in a block with a window of w tokens. In a block with experts f is the
    width of those that a token passes, shared ones included, and the router adds 6 * T * h * experts.
    Embedding look-ups, norms, activations, the optimizer and vocabulary padding are not counted; document borders and frozen
    parameters are not subtracted. `model` must be resolved. Equal to Fast-LLM's "tflop/s (model)".

    `full_attention` counts the full square of scores, 12 * T * L * heads * d * s for any mask, as
    PaLM (Chowdhery et al. 2022, appendix B) and nanoGPT do.
    """
    attention = _attention_flops(model, sequence_length, tokens, full_attention)
    return 3 * (_block_flops(model, tokens) + _head_flops(model, tokens) + attention)


def hardware_flops(
    model: ModelConfig, performance: PerformanceConfig, sequence_length: int, tokens: int
) -> float:
    """Return `model_flops` plus recomputation:

    + 2 * T * h * (1 + gated) * f        for each block with mlp_recompute_level full: its first MLP product
    + the block's forward pass           for each of the first recompute_layers
    + 2 * T * h * v                      with a cross_entropy_block_size below v: the logits
    + T * heads * d * s                  for each block: the scores in attention's backward pass (1/6), all backends
    """
    attention = _attention_flops(model, sequence_length, tokens)
    flops = model_flops(model, sequence_length, tokens)
    levels = enumerate(performance.mlp_levels(model.num_layers))
    repeated = sum(_mlp_width(model, block) for block, level in levels if level == "full")
    flops += 2.0 * tokens * repeated * model.hidden_size * (1 + model.gated)
    recomputed = performance.recompute_layers
    flops += _block_flops(model, tokens, recomputed)
    flops += _attention_flops(model, sequence_length, tokens, blocks=recomputed)
    if (performance.cross_entropy_block_size or model.vocab_size) < model.vocab_size:
        flops += _head_flops(model, tokens)
    return flops + attention / 2


class LogWindow:
    """Sums between two log lines, on the device: loss and tokens of the updates not dropped, data
    wait.

    Checkpoints include them, so that a resumed run logs the same losses.
    """

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=device)  # summed over tokens
        self._tokens = torch.zeros((), dtype=torch.int64, device=device)
        self._data_wait_s = 0.0
        self.iterations = 0  # in this window and start

    def add(self, loss: Tensor, tokens: int, skipped: Tensor, data_wait_s: float) -> None:
        """Count one update and its loss, summed over `tokens`; reads nothing on the host."""
        self._loss.add_(torch.where(skipped, torch.zeros_like(loss), loss))
        self._tokens.add_(tokens * ~skipped)
        self._data_wait_s += data_wait_s
        self.iterations += 1

    def mean_loss(self) -> float | None:
        """Return the mean loss per token so far (reads the device), or None if every update was
        dropped."""
        tokens = int(self._tokens)
        return float(self._loss) / tokens if tokens else None

    def close(self) -> JsonObject:
        """Return the record of this window (reads the device) and start the next one."""
        record: JsonObject = {"loss": self.mean_loss()}
        if self.iterations:
            record["data_wait_ms"] = 1e3 * self._data_wait_s / self.iterations
        self._loss.zero_()
        self._tokens.zero_()
        self._data_wait_s, self.iterations = 0.0, 0
        return record

    def state(self) -> JsonObject:
        """Return the sums for a checkpoint (reads the device)."""
        return {"loss": float(self._loss).hex(), "tokens": int(self._tokens)}

    def load_state(self, state: JsonObject) -> None:
        """Restore what `state` returned."""
        self._loss.fill_(float.fromhex(state["loss"]))
        self._tokens.fill_(state["tokens"])


class Forecast:
    """The pace of this start's steps, and the remaining time if pauses stay as frequent.

    Args:
        consumed_samples: samples consumed after N iterations, which may have different batch sizes.
        iteration: iterations done before this start.
    """

    def __init__(
        self, consumed_samples: Callable[[int], int], train_iters: int, iteration: int
    ) -> None:
        self._consumed_samples, self._train_iters = consumed_samples, train_iters
        self._first = iteration
        self._warm_up = WARM_UP_STEPS
        self._sample_s: deque[float] = deque(maxlen=STEPS)  # seconds per sample of each step
        self._pauses: dict[
            str, tuple[float, int]
        ] = {}  # by kind: total seconds, and the iteration before the last

    def add(self, iteration: int, step_s: float, pauses_s: Mapping[str, float]) -> None:
        """Count a step, unless it is a start's first, and the pauses before it by kind (validation,
        save ...)."""
        samples = self._consumed_samples(iteration) - self._consumed_samples(iteration - 1)
        if self._warm_up:
            self._warm_up -= 1
            return
        self._sample_s.append(step_s / samples)
        for kind, seconds in pauses_s.items():
            self._pauses[kind] = (seconds + self._pauses.get(kind, (0.0, 0))[0], iteration - 1)

    def sample_s(self) -> float | None:
        """Return the seconds per sample, without stalls; None before the first counted step."""
        if not self._sample_s:
            return None
        longest_s = STALL * statistics.median(self._sample_s)
        return statistics.fmean(seconds for seconds in self._sample_s if seconds <= longest_s)

    def remaining_s(self, iteration: int) -> float | None:
        """Return the run's remaining seconds after `iteration`, pauses included; None if
        unknown."""
        if (sample_s := self.sample_s()) is None:
            return None
        samples = self._consumed_samples(self._train_iters) - self._consumed_samples(iteration)
        # Iterations up to the last pause of a kind span whole periods of that kind.
        pause_s = sum(seconds / (last - self._first) for seconds, last in self._pauses.values())
        return max(samples, 0) * sample_s + max(self._train_iters - iteration, 0) * pause_s


class Mark(NamedTuple):
    """A moment of training: seconds, without excluded time, and iterations done."""

    seconds: float
    iteration: int


class StepTimer:
    """Measures training time and rates, excluding validations and saves.

    Rates count the samples of the batch schedule, without padding.

    Args:
        config: resolved.
        iteration: iterations done before this start.
        peak_tflops: dense peak of one device in 16 bits, or None if unknown (then no mfu).
        eight_bit_flops: FLOPs per token on 8-bit units, whose peak is twice as high.
    """

    def __init__(
        self,
        config: Config,
        world_size: int,
        iteration: int,
        peak_tflops: float | None,
        eight_bit_flops: float = 0.0,
        clock: Clock = perf_counter,
    ) -> None:
        self._consumed_samples = batch_schedule(config.batch).consumed_samples
        length = config.batch.sequence_length
        # Per sample and device.
        self._tokens = length / world_size
        self._model_tflop = model_flops(config.model, length, length) / world_size / 1e12
        self._hardware_tflop = (
            hardware_flops(config.model, config.performance, length, length) / world_size / 1e12
        )
        # An 8-bit FLOP takes half of the time at the peak.
        self._tflop_at_peak = self._model_tflop - eight_bit_flops * self._tokens / 2 / 1e12
        self._peak_tflops, self._world_size = peak_tflops, world_size
        self._clock, self._excluded_s = clock, 0.0
        # Where the step, the lap, the glance and the time of the mean step began.
        self._step = self._lap = self._glance = self._run = self._mark(iteration)
        self._laps = 0
        self._pauses_s: Numbers = {}  # since the end of the last step, by kind
        self._lap_pauses_s: Numbers = {}
        self._forecast = Forecast(self._consumed_samples, config.training.train_iters, iteration)

    def _mark(self, iteration: int) -> Mark:
        return Mark(self._clock() - self._excluded_s, iteration)

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude the time inside the block from training time: validation, checkpoints,
        exports."""
        start_s = self._clock()
        try:
            yield
        finally:
            self._excluded_s += self._clock() - start_s

    @contextlib.contextmanager
    def pause(self, kind: str) -> Iterator[None]:
        """Count excluded time as a recurring pause."""
        start_s = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - start_s
            for pauses in (self._pauses_s, self._lap_pauses_s):
                pauses[kind] = pauses.get(kind, 0.0) + seconds

    def end_step(self, iteration: int) -> None:
        """Count one step for the forecast. On a GPU the step may still run; the previous one has
        ended."""
        end = self._mark(iteration)
        self._forecast.add(iteration, end.seconds - self._step.seconds, self._pauses_s)
        self._step, self._pauses_s = end, {}

    def pace(self, iteration: int) -> Numbers:
        """Return the progress bar's numbers at a step's usual pace; empty if unknown."""
        seconds = self._forecast.sample_s()
        return {**self._rates(1 / seconds), **self._remaining(iteration)} if seconds else {}

    def lap(self, iteration: int, now: datetime | None = None) -> tuple[Numbers, JsonObject]:
        """End the lap that began at the last call.

        The caller has waited for the device (by reading the loss).

        Returns:
            Part of the metrics record, and values for the log file only (`average_step_time_ms`,
                `remaining_seconds`, `completion_date`). Both are empty without an iteration since
                the last lap.
        """
        if iteration <= self._lap.iteration:
            return {}, {}
        end = self._mark(iteration)
        self._laps += 1
        # The first lap includes compilation and allocation and would distort the mean.
        if self._laps == 2:
            self._run = self._lap
        record = self._rates_between(self._lap, end)
        record |= {f"{kind}_s": paused for kind, paused in self._lap_pauses_s.items()}
        self._lap, self._lap_pauses_s = end, {}
        average_s = (end.seconds - self._run.seconds) / (iteration - self._run.iteration)
        more: JsonObject = {"average_step_time_ms": average_s * 1e3, **self._remaining(iteration)}
        # A completion date beyond the year 9999 is skipped.
        with contextlib.suppress(OverflowError, KeyError):
            more["completion_date"] = (now or datetime.now()) + timedelta(
                seconds=more["remaining_seconds"]
            )
        return record, more

    def glance(self, iteration: int) -> Numbers:
        """Return the console's numbers: rates since the last glance, and the remaining time. The
        lap continues."""
        before, self._glance = self._glance, self._mark(iteration)
        return {**self._rates_between(before, self._glance), **self._remaining(iteration)}

    def _rates_between(self, start: Mark, end: Mark) -> Numbers:
        seconds = max(end.seconds - start.seconds, 1e-9)
        samples = self._consumed_samples(end.iteration) - self._consumed_samples(start.iteration)
        step_ms = seconds / (end.iteration - start.iteration) * 1e3
        return {"step_time_ms": step_ms, **self._rates(samples / seconds)}

    def _rates(self, samples_per_second: float) -> Numbers:
        record = {
            "tokens_per_sec": self._tokens * self._world_size * samples_per_second,
            "tokens_per_sec_per_gpu": self._tokens * samples_per_second,
            "model_tflops": self._model_tflop * samples_per_second,
            "hardware_tflops": self._hardware_tflop * samples_per_second,
        }
        if self._peak_tflops:
            record["mfu"] = self._tflop_at_peak * samples_per_second / self._peak_tflops
        return record

    def _remaining(self, iteration: int) -> Numbers:
        seconds = self._forecast.remaining_s(iteration)
        return {} if seconds is None else {"remaining_seconds": seconds}
