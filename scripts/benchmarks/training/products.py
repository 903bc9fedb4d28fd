"""Only the matrix products of a step: a lower bound of the step time on this machine."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lite.config import Config
from scripts.benchmarks.training.measure import Contestant
from scripts.benchmarks.training.model import parameter_specs


class Products(Contestant):
    """Output, input gradient and weight gradient of every linear layer and of the head, by torch.mm.

    Each layer has its own weights and gradients, which come from memory as in a step. Attention's own products are not
    included. Nothing is trained, so there is no loss.
    """

    def __init__(self, config: Config, dtype: torch.dtype, device: torch.device) -> None:
        tied, generator = config.model.tie_word_embeddings, torch.Generator(device).manual_seed(0)

        def matrix(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        self._weights = [
            matrix(*spec.shape)
            for name, spec in parameter_specs(config).items()
            if len(spec.shape) == 2
            and (not name.startswith("embedding.") or (tied and name == "embedding.word.weight"))
        ]
        self._gradients = [torch.empty_like(weight) for weight in self._weights]
        self._wide = functools.cache(matrix)  # inputs and output gradients (tokens, width), drawn at the first call

    def step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """Compute all products once per micro-batch; return 0."""
        for micro_batch in micro_batches:
            tokens = micro_batch.shape[0] * (micro_batch.shape[1] - 1)
            for weight, gradient in zip(self._weights, self._gradients, strict=True):
                outputs, inputs = (self._wide(tokens, width) for width in weight.shape)
                inputs @ weight.t()
                outputs @ weight
                torch.mm(outputs.t(), inputs, out=gradient)
        return torch.zeros(())
