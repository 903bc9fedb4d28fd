"""The operations that the host of a GPU launches for a block, counted on CPU with Triton's
interpreter."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.kernels.choice import Kernels
from megatron_lite.kernels.triton_support import is_interpreted
from megatron_lite.model import block
from megatron_lite.model.gpt import model_layers
from tests.support.harness import tiny_config
from tests.support.memory_meters import a_model, micro_batches

# Operations that launch nothing on a GPU.
FREE = set(
    "view _unsafe_view transpose t split split_with_sizes expand slice detach select unsqueeze squeeze unbind alias "
    "as_strided permute empty empty_like new_empty empty_strided new_empty_strided".split()
)


class Launches(TorchDispatchMode):
    """The names of torch's operations and of Triton's kernels, without what the interpreter does
    inside a kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        from triton.runtime.interpreter import GridExecutor

        self.names: list[str] = []
        self._inside = False
        original = GridExecutor.__call__

        def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
            self.names.append(executor.fn.__name__)
            self._inside = True
            try:
                return original(executor, *args, **kwargs)
            finally:
                self._inside = False

        monkeypatch.setattr(GridExecutor, "__call__", call)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if not self._inside and name not in FREE:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


class NoAttention(torch.autograd.Function):
    """Stands in for a library's attention, which launches about four kernels."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.shapes = [heads.shape for heads in (query, key, value)]
        b, n, s, d = query.shape
        return query.new_empty(b, s, n, d).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(grads[0].new_empty(shape) for shape in ctx.shapes)


LLAMA = dict(
    gated=True, activation_type="silu", normalization_type="rms_norm", use_rotary_embeddings=True
) | dict(head_groups=2, add_linear_biases=False)


@pytest.mark.skipif(not is_interpreted(), reason="needs Triton's interpreter")
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({}, {"addmm": 4, "mm": 8, "sum": 4, "add": 1, "cat": 1, "kernels": 10}),
        pytest.param(LLAMA, {"mm": 12, "add": 1, "kernels": 10}, marks=pytest.mark.slow),
    ],
    ids=["GPT-2", "Llama"],
)
def test_launches_of_a_block(
    monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], expected: dict[str, int]
) -> None:
    """Forward and backward: 28 and 23, as docs/performance.md says. Only tiny models have padding
    to clear, and only on a CPU does a stage's backward pass begin with a one."""
    monkeypatch.setattr(
        block, "attention", lambda query, key, value, *_, **__: NoAttention.apply(query, key, value)
    )
    counts = []
    for num_layers in (1, 2):
        config = tiny_config(1, num_layers=num_layers, batch_size=1, **model)
        engine = a_model(config, model_layers(config, Kernels(triton=True, cross_entropy="triton")))
        with monkeypatch.context() as patch, Launches(patch) as launches:
            engine.forward_backward(micro_batches(config))
        counts.append(Counter("kernels" if "_kernel" in name else name for name in launches.names))
    found = counts[1] - counts[0]
    assert {
        name: count for name, count in found.items() if name not in ("_foreach_zero_", "ones_like")
    } == expected
