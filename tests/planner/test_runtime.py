"""The memory beside all tensors: its sum decides what fits, and it covers what the allocator of a
GPU wastes."""

from typing import Any

import pytest

from megatron_lite.kernels.attention import blocks as attention_blocks
from megatron_lite.planner.devices import GIB, MIB, PLANNED_GPU_BYTES
from megatron_lite.planner.plan import Planner, make_plan
from megatron_lite.planner.runtime import HOLES, PAGE_BYTES
from tests.planner.test_plan import mistral
from tests.support.caching_allocator import AllocationRecorder, CachingAllocator, replay
from tests.support.harness import tiny_config
from tests.support.kernel_checks import products_in_fp32
from tests.support.memory_meters import a_model, micro_batches

# A Mistral-7B with widths and tokens divided by 32, and a quarter of its blocks; tensors have
# 1/1024 of its sizes.
SCALE = 1024
SMALL: dict[str, Any] = dict(
    num_layers=8, hidden_size=128, vocab_size=1000, num_attention_heads=2, head_groups=1
)
SMALL |= dict(
    ffn_hidden_size=448,
    kv_channels=64,
    window_size=None,
    batch_size=1,
    sequence_length=256,
    device="cpu",
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(dict(mlp_recompute_level="full"), marks=pytest.mark.slow),
        pytest.param(dict(mlp_recompute_level="full", vocab_size=8000), marks=pytest.mark.slow),
        dict(
            mlp_recompute_level="activation",
            batch_size=3,
            micro_batch_size=1,
            breadth_first_micro_batches=3,
        ),
        pytest.param(dict(mlp_recompute_level="full", recompute_layers=4), marks=pytest.mark.slow),
        dict(
            mlp_recompute_level="full",
            gated=False,
            normalization_type="layer_norm",
            use_rotary_embeddings=False,
        ),
        pytest.param(
            dict(
                full_precision_residual=True,
                qk_layernorm=True,
                training_dtype="fp32",
                batch_size=2,
                micro_batch_size=2,
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_the_plan_covers_what_the_allocator_cannot_fill(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps, replayed through the allocator's rules, reserve at most HOLES times the largest
    temporaries and a page more."""
    # A GPU's attention has small temporaries, in the inputs' dtype; its products need no fp32
    # copies.
    monkeypatch.setattr(attention_blocks, "scores_at_a_time", lambda on_gpu: 2**15)
    monkeypatch.setattr(attention_blocks, "dtype_of_products", lambda inputs: inputs.dtype)
    config = mistral(**{**SMALL, **options})
    model, batches = a_model(config), micro_batches(config)
    with products_in_fp32(False):
        model.forward_backward(batches)
        with AllocationRecorder() as recorder:
            for _ in range(2):
                model.forward_backward(batches)
    peak, reserved = replay(recorder.events, SCALE)
    with products_in_fp32(False):
        largest = max(cost.largest for cost in Planner(1, "cpu").plan(config).costs)
    assert 0 < reserved - peak <= HOLES * largest * SCALE + PAGE_BYTES


def test_the_allocator_splits_merges_and_reuses() -> None:
    """The range grows by pages, freed neighbours make one block, the best fit is taken, and small
    tensors have a range of their own."""
    allocator = CachingAllocator()
    for number, size in enumerate((30, 20, 40)):
        allocator.allocate(number, size * MIB)
    assert allocator.reserved == 100 * MIB, "90, in pages of 20"
    allocator.free(0)
    allocator.free(2)
    allocator.allocate(3, 25 * MIB)
    allocator.allocate(4, 4 * MIB)  # what is left of the first
    allocator.allocate(5, 1000)
    assert allocator.reserved == 102 * MIB
    for number in (1, 3, 4):
        allocator.free(number)
    allocator.allocate(6, 100 * MIB)
    assert allocator.reserved == 102 * MIB


def test_what_a_rank_needs_beside_its_tensors() -> None:
    """A GPU needs a context and workspaces, several also NCCL; a CPU needs its processes."""

    def runtime(ranks: int, device: str, tensor: int = 1, **options: Any) -> dict[str, int]:
        return make_plan(
            tiny_config(ranks, tensor_parallel=tensor, batch_size=ranks, **options), ranks, device
        ).runtime

    one, many = runtime(1, "cuda"), runtime(128, "cuda")
    assert set(many) - set(one) == {"NCCL channels"} and many["NCCL channels"] == 896 * MIB
    assert runtime(128, "cuda", 2)["NCCL channels"] == 3 * 896 * MIB
    assert runtime(2, "cuda", 2)["NCCL channels"] == 2 * 896 * MIB
    plan = make_plan(tiny_config(1, batch_size=1), 1, "cuda")
    largest = max(cost.largest for cost in plan.costs)
    assert one["allocator fragmentation"] == int(0.5 * largest) + 20 * MIB
    without, workers = runtime(2, "cpu", num_workers=0), runtime(2, "cpu", num_workers=3)
    assert sum(workers.values()) - sum(without.values()) == workers["loader processes"] > 0
    assert not set(workers) & {"NCCL channels", "CUDA context, kernels"}


def test_a_plan_needs_its_peak_and_its_runtime() -> None:
    """The sum is the same from a whole plan and from its rows, and grows with the micro-batch."""
    small, large = (
        make_plan(tiny_config(2, micro_batch_size=size, batch_size=8), 2, "cuda") for size in (1, 4)
    )
    for plan in (small, large):
        assert plan.needed_bytes() == plan.peak_bytes() + sum(plan.runtime.values())
        assert plan.needed_bytes("full") == plan.peak_bytes("full") + sum(plan.runtime.values())
    assert large.needed_bytes() > small.needed_bytes()
    assert 79 * GIB < PLANNED_GPU_BYTES < 79.2 * GIB
