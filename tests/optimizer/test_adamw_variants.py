"""Clipped updates, Nesterov momentum and AdamC on sharded parameters, against the formulas in fp64
on whole ones."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.parameter import ParameterSpec
from megatron_lite.validation import warnings
from tests.support.engine_runs import Engine, SimulatedRanks
from tests.support.harness import parameters_of, run_distributed, tiny_config
from tests.support.whole_parameters import Weights, fill_gradients, gradient, masters, together

Options = dict[str, Any]

RATE = 0.01
# Of each step, which gradient, and a factor on it: NaN where it is bad. The same one several times,
# larger each time, makes updates large.
GRADIENTS = (
    (0, 1.0),
    (1, 0.9),
    (2, 1.2),
    (3, np.nan),
    (4, 0.2),
    (5, 1.0),
    (5, 3.0),
    (5, 20.0),
    (6, 0.01),
    (5, 90.0),
)
SMALL: Options = {
    "sequence_length": 8,
    "batch_size": 6,
    "adam_beta2": 0.95,
    "weight_decay": 0.2,
    "lr": RATE,
}
RMS: Options = {"update_rms_clip": 0.6}
NORM: Options = {"clip_update_norm_sigma": 0.01, "clip_update_norm_window": 3, "clip_grad": 0.0}
CASES: list[Options] = [
    RMS,
    RMS
    | {
        "adam_nesterov": True,
        "lr_scales": ("embedding:0.1", "*.bias:2"),
        "clip_grad": 0.0,
        "num_layers": 3,
    },
    RMS
    | {"freeze": ("blocks.0", "*.mlp.down.*"), "adamc_weight_decay": True, "layers_per_stage": 2.0},
    NORM,
    NORM
    | {
        "adam_nesterov": True,
        "lr_scales": ("head:3",),
        "clip_grad": 0.5,
        "clip_grad_style": "levanter",
    },
    {"adam_nesterov": True},
    {"adamc_weight_decay": True, "default_lr_scale": 0.5, "adam_beta1": 0.0},
]


def rate_of(options: Options, step: int) -> float:
    return RATE * float(options.get("default_lr_scale", 1.0)) / (1 + step % 3)


def updated(distributed: Distributed, cases: list[Options]) -> list[Any]:
    """For each case: this rank's masters at first and after each step, what the parameters are,
    what the log has."""
    results = []
    for options in cases:
        engine = Engine(distributed, SMALL | options)
        before, after = masters(engine), []
        for step in range(len(GRADIENTS)):
            make_step(engine, options, step)
            after.append(masters(engine))
        engine.model.finish()
        specs = [
            parameter.spec
            for _, parameter in parameters_of(engine.model)
            if parameter.spec.trainable
        ]
        results.append((before, after, specs, engine.optimizer.record()))
    return results


def make_step(engine: Engine, options: Options, step: int) -> None:
    fill_gradients(engine, *GRADIENTS[step])
    rate = rate_of(options, step)
    engine.optimizer.step(step + 1, rate, torch.tensor(1.0), engine.tokens, engine.model.updated)
    engine.model.gather_ahead()


class Exact:
    """The same steps in fp64, one parameter after the other. `clipped`: in how many something
    was."""

    def __init__(self, options: Options, before: Weights, specs: list[ParameterSpec]) -> None:
        self.options = options
        self.config = tiny_config(1, **SMALL, **options).optimizer
        self.specs = specs
        self.weights = {spec.name: before[spec.name].astype(np.float64) for spec in specs}
        self.m, self.v = ({spec.name: np.zeros(spec.numel) for spec in specs} for _ in range(2))
        self.t = 0
        self.clipped = 0
        self.norm = 0.0
        self.norms: list[float] = []

    def step(self, step: int) -> None:
        config, rate, (seed, scale) = self.config, rate_of(self.options, step), GRADIENTS[step]
        if np.isnan(scale):
            return
        self.t += 1
        gradients = {
            spec.name: (gradient(spec, seed) * scale).double().numpy() for spec in self.specs
        }
        norm = np.sqrt(sum(np.square(g).sum() for g in gradients.values()))
        if config.clip_grad:
            factor = min(
                1.0, config.clip_grad / (norm + 1e-6 * (config.clip_grad_style == "torch"))
            )
            gradients = {name: factor * g for name, g in gradients.items()}
        updates = {spec.name: self.update(spec, gradients[spec.name], rate) for spec in self.specs}
        self.norm = float(np.sqrt(sum(np.square(u).sum() for u in updates.values())))
        if config.update_rms_clip is not None:
            too_large = {
                name: np.sqrt(np.square(u).mean()) / config.update_rms_clip
                for name, u in updates.items()
            }
            self.clipped += any(excess > 1.0 for excess in too_large.values())
            updates = {name: u / max(1.0, too_large[name]) for name, u in updates.items()}
        if config.clip_update_norm_sigma is not None:
            factor = self.norm_factor(self.norm)
            updates = {name: factor * u for name, u in updates.items()}
        for spec in self.specs:
            self.weights[spec.name] -= rate * spec.lr_scale * updates[spec.name]

    def update(self, spec: ParameterSpec, g: np.ndarray, rate: float) -> np.ndarray:
        config = self.config
        name = spec.name
        b1 = self.config.adam_beta1
        b2 = self.config.adam_beta2
        self.m[name] = b1 * self.m[name] + (1 - b1) * g
        self.v[name] = b2 * self.v[name] + (1 - b2) * g * g
        m = self.m[name] / (1 - b1**self.t)
        if config.adam_nesterov:
            m = b1 * self.m[name] / (1 - b1 ** (self.t + 1)) + (1 - b1) * g / (1 - b1**self.t)
        decay = config.weight_decay if spec.weight_decay else 0.0
        if config.adamc_weight_decay:
            decay *= rate / (RATE * float(self.options.get("default_lr_scale", 1.0)))
        step: np.ndarray = m / (np.sqrt(self.v[name] / (1 - b2**self.t)) + config.adam_eps)
        return step + decay * self.weights[name]

    def norm_factor(self, norm: float) -> float:
        config, factor = self.config, 1.0
        assert config.clip_update_norm_sigma is not None
        latest = np.array(self.norms[-config.clip_update_norm_window :])
        if len(latest) >= max(2, config.clip_update_norm_window // 2):
            limit = latest.mean() + config.clip_update_norm_sigma * max(latest.std(), 1e-6)
            factor = float(min(1.0, limit / norm))
        self.clipped += factor < 1.0
        self.norms.append(norm)
        return factor


@pytest.fixture(
    scope="module", params=[*(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 2)), 3]
)
def runs(request: pytest.FixtureRequest) -> list[Any]:
    """For each case with ZeRO 1, then with ZeRO 3, on some ranks: whole masters at first and after
    each step, specs and what the log has.
    """
    cases = [options | {"zero_stage": zero_stage} for zero_stage in (1, 3) for options in CASES]
    return [
        (
            together([rank[0] for rank in case]),
            [together([rank[1][step] for rank in case]) for step in range(len(GRADIENTS))],
            *case[0][2:],
        )
        for case in zip(*run_distributed(request.param, updated, cases), strict=True)
    ]


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: str(CASES[case])[:60])
def test_updates_are_those_of_the_formula(runs: list[Any], case: int) -> None:
    """After every step, bad ones included, on any number of ranks; for every ZeRO stage the same
    bits."""
    before, after, specs, record = runs[case]
    exact = Exact(CASES[case], before, specs)
    for step, weights in enumerate(after):
        exact.step(step)
        for spec in specs:
            np.testing.assert_allclose(
                weights[spec.name], exact.weights[spec.name], rtol=1e-5, atol=2e-6
            )
    clips = CASES[case].keys() & {"update_rms_clip", "clip_update_norm_sigma"}
    assert len(specs) > 5 and (exact.clipped > 1) == bool(clips), "the case shows nothing"
    expected = {"update_norm": exact.norm, "clipped_iters": exact.clipped} if clips else {}
    assert record == pytest.approx(expected, rel=1e-5)
    for weights, other in zip(after, runs[case + len(CASES)][1], strict=True):
        assert all(np.array_equal(weights[name], other[name]) for name in weights)


def engine_at(
    options: Options, ranks: Any, steps: range, origin: Engine | None = None, forget: bool = False
) -> Engine:
    """An engine after some steps; `origin`: it begins with the shards and the state, as JSON has
    it, of another one."""
    engine = Engine(ranks, SMALL | options)
    if origin is not None:
        for (_, ours), (_, theirs) in zip(engine.model.parts(), origin.model.parts(), strict=True):
            for kind in ours.kinds():
                ours.write(kind, ours.read(kind).copy_(theirs.read(kind)))
        state = json.loads(json.dumps(origin.optimizer.state()))
        if forget:
            del state["rule"]
        engine.optimizer.load_state(state)
    for step in steps:
        make_step(engine, options, step)
    return engine


@pytest.mark.parametrize("options", [RMS, NORM | {"adam_nesterov": True}], ids=str)
def test_a_resumed_run_clips_as_if_it_had_not_stopped(options: Options) -> None:
    """Wherever it stops, to the bit, log included; a history that is not in the checkpoint
    restarts.

    Behind the third step comes one that is dropped.
    """
    ranks, records = SimulatedRanks(), []
    whole = engine_at(options, ranks, range(0))
    for step in range(10):
        make_step(whole, options, step)
        records.append(whole.optimizer.record())
    expected = masters(whole)
    for stop in (1, 3, 4, 8):
        origin = engine_at(options, ranks, range(stop))
        assert (
            engine_at(options, ranks, range(stop, stop + 1), origin).optimizer.record()
            == records[stop]
        )
        resumed = engine_at(options, ranks, range(stop, 10), origin)
        assert resumed.optimizer.record() == records[-1] and len(records[-1]) == 2
        weights = masters(resumed)
        assert all(
            np.array_equal(weights[name], expected[name], equal_nan=True) for name in expected
        ), stop
        forgetful = engine_at(options, ranks, range(stop, 10), origin, forget=True)
        norms = forgetful.optimizer.state()["rule"]["clipping"].get("norms", [])
        assert len(norms) == (
            min(3, 10 - stop - (stop < 4)) if "clip_update_norm_sigma" in options else 0
        )


def test_a_window_that_is_never_half_full_is_said() -> None:
    (caution,) = [
        line for line in warnings(tiny_config(1, clip_update_norm_sigma=2.0)) if "update" in line
    ]
    assert caution.startswith(
        "--clip_update_norm_window=128: the run ends before half of the window is filled, so no update"
    )
