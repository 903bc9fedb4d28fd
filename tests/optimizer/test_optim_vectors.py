"""Levanter's AdamW, as its own code computed it: flags -> schedule, gradients -> parameters through
sharded optimizers.

The vectors are in fp64, and their file asks for 1e-6 of each parameter. Our weights and moments are
in fp32, which loses up to 3e-7 of a parameter in fourteen updates.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.cli.parse import parse
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.model.parameter_patterns import set_weight_decay
from megatron_lite.optimizer.optimizer import Optimizer
from megatron_lite.parameter import Initializer, ParameterSpec, declare
from megatron_lite.schedules.learning_rate import learning_rate
from megatron_lite.validation import resolve
from megatron_lite.zero.multi_stage import MultiStage
from tests.support.harness import run_distributed

VECTORS = json.loads(
    (Path(__file__).parent.parent / "vectors" / "levanter_optim_vectors.json").read_text("utf-8")
)
ABOUT, CASES = VECTORS["about"], VECTORS["cases"]
TOLERANCE = 1e-6  # relative, as the file says
TOKENS = 8

# Levanter's argument -> flag.
FLAGS = {
    "learning_rate": "lr",
    "warmup": "lr_warmup",
    "lr_schedule": "lr_decay_style",
    "min_lr_ratio": "min_lr_ratio",
    "weight_decay": "weight_decay",
    "max_grad_norm": "clip_grad",
    "nesterov": "adam_nesterov",
    "adamc_weight_decay": "adamc_weight_decay",
    "update_rms_clipping": "update_rms_clip",
}
CONVENTIONS = (
    "--lr_step_offset=0",
    "--clip_grad_style=levanter",
    "--adam_beta2=0.95",
    "--adam_eps=1e-8",
)


def flags(args: dict[str, Any]) -> list[str]:
    """The command line for keyword arguments of Levanter's AdamConfig."""
    args = ABOUT["base_args"] | args
    words = [f"--train_iters={ABOUT['num_train_steps']}", "--dataset_source=random", *CONVENTIONS]
    assert args.pop("default_weight_decay_mask") is False, "everything decays"
    words.append("--weight_decay_default_mask=off")
    skipping = args.pop("skip_bad_steps", None)
    if skipping is not None:
        words.append("--skip_bad_steps=1")
        words.append(f"--skip_bad_steps_window={skipping['rolling_interval_length']}")
        words.append(f"--skip_bad_steps_sigma={skipping['sigma_factor']}")
    return words + [f"--{FLAGS[name]}={str(value).lower()}" for name, value in args.items()]


class Holder(torch.nn.Module):
    """A layer, as `zero` knows layers, that does nothing with its parameters."""

    borrows_from: tuple[torch.nn.Module, ...] = ()
    gradients_in_forward = recomputed = False
    backward_needs_weights = True

    def __init__(self, name: str, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.name = name
        for parameter, shape in shapes.items():
            spec = ParameterSpec(
                f"{name}.{parameter}", shape, Initializer("constant", 0.0), weight_decay=False
            )
            self.register_parameter(parameter, declare(spec))


class Run:
    """The parameters of the vectors and a sharded optimizer, made from flags."""

    def __init__(self, distributed: Distributed, words: list[str]) -> None:
        self.ranks = distributed
        self.config = resolve(parse(words).config, distributed.world_size)
        # The last layer is there because a chain has two ends: its gradient is zero, and so it
        # stays.
        layers = [Holder("first", {"w": (2, 3), "b": (2,)}), Holder("last", {"zero": (1,)})]
        options = self.config.optimizer
        declared = [parameter for layer in layers for parameter in layer.parameters()]
        set_weight_decay(declared, options.weight_decay_default_mask, options.weight_decay_modules)  # type: ignore[arg-type]
        self.model = MultiStage(
            layers, self.config.multi_stage, self.config.batch, "fp32", distributed
        )
        self.model.initialize(0)
        self.part = self.model.stages[0].trainable[0]
        assert self.part is not None
        self.place(self.part.read("weights"), ABOUT["params0"])
        self.optimizer = Optimizer(self.config, self.model.all_stages, distributed)

    def place(self, shard: Tensor, values: dict[str, Any]) -> None:
        """Write this rank's slices of whole parameters."""
        assert self.part is not None
        low = self.ranks.rank * self.part.layout.shard_numel
        for slot, start, end in self.part.layout.pieces(self.ranks.rank):
            whole = torch.tensor(
                values[slot.spec.name.rpartition(".")[2]], dtype=torch.float64
            ).flatten()
            shard[slot.offset + start - low : slot.offset + end - low] = whole[start:end]

    def step(self, index: int) -> dict[str, Any]:
        """One update, counted from 0; what the vectors have of it."""
        assert self.part is not None
        self.place(self.part.grad_shard, ABOUT["grads"][index])
        rate = learning_rate(self.config, index + 1)
        loss = torch.tensor(ABOUT["loss"][index] * TOKENS / self.ranks.world_size)
        update = self.optimizer.step(index + 1, rate, loss, TOKENS, self.model.updated)
        values = {
            name.rpartition(".")[2]: weight.tolist() for name, weight in self.model.full_weights()
        }
        return {"lr": rate, "skipped": bool(update.verdict.skipped), **values}


def all_cases(distributed: Distributed, zero_stage: int) -> dict[str, list[dict[str, Any]]]:
    """Every step of every case."""
    results = {}
    for name, case in CASES.items():
        run = Run(
            distributed,
            [*flags(case["args"]), f"--zero_stage={zero_stage}", f"--batch_size={TOKENS}"],
        )
        results[name] = [run.step(index) for index in range(ABOUT["num_train_steps"])]
        run.model.finish()
    return results


LAYOUTS = [
    (1, 1),
    *(pytest.param(layout, marks=pytest.mark.slow) for layout in ((1, 3), (2, 1))),
    (2, 3),
]


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def results(request: pytest.FixtureRequest) -> list[dict[str, list[dict[str, Any]]]]:
    """Return each rank's result with this many ranks at this ZeRO stage."""
    world_size, zero_stage = request.param
    return run_distributed(world_size, all_cases, zero_stage)


@pytest.mark.parametrize("name", CASES)
def test_parameters_of_levanter(results: list[dict[str, list[dict[str, Any]]]], name: str) -> None:
    """After every update, on every rank, with the learning rates and dropped updates of the
    file."""
    for steps in (result[name] for result in results):
        assert [index for index, step in enumerate(steps) if step["skipped"]] == CASES[name][
            "skipped"
        ]
        for step, expected in zip(steps, CASES[name]["steps"], strict=True):
            assert step["lr"] == pytest.approx(expected["lr"], rel=1e-6)
            assert step["zero"] == [0.0]
            for parameter in ("w", "b"):
                ours, theirs = (
                    torch.tensor(values[parameter], dtype=torch.float64)
                    for values in (step, expected)
                )
                worst = float(((ours - theirs).abs() / theirs.abs()).max())
                assert worst <= TOLERANCE, (expected["step"], parameter, worst)
