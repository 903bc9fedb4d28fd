"""Time steps of a mixture of experts beside transformers' implementations of the same model, and
beside a dense model that computes as much for each token.

    python -m scripts.benchmarks.experts [--turns=N] [--threads=N] [--output=FILE] [sizes]

The rows train the same Qwen3-MoE from the same weights on the same tokens, in turns of one step,
each in a process of its own, where ours keeps freed memory as the launcher has it; the largest
difference of their losses is printed. "compiled" is the grouped implementation in torch.compile,
which would compile the eager one anew for each expert's number of rows. Seconds are those of the
processor, which other programs lengthen less. "dense" has MLPs as wide as a token's experts
together. Peak memory is what all steps, and compiling, need above the imported libraries.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.config import Config, unflatten
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.distributed.startup import join
from megatron_lite.huggingface.config_file import hugging_face_config
from megatron_lite.run.host import keep_freed_memory
from megatron_lite.seeds import derive_seed
from megatron_lite.validation import resolve
from scripts.benchmarks.commands import argument_parser
from scripts.benchmarks.pipeline import (
    Turns,
    describe,
    number,
    over,
    publish,
    spread,
    table,
)
from scripts.benchmarks.training.engine import Engine
from scripts.benchmarks.training.measure import Contestant
from scripts.benchmarks.training.model import initial_value, parameter_specs
from scripts.benchmarks.training.peers import Peer

SIZES = {
    "num_layers": 4,
    "hidden_size": 384,
    "num_experts": 16,
    "num_experts_per_token": 4,
    "moe_ffn_hidden_size": 192,
    "vocab_size": 8192,
    "sequence_length": 512,
    "batch_size": 4,
}
FIXED: dict[str, Any] = {
    "num_attention_heads": 6,
    "head_groups": 2,
    "kv_channels": 64,
    "use_rotary_embeddings": True,
    "gated": True,
    "activation_type": "silu",
    "normalization_type": "rms_norm",
    "add_linear_biases": False,
    "tie_word_embeddings": False,
    "qk_layernorm": True,
    "expert_auxiliary_loss_coefficient": 0.0,
    "moe_router_choice_bias": False,
    "export_model_type": "qwen3_moe",
    "dataset_source": "random",
    "lr": 2e-5,
    "clip_grad": 1e6,
    "device": "cpu",
    "train_iters": 1000,
}
WARM_UP = 2  # turns that do not count
OURS, DENSE = "ours", "dense"
THEIRS = {"eager": "eager", "grouped": "grouped_mm", "compiled": "grouped_mm"}


class Theirs(nn.Module):
    """transformers' model with the engine's initial weights; see `peers.HuggingFace`."""

    def __init__(self, config: Config, implementation: str) -> None:
        super().__init__()
        transformers = importlib.import_module("transformers")
        values = hugging_face_config(config, {}) | {"dtype": "float32", "use_cache": False}
        described = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        self.model = transformers.AutoModelForCausalLM.from_config(
            described, attn_implementation="sdpa", experts_implementation=implementation
        ).train()
        with torch.no_grad():
            for name, spec in parameter_specs(config).items():
                for their_name, value in _their_parts(
                    name, initial_value(spec, config, torch.device("cpu")), config
                ):
                    self.model.get_parameter(their_name).copy_(value)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.model(
            input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False
        ).loss


def _their_parts(name: str, value: Tensor, config: Config) -> list[tuple[str, Tensor]]:
    """Return transformers' names, in memory, and values of one of our parameters."""
    model = config.model
    ends = {
        "embedding.word.weight": "model.embed_tokens.weight",
        "head.norm.weight": "model.norm.weight",
    }
    ends["head.output.weight"] = "lm_head.weight"
    if name in ends:
        return [(ends[name], value)]
    _, index, *words = name.split(".")
    block, own = f"model.layers.{index}.", ".".join(words).removesuffix(".weight")
    if own == "attention.query_key_value":
        heads = model.num_attention_heads, model.head_groups, model.head_groups
        parts = value.split([count * model.kv_channels for count in heads])
        return [
            (f"{block}self_attn.{kind}_proj.weight", part)
            for kind, part in zip("qkv", parts, strict=True)
        ]
    if own.startswith("mlp.experts."):
        name = {"up": "gate_up_proj", "down": "down_proj"}[words[2]]
        return [(f"{block}mlp.experts.{name}", value.unflatten(0, (model.num_experts, -1)))]
    names = {
        "attention.output": "self_attn.o_proj",
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
        "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp.router": "mlp.gate",
    }
    return [(f"{block}{names[own]}.weight", value)]


