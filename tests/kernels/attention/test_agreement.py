"""Every rank computes attention by the same backend, whatever one rank's trial of a backend finds.

A GPU of the table and backends that work or fail on request stand in for the real ones.
"""

from typing import Any
from unittest import mock

import pytest
import torch

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import UsageError
from megatron_lite.kernels import choice
from megatron_lite.kernels.attention import choice as attention_choice
from megatron_lite.kernels.attention.choice import Machine, Work
from megatron_lite.kernels.choice import Kernels, agree_on_kernels
from tests.support.harness import run_distributed, tiny_config

HOPPER = Machine((9, 0), 91501)
CUDA = torch.device("cuda", 0)


class OnMachine:
    """Ranks that exchange over gloo and say that they have a GPU, if the machine is one."""

    def __init__(self, ranks: Distributed, machine: Machine) -> None:
        self.device = torch.device("cpu") if machine.capability is None else CUDA
        self.world_size, self.gather_objects = ranks.world_size, ranks.gather_objects


def agreed(
    distributed: Distributed,
    machines: list[Machine],
    failing: list[dict[str, str]],
    options: dict[str, Any],
) -> list[Any]:
    """Return what this rank, with its own machine and failing backends, chooses, or its error; and
    what it tried."""
    tried: list[str] = []

    def failure(backend: str, device: torch.device, work: Work) -> str | None:
        tried.append(backend)
        return failing[distributed.rank].get(backend)

    options = {
        "batch_size": 12,
        "kv_channels": 16,
        "training_dtype": "bf16",
        "enable_triton_kernels": False,
        **options,
    }
    config = tiny_config(distributed.world_size, **options)
    machine = machines[distributed.rank]
    with (
        mock.patch.object(choice, "failure", failure),
        mock.patch.object(attention_choice, "machine_of", lambda device: machine),
    ):
        try:
            kernels: Any = agree_on_kernels(config, OnMachine(distributed, machine))  # type: ignore[arg-type]
        except UsageError as error:
            return [str(error), tried]
    return [kernels, tried]


@pytest.mark.parametrize(
    ("options", "failing", "chosen", "warned"),
    [
        ({}, [{}, {}, {}], "cudnn", []),
        (
            {},
            [{}, {"cudnn": "RuntimeError: once"}, {}],
            "flash",
            ["cudnn", "on rank 1: RuntimeError: once"],
        ),
        (
            {},
            [{"flash": "a"}, {}, {"cudnn": "b"}],
            "varlen",
            ["cudnn", "on rank 2: b", "flash", "on rank 0: a"],
        ),
        (
            {"window_size": 4},
            [{}, {}, {"varlen": "c"}],
            "math",
            ["varlen", "on rank 2: c; every rank uses math"],
        ),
        (
            {},
            [{"cudnn": "d"}, {"cudnn": "e"}, {"cudnn": "f"}],
            "flash",
            ["on rank 0 and on 2 more of 3 ranks: d"],
        ),
    ],
    ids=str,
)
def test_a_backend_that_fails_on_one_rank_is_used_by_none(
    options: dict[str, Any], failing: list[dict[str, str]], chosen: str, warned: list[str]
) -> None:
    """All ranks take the first that works on all of them, and all log the same reasons; nothing is
    tried twice."""
    results = run_distributed(3, agreed, [HOPPER] * 3, failing, options)
    kernels = [kernels for kernels, _ in results]
    assert all(isinstance(found, Kernels) and found.attention == chosen for found in kernels), (
        kernels
    )
    assert len({found.warnings for found in kernels}) == 1
    text = "\n".join(kernels[0].warnings)
    assert all(words in text for words in warned) and bool(text) == bool(warned), text


def test_ranks_with_other_gpus_agree() -> None:
    """A rank whose table has no cuDNN attention draws the others to what it can compute; that is no
    failure."""
    results = run_distributed(2, agreed, [HOPPER, Machine((8, 0), 91501)], [{}, {}], {})
    assert [(kernels.attention, kernels.warnings) for kernels, _ in results] == [("flash", ())] * 2


def test_ranks_with_other_processors_agree() -> None:
    """In bf16 at 1,024 positions: flash needs a processor with instructions for bf16 on every
    rank."""
    native, options = Machine(None, has_bf16=True), {"sequence_length": 1024}
    for other, expected in ((native, "flash"), (Machine(None), "math")):
        results = run_distributed(2, agreed, [native, other], [{}, {}], options)
        assert [(kernels.attention, kernels.warnings) for kernels, _ in results] == [
            (expected, ())
        ] * 2
    assert choice.failure("flash", torch.device("cpu"), Work(torch.bfloat16, 16)) is None


def test_a_wanted_backend_that_fails_on_one_rank_is_an_error_on_all() -> None:
    """No rank goes on alone; the message names the rank and the flag."""
    results = run_distributed(
        2, agreed, [HOPPER] * 2, [{}, {"flash": "x"}], {"attention_backend": "flash"}
    )
    for error, _ in results:
        assert isinstance(error, str) and error.startswith("rank 1: --attention_backend=flash:"), (
            error
        )


WORKS = [
    Work(torch.float32, 16),
    Work(torch.bfloat16, 24, heads_per_group=4),
    Work(torch.float32, 16, windowed=True),
    Work(torch.float32, 8, documents=True, heads_per_group=2),
    Work(torch.bfloat16, 16, windowed=True, documents=True),
]


@pytest.mark.parametrize("work", WORKS, ids=str)
def test_the_trial_is_of_the_kind_of_the_run(work: Work) -> None:
    """The problem has the run's dtype, head size, groups, window and documents, so a fault in any
    of them is found."""
    asked: list[tuple[Any, ...]] = []
    wrong = ""
    honest = choice.attention

    def attention(
        query: Any,
        key: Any,
        value: Any,
        window: Any,
        *rest: Any,
        backend: str,
        documents: Any,
        **_: Any,
    ) -> Any:
        assert query.dtype == work.dtype and query.shape[3] == key.shape[3] == work.head_size
        assert query.shape[1] == work.heads_per_group * key.shape[1] and key.shape[1] > 1
        if backend == "flash":
            asked.append((window is not None, documents is not None))
            window = None if wrong == "windowed" else window
            documents = None if wrong == "documents" else documents
        return honest(query, key, value, window, *rest, backend="math", documents=documents)

    with mock.patch.object(choice, "attention", attention):
        trial = choice.failure.__wrapped__
        assert trial("flash", torch.device("cpu"), work) is None
        assert asked == [(work.windowed, work.documents)]
        for wrong in ("windowed", "documents"):
            reason = trial("flash", torch.device("cpu"), work)
            assert (reason is not None) == getattr(work, wrong), reason
            assert reason is None or "its output differs" in reason
