"""Numbers about a run: FLOPs, peak rates, mean losses. Units end a name."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config import ModelConfig, PerformanceConfig

# Dense bf16 tensor-core peaks (fp16 for V100 and T4) in TFLOP/s, from the vendor's data sheets; the first match wins.
# PCIe and NVL boards run at lower clocks than SXM modules of the same name.
PEAK_TFLOPS = """
    GB200: 2500, B200: 2250, GH200: 989.4, H(100|200) NVL: 835.5, H(100|200) PCIe: 756, H(100|200|800): 989.4, H20: 148,
    A(100|800): 312, A30: 165, A40: 149.7, A10: 125, L40S: 362, L40: 181, L4: 121, V100: 125, T4: 65,
    RTX 6000 Ada: 364.2, RTX A6000: 154.8, RTX 4090: 165.2, RTX 3090: 71
"""


def known_peak_tflops(device_name: str) -> float | None:
    """Return the dense bf16 peak in TFLOP/s by the driver's name of the device; None if the table lacks it."""
    name = device_name.replace("-", " ").replace("_", " ")
    for entry in PEAK_TFLOPS.split(","):
        pattern, tflops = entry.split(":")
        if re.search(rf"\b{pattern.strip()}\b", name, re.IGNORECASE):
            return float(tflops)
    return None


def _block_flops(model: ModelConfig, tokens: int) -> float:
    """Return the FLOPs of one pass through the blocks' matrix products: 2 per weight and token."""
    attention = 2 * (model.num_attention_heads + model.head_groups) * model.kv_channels
    mlp = (3 if model.gated else 2) * model.ffn_hidden_size
    return 2.0 * tokens * model.num_layers * model.hidden_size * (attention + mlp)


def _head_flops(model: ModelConfig, tokens: int) -> float:
    """Return the FLOPs of one pass through the output head."""
    return 2.0 * tokens * model.hidden_size * model.vocab_size


def _attention_flops(model: ModelConfig, sequence_length: int, tokens: int, full: bool = False) -> float:
    """Return the FLOPs of scores and context, one pass: what causal mask and window leave, or the full square."""
    # Under the causal mask a query sees s / 2 keys on average; with a window w, w * (1 - w / 2s).
    window = min(model.window_size or sequence_length, sequence_length)
    mean_keys = sequence_length if full else window * (1 - window / (2 * sequence_length))
    return 4.0 * tokens * model.num_layers * model.num_attention_heads * model.kv_channels * mean_keys


def model_flops(model: ModelConfig, sequence_length: int, tokens: int, full_attention: bool = False) -> float:
    """Return the FLOPs of training on `tokens` tokens: forward and backward (twice the forward), without recomputation.

        6 * T * L * h * [2 * (heads + head_groups) * d + (2 + gated) * f]      linear layers
      + 6 * T * h * v                                                         output head
      + 6 * T * L * heads * d * s                                             attention, causal: half the square

    with 2 * w * (1 - w / 2s) instead of s for a window of w tokens. Embedding look-ups, norms, activations, the
    optimizer and vocabulary padding are not counted; document borders and frozen parameters are not subtracted.
    `model` must be resolved. Equal to Fast-LLM's "tflop/s (model)".

    `full_attention` counts the full square of scores, 12 * T * L * heads * d * s for any mask, as PaLM (Chowdhery et
    al. 2022, appendix B) and nanoGPT do.
    """
    attention = _attention_flops(model, sequence_length, tokens, full_attention)
    return 3 * (_block_flops(model, tokens) + _head_flops(model, tokens) + attention)


def hardware_flops(model: ModelConfig, performance: PerformanceConfig, sequence_length: int, tokens: int) -> float:
    """Return `model_flops` plus recomputation:

    + 2 * T * h * (1 + gated) * f        for each block with mlp_recompute_level full: its first MLP product
    + the block's forward pass           for each of the first recompute_layers
    + 2 * T * h * v                      with a cross_entropy_block_size below v: the logits
    + T * heads * d * s                  for each block: the scores in attention's backward pass (1/6), all backends
    """
    attention = _attention_flops(model, sequence_length, tokens)
    flops = model_flops(model, sequence_length, tokens)
    repeated = performance.mlp_levels(model.num_layers).count("full")
    flops += 2.0 * tokens * repeated * model.hidden_size * (1 + model.gated) * model.ffn_hidden_size
    flops += (_block_flops(model, tokens) + attention) * performance.recompute_layers / model.num_layers
    if (performance.cross_entropy_block_size or model.vocab_size) < model.vocab_size:
        flops += _head_flops(model, tokens)
    return flops + attention / 2


class LogWindow:
    """Sums between two log lines, on the device: loss and tokens of the updates that were not dropped, data wait.

    Checkpoints save them, so that a resumed run logs the same losses.
    """

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=device)  # summed over tokens
        self._tokens = torch.zeros((), dtype=torch.int64, device=device)
        self._data_wait_s = 0.0
        self.iterations = 0  # of this window, in this start

    def add(self, loss: Tensor, tokens: int, skipped: Tensor, data_wait_s: float) -> None:
        """Count one update and its loss, summed over `tokens`; reads nothing on the host."""
        self._loss.add_(torch.where(skipped, torch.zeros_like(loss), loss))
        self._tokens.add_(tokens * ~skipped)
        self._data_wait_s += data_wait_s
        self.iterations += 1

    def mean_loss(self) -> float | None:
        """Return the mean loss per token so far (reads the device), or None if every update was dropped."""
        tokens = int(self._tokens)
        return float(self._loss) / tokens if tokens else None

    def close(self) -> dict[str, Any]:
        """Return the record of this window (reads the device) and start the next one."""
        record: dict[str, Any] = {"loss": self.mean_loss()}
        if self.iterations:
            record["data_wait_ms"] = 1e3 * self._data_wait_s / self.iterations
        self._loss.zero_()
        self._tokens.zero_()
        self._data_wait_s, self.iterations = 0.0, 0
        return record

    def state(self) -> dict[str, Any]:
        """Return the sums for a checkpoint (reads the device)."""
        return {"loss": float(self._loss).hex(), "tokens": int(self._tokens)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self._loss.fill_(float.fromhex(state["loss"]))
        self._tokens.fill_(state["tokens"])