def build(name: str, config: Config, distributed: Distributed) -> Contestant:
    """Return a row of a name in THEIRS, OURS or DENSE."""
    if name in (OURS, DENSE):
        return Engine(config, distributed)
    model = Theirs(config, THEIRS[name])
    if name == "compiled":
        model.forward = torch.compile(model.forward)  # type: ignore[method-assign]
    return Peer(config, distributed, model)


def config_of(name: str, options: argparse.Namespace) -> Config:
    """Return the resolved options of a row."""
    sizes = {size: getattr(options, size) for size in SIZES}
    sizes["ffn_hidden_size"] = sizes["num_experts_per_token"] * sizes["moe_ffn_hidden_size"]
    values = {**FIXED, **sizes, "micro_batch_size": options.batch_size}
    if name == DENSE:
        idle = [key for key in values if "expert" in key or key.startswith("moe")]
        values = {key: value for key, value in values.items() if key not in idle}
        values["export_model_type"] = "qwen3"
    return resolve(unflatten(values), 1)


def tokens_of(options: argparse.Namespace, step: int) -> list[Tensor]:
    """Return the micro-batch of a step, (b, s + 1)."""
    generator = torch.Generator().manual_seed(derive_seed(0, "benchmark", step))
    shape = options.batch_size, options.sequence_length + 1
    return [torch.randint(0, options.vocab_size, shape, generator=generator)]


class Row:
    """A row in a process of its own, which takes a step whenever it is told its number."""

    def __init__(self, name: str, argv: Sequence[str]) -> None:
        words = [sys.executable, "-m", "scripts.benchmarks.experts", *argv, f"--row={name}"]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def step(self, number: int) -> dict[str, Any]:
        """Return the figures of `serve`."""
        assert self._process.stdin and self._process.stdout
        print(number, file=self._process.stdin, flush=True)
        figures: dict[str, Any] = json.loads(self._process.stdout.readline())
        return figures


def serve(name: str, options: argparse.Namespace) -> None:
    """Take the steps of a row whose numbers are read; print seconds, loss and peak memory of each
    in a line."""
    torch.set_num_threads(options.threads)
    if name in (OURS, DENSE):
        keep_freed_memory()
    importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    before, config = _peak_mib(), config_of(name, options)
    row = build(name, config, join(config.distributed, 0, 1, 0))
    for line in sys.stdin:
        tokens = tokens_of(options, int(line))
        start_s, cpu_s = time.perf_counter(), time.process_time()
        loss = float(row.step(tokens))
        row.finish()
        figures = {"step_s": time.perf_counter() - start_s, "cpu_s": time.process_time() - cpu_s}
        print(json.dumps({**figures, "loss": loss, "peak_mib": _peak_mib() - before}), flush=True)


def _peak_mib() -> float:
    """Return the most memory that this process has had."""
    status = Path("/proc/self/status").read_text("ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write a result."""
    parser = argument_parser(__doc__)
    for size, value in SIZES.items():
        parser.add_argument(f"--{size}", type=int, default=value)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compiled", type=int, default=1, help="0: without the compiled row")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--row", help="only take the steps of this row that are asked for")
    options = parser.parse_args(argv)
    if options.row:
        serve(options.row, options)
        return 0
    names = [OURS, DENSE, *(name for name in THEIRS if options.compiled or name != "compiled")]
    rows = {name: Row(name, argv) for name in names}
    measure: Callable[[str, int], dict[str, Any]] = lambda name, turn: rows[name].step(turn)  # noqa: E731
    turns = Turns(
        names, measure, options.turns, main="cpu_s", warm_up=WARM_UP, expected=(Exception,)
    )
    for _ in turns.run():
        pass
    result = describe("python -m scripts.benchmarks.experts", argv, vars(options))
    others: Callable[[str], list[str]] = lambda name: [OURS] if name != OURS else names[1:]  # noqa: E731
    result["rows"] = turns.rows("cpu_s", "step_s", others=others)
    result["failures"] = turns.failures
    sound = turns.sound()
    for name in sound:
        result["rows"][name]["peak_mib"] = turns.values(name, "peak_mib")[-1]
    losses = [turns.values(name, "loss")[WARM_UP:] for name in sound if name != DENSE]
    result["largest_difference"] = max(max(step) - min(step) for step in zip(*losses, strict=True))
    columns = [
        spread("ms of CPU a step", "cpu_s", 0, 1e3),
        over("over ours", OURS),
        number("peak, MiB", "peak_mib", ".0f"),
    ]
    about = ", ".join(f"{name} {getattr(options, name)}" for name in SIZES)
    note = f"Losses differ by at most {result['largest_difference']:.1e}."
    publish(
        result,
        options.output,
        f"{about}; {options.threads} threads; ",
        table(result["rows"], columns),
        note=note,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
