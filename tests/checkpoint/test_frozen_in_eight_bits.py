"""Frozen layers with 8-bit products compute with their own weights: in every layout, thawed, frozen
late, and resumed.

Runs are longer than --amax_history_length, and have evaluations and averages between steps. The
rounded weights are compared with those that `test_eight_bit.py` computes from the gathered weights,
to the bit.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatron_lite.checkpoint import manifest
from megatron_lite.checkpoint.compatibility import wrong_frozen_layers
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.kernels.eight_bit import RECIPES, eight_bit_of
from tests.checkpoint.test_engine import (
    copy_checkpoint,
    finished_run,
    frozen_names,
    log_of,
    read_all,
    train_on,
)
from tests.kernels.test_eight_bit import dequantized
from tests.support.harness import run_distributed
from tests.support.results import curve, weights
from tests.train.test_eight_bit_training import FORMATS

MIDDLE, LAST = 3, 6  # iterations of the checkpoints
COMMON: dict[str, Any] = {
    **{
        "num_layers": 3,
        "train_iters": LAST,
        "checkpoint_interval": MIDDLE,
        "lr": 1e-2,
        "amax_history_length": 2,
    },
    **{"validation_iters": 1, "validation_interval": 2, "ema_type": "ema", "ema_beta": 0.8},
    **{"breadth_first_micro_batches": 2, "recompute_layers": 1},
}
# A whole block, which needs no gather after the first in ZeRO 1 and 2; a part of one with all
# biases; a scale of 0.
FROZEN: dict[str, Any] = {
    "freeze": ("blocks.0", "blocks.1.attention", "*.bias"),
    "lr_scales": ("blocks.2.mlp.up:0",),
}
STORIES: dict[
    str, tuple[str, dict[str, Any]]
] = {  # the run in whose middle it begins, and what is frozen from then on
    "frozen": ("", FROZEN),
    "resumed": ("frozen", FROZEN),
    "thawed": ("frozen", {}),
    "trained": ("", {}),
    "frozen late": ("trained", FROZEN),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 1": {"zero_stage": 1},
    "zero 3, 1 buffer": {"zero_stage": 3, "num_weight_buffers": 1},
    "zero 1, 1 buffer": {"zero_stage": 1, "num_weight_buffers": 1},
    "zero 1, 2 buffers": {"zero_stage": 1, "num_weight_buffers": 2},
    "zero 2": {"zero_stage": 2},
    "zero 2, 1 buffer": {"zero_stage": 2, "num_weight_buffers": 1},
    "zero 2, 2 buffers": {"zero_stage": 2, "num_weight_buffers": 2},
    "zero 3, 2 buffers": {"zero_stage": 3, "num_weight_buffers": 2},
}
LOW: dict[str, Any] = {
    "training_dtype": "bf16",
    "store_frozen_weights_in_optimization_precision": False,
}


def wrong_forms(run: Any) -> list[str]:
    """Return the frozen layers that compute with another weight than the rounded one, as it is or
    transposed.

    Forms that a buffer keeps are not rounded again.
    """
    recipe = RECIPES[run.config.performance.eight_bit]
    whole = {name: weight.clone() for name, weight in run.model.full_weights()}
    wrong = []
    for stage in run.model.stages:
        stage.gather()
        stage.require_weights()
        for layer in eight_bit_of(stage.layers):
            weight = dict(stage.parameters())[f"{layer.name}.weight"]
            if weight.requires_grad:
                continue
            form, transposed = layer.at(None).forward.__self__._weight(weight)  # type: ignore[attr-defined]
            values = whole[weight.spec.name]
            expected = (
                dequantized(values, recipe.values, recipe.by_row),
                dequantized(values.t(), recipe.values, recipe.by_row).T,
            )
            found = (value(form), value(transposed).T)
            for one, other in zip(found, expected, strict=True):
                local = weight.spec.local(torch.from_numpy(np.ascontiguousarray(other)))
                if not np.array_equal(one, local.numpy()):
                    wrong.append(layer.name)
    return wrong


def value(form: Any) -> NDArray[np.float64]:
    return form.numbers.double().numpy() * form.scale.double().numpy()  # type: ignore[no-any-return]


def tell(
    distributed: Distributed, options: dict[str, Any], root: str, layouts: dict[str, str]
) -> list[str]:
    """Train each story in root/<story>, in its layout; return the frozen layers that computed with
    wrong weights."""
    wrong = []
    for story, layout in layouts.items():
        (source, frozen), folder = STORIES[story], Path(root, story)
        if source and distributed.rank == 0:
            copy_checkpoint(Path(root, source), MIDDLE, folder)
        distributed.barrier()
        place = {**LAYOUTS[layout], "experiment_dir": str(folder)}
        run = finished_run(distributed, {**COMMON, **options, **frozen, **place})
        if run.config.performance.eight_bit:
            wrong += [f"{story}: {name}" for name in wrong_forms(run)]
    return wrong


def scales(folder: Path) -> Any:
    """Return what the last checkpoint keeps of delayed scales; None with other formats."""
    return manifest.read(folder / "checkpoints" / str(LAST)).state["optimizer"].get("scales")


def assert_scales_of_frozen_weights(folder: Path) -> None:
    """Check that delayed scales of frozen weights, with which a thawed layer begins, come from the
    saved weights."""
    contents, saved = read_all(folder / "checkpoints" / str(LAST)), scales(folder) or {}
    for name in frozen_names(contents):
        if (layer := name.removesuffix(".weight")) in saved:
            largest = np.float32(contents[name, "weights"].float().abs().max())
            assert saved[layer][1] == (
                float(np.float32(1) / (np.float32(448) / largest)),
                [(0, float(largest))],
            ), name


def losses(folder: Path) -> list[float]:
    return [float.fromhex(line["loss"]) for line in curve(folder).values()]


def assert_goes_on(resumed: Path, whole: Path) -> None:
    """Check that a resumed run has the bits of one that never stopped, delayed scales included."""
    assert len(curve(resumed)) > LAST - MIDDLE and curve(resumed).items() <= curve(whole).items()
    assert weights(resumed) == weights(whole) and scales(resumed) == scales(whole)
    assert_scales_of_frozen_weights(whole)


def test_a_run_goes_on_or_is_thawed_in_another_layout(tmp_path: Path) -> None:
    """From one that keeps frozen weights rounded to one that rounds them at each use."""
    layouts = dict(
        zip(("frozen", "resumed", "thawed"), ("zero 1", *["zero 3, 1 buffer"] * 2), strict=True)
    )
    assert run_distributed(2, tell, FORMATS["delayed"], str(tmp_path), layouts) == [[], []]
    assert_goes_on(tmp_path / "resumed", tmp_path / "frozen")
    assert scales(tmp_path / "frozen")


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, LOW], ids=["32 bits", "16 bits"])
@pytest.mark.parametrize("name", FORMATS)
def test_neither_layout_nor_restart_changes_a_bit(
    name: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """Of losses, weights and delayed scales, in each story, on two ranks."""
    for layout in LAYOUTS:
        options = FORMATS[name] | more
        assert run_distributed(
            2, tell, options, str(tmp_path / layout), dict.fromkeys(STORIES, layout)
        ) == [[], []]
        assert_goes_on(tmp_path / layout / "resumed", tmp_path / layout / "frozen")
        for story in STORIES:
            found, expected = tmp_path / layout / story, tmp_path / "zero 1" / story
            assert curve(found) == curve(expected), (layout, story)
            assert weights(found) == weights(expected), (layout, story)
            assert scales(found) == scales(expected), (layout, story)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_losses_are_close_to_those_without_8_bits(name: str, tmp_path: Path) -> None:
    """Of every story; runs differ by 0.7 percent at most, and by 3.5 with frozen weights near
    zero."""
    for kind, options in (("rounded", FORMATS[name]), ("plain", {})):
        run_distributed(1, tell, options, str(tmp_path / kind), dict.fromkeys(STORIES, "zero 1"))
    for story in STORIES:
        rounded, plain = (losses(tmp_path / kind / story) for kind in ("rounded", "plain"))
        np.testing.assert_allclose(rounded, plain, rtol=0.01)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"tensor_parallel": 2}, id="tensor", marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel": 2, "pipeline_schedule": "zero_bubble_v"}, id="pipeline"),
    ],
)
def test_ranks_that_share_layers_and_pipelines(more: dict[str, Any], tmp_path: Path) -> None:
    """As one rank: with the scales of whole weights, and weight gradients computed later."""
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    options = {**FORMATS["delayed"], "num_layers": 4, "ema_type": "none", "recompute_layers": 0}
    assert run_distributed(1, tell, options, str(alone), {"frozen": "zero 1"}) == [[]]
    ranks = {name: size for name, size in more.items() if name.endswith("_parallel")}
    assert run_distributed(
        2, tell, {**options, **more}, str(shared), {"frozen": "zero 1"}, **ranks
    ) == [[], []]
    assert_scales_of_frozen_weights(shared / "frozen")
    if "pipeline_parallel" in more:
        assert curve(shared / "frozen") == curve(alone / "frozen")
        assert weights(shared / "frozen") == weights(alone / "frozen")
        assert scales(shared / "frozen") == scales(alone / "frozen")
    np.testing.assert_allclose(losses(shared / "frozen"), losses(alone / "frozen"), rtol=0.01)


def test_a_checkpoint_with_wrong_numbers_is_named(tmp_path: Path) -> None:
    """The version that missed the magnitudes of frozen weights missed their scales; no other
    checkpoint is named."""
    options = {
        **FORMATS["delayed"],
        "freeze": ("blocks.0",),
        "checkpoint_interval": 1,
        "train_iters": 3,
    }
    run_distributed(1, train_on, {**options, "experiment_dir": str(tmp_path / "run")})
    for age in (0, 2):
        resumed = tmp_path / str(age)
        copy_checkpoint(tmp_path / "run", 3, resumed)
        content = manifest.read(resumed / "checkpoints" / "3")
        for layer, (_, (_, magnitudes), _) in content.state["optimizer"]["scales"].items():
            if layer.startswith("blocks.0."):
                magnitudes[:] = [(age, magnitude) for _, magnitude in magnitudes]
        (resumed / "checkpoints" / "3" / "manifest.json").write_text(manifest.dump(content))
        run_distributed(1, train_on, {**options, "train_iters": 4, "experiment_dir": str(resumed)})
        words = (
            "an earlier version computed with wrong weights in frozen layers (blocks.0.attention"
        )
        assert log_of(resumed).count(words) == (age > 0)
        mended = manifest.read(resumed / "checkpoints" / "4")
        assert list(wrong_frozen_layers(mended)) == []
