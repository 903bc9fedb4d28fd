"""Run a program written for GPUs on CPUs, with unchanged source; needs none of our packages.

    torchrun --nproc-per-node=2 on_cpu.py [--onednn] path/to/train.py ARGUMENTS

Before the program starts, only what cannot run without a GPU is replaced: CUDA devices become the
CPU, also those of autocast, DistributedDataParallel gets no device_ids, and packages that the
program imports but does not use on a CPU (flash_attn), or uses only to read a local file
(datasets), get a stand-in if they are not installed. During a step only the batch's .to(device) is
intercepted. Computation, optimizer, communication and log are the program's own.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import json
import os
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.parallel

# name -> what the program imports from it
FLASH_ATTENTION = {
    "flash_attn.flash_attn_interface": "flash_attn_func",
    "flash_attn.layers.rotary": "apply_rotary_emb",
    "flash_attn.ops.triton.layer_norm": "layer_norm_fn",
}


def main(program: str, arguments: list[str]) -> None:
    """Install the stand-ins and run the program as `__main__`."""
    _cuda_is_cpu()
    if importlib.util.find_spec("flash_attn") is None:
        for name, function in FLASH_ATTENTION.items():
            _module(name, **{function: _unavailable})
    if importlib.util.find_spec("datasets") is None:
        _module("datasets", Features=dict, Sequence=dict, Value=dict, load_dataset=Rows.load)
    _transformers_4()
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(Path(program).resolve().parent))
    runpy.run_path(program, run_name="__main__")


def _cuda_is_cpu() -> None:
    def is_cuda(device: Any) -> bool:
        return isinstance(device, str | torch.device) and str(device).startswith("cuda")

    def moving(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def on_cpu(*arguments: Any, **options: Any) -> Any:
            if is_cuda(options.get("device")):
                options["device"] = "cpu"
            return function(
                *("cpu" if is_cuda(argument) else argument for argument in arguments), **options
            )

        return on_cpu

    autocast = torch.amp.autocast
    torch.amp.autocast = lambda device_type, **options: autocast("cpu", **options)  # type: ignore[assignment, misc]
    for owner, name in ((torch.Tensor, "to"), (torch.nn.Module, "to"), (torch, "tensor")):
        setattr(owner, name, moving(getattr(owner, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    torch.cuda.set_device = lambda *_: None
    wrap = torch.nn.parallel.DistributedDataParallel.__init__

    @functools.wraps(wrap)
    def without_device(self: Any, module: Any, device_ids: Any = None, **options: Any) -> None:
        wrap(self, module, **options)

    torch.nn.parallel.DistributedDataParallel.__init__ = without_device  # type: ignore[method-assign, assignment]


def _module(name: str, **members: Any) -> None:
    """Register a module and its parent packages."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        module = types.ModuleType(path)
        module.__spec__ = importlib.machinery.ModuleSpec(path, None)  # for importlib.util.find_spec
        sys.modules.setdefault(path, module)
    vars(sys.modules[name]).update(members)


def _unavailable(*_: Any, **__: Any) -> None:
    raise RuntimeError("a stand-in for a GPU function was called on a CPU")


def _transformers_4() -> None:
    """Give transformers 5 two names of transformers 4: batch_encode_plus of tokenizers, and
    rope_theta of Llama."""
    if importlib.util.find_spec("transformers") is not None:
        from transformers import LlamaConfig, PreTrainedTokenizerBase

        if not hasattr(PreTrainedTokenizerBase, "batch_encode_plus"):
            PreTrainedTokenizerBase.batch_encode_plus = PreTrainedTokenizerBase.__call__
            LlamaConfig.rope_theta = 10000.0


class Rows(list[dict[str, Any]]):
    """A data set from a local folder, with the few methods of `datasets` that picotron uses."""

    column_names = ("text",)

    @classmethod
    def load(cls, folder: str, **_: Any) -> Rows:
        """Read the lines of train.jsonl."""
        lines = Path(folder, "train.jsonl").read_text("utf-8").splitlines()
        return cls(json.loads(line) for line in lines)

    def select(self, indices: Any) -> Rows:
        """Return some rows."""
        return Rows(self[index] for index in indices)

    def map(
        self, function: Callable[[list[str]], dict[str, Any]], input_columns: str, **_: Any
    ) -> Rows:
        """Return the rows that `function` makes from all texts."""
        made = function([row[input_columns] for row in self])
        return Rows(
            dict(zip(made, values, strict=True)) for values in zip(*made.values(), strict=True)
        )


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if sys.argv[1] == "--onednn":  # sends all products of fp32 factors through oneDNN
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
        del sys.argv[1]
    main(sys.argv[1], sys.argv[2:])
