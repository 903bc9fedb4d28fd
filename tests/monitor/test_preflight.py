"""--preflight: what is right passes, and each planted fault is named, with the exit code of its
kind."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron_lite.errors import LinkError, NumericsError, UsageError
from megatron_lite.monitor import preflight
from megatron_lite.monitor.preflight import FILE_NAME, Facts, multiply, problems, table
from megatron_lite.parameter import DTYPES
from tests.support.launch import TINY, run, succeed

VERSIONS = {"torch": "2.13.0", "numpy": "2.3.1"}
Pairs = dict[tuple[int, int], float]


def ranks_of(*hosts: str, **different: Any) -> list[Facts]:
    """Ranks on these hosts, all right; `different` holds for the last one."""
    usual: dict[str, Any] = dict(
        versions=VERSIONS, clock_s=0.001, is_right=True, tflops=1.0, links=[]
    )
    ranks = [Facts(host=host, machine=host, **usual) for host in hosts]
    return [*ranks[:-1], ranks[-1]._replace(**different)]


def found(
    ranks: list[Facts], links: Pairs | None = None, earlier: Pairs | None = None
) -> list[tuple[type, str]]:
    return [*problems(ranks, links or {}, earlier or {})]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_products_are_known_to_the_bit(dtype: torch.dtype) -> None:
    assert multiply(torch.device("cpu"), dtype)[0]


def test_a_wrong_product_is_found() -> None:
    """One element of the second product is off by one."""

    class Faulty(TorchFunctionMode):
        products = 0

        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = function(*args, **(kwargs or {}))
            if function is torch.Tensor.matmul and result.dtype == torch.float32:
                self.products += 1
                result[3, 7] += self.products == 2
            return result

    with Faulty():
        assert not multiply(torch.device("cpu"), torch.float32)[0]
    (problem,) = found(ranks_of("a", "b", is_right=False))
    assert problem[0] is NumericsError and "rank 1 on b" in problem[1]
    assert "WRONG" in table(ranks_of("a", "b", is_right=False), {})[2]


def test_versions_name_the_odd_rank() -> None:
    ((kind, text),) = found(ranks_of("a", "a", "b", versions=VERSIONS | {"numpy": "1.26.0"}))
    assert (
        kind is UsageError
        and "numpy differs, 1.26.0 on rank 2 (b); 2.3.1 on rank 0 (a); 1 (a)" in text
    )


@pytest.mark.parametrize(
    ("clock_s", "words"), [(30.0, "b is 30.0 s ahead"), (-7.0, "b is 7.0 s behind")]
)
def test_a_skewed_clock_names_its_host(clock_s: float, words: str) -> None:
    ((kind, text),) = found(ranks_of("a", "a", "b", clock_s=clock_s))
    assert kind is LinkError and words in text


def ring(hosts: int, speed: float, **slow: float) -> tuple[list[Facts], Pairs]:
    """A rank on each host, with links around a ring. slow: speeds of other links, as _0_1=3.0."""
    links = {(rank, rank + 1): speed for rank in range(hosts - 1)} | {(0, hosts - 1): speed}
    others: Pairs = {}
    for name, other in slow.items():
        low, high = map(int, name[1:].split("_"))
        others[low, high] = other
    return ranks_of(*map("host{}".format, range(hosts))), links | others


def test_a_slow_link_between_machines_is_named() -> None:
    ranks, links = ring(6, 1200.0, _2_3=250.0)
    ((kind, text),) = found(ranks, links)
    assert kind is LinkError and "rank 2 on host2 and rank 3 on host3" in text and "1,200.0" in text


def test_a_machine_with_slow_links_is_named_first() -> None:
    ranks, links = ring(6, 1200.0, _2_3=250.0, _3_4=240.0)
    first, *rest = found(ranks, links)
    assert "2 of 2 slow links lead to rank 3 on host3" in first[1] and len(rest) == 2


def test_two_machines_have_only_their_past() -> None:
    ranks, links = ranks_of("a", "b"), {(0, 1): 200.0}
    assert not found(ranks, links)
    ((kind, text),) = found(ranks, links, {(0, 1): 1000.0})
    assert kind is LinkError and "earlier start it had 1,000.0" in text
    assert "less than 10" in found(ranks, {(0, 1): 9.0})[0][1]


def test_a_busy_cpu_is_no_slow_link() -> None:
    """Links of CPUs within a machine are not compared; those of GPUs are."""
    ranks = ranks_of(*"aaaa")
    speeds = {(0, 1): 3000.0, (1, 2): 2800.0, (2, 3): 400.0, (0, 3): 3000.0}
    assert not found(ranks, speeds, {(2, 3): 9000.0})
    gpus = [rank._replace(versions={"GPU": "H200"}) for rank in ranks]
    assert "within a machine" in found(gpus, speeds)[0][1]


@pytest.mark.parametrize("size", range(1, 9))
def test_neighbours_meet_once_and_no_rank_twice_at_a_time(size: int) -> None:
    turns = preflight._turns(size)
    for turn in turns:
        members = [*itertools.chain(*turn)]
        assert len(members) == len(set(members))
    around = (
        {tuple(sorted((rank, (rank + 1) % size))) for rank in range(size)} if size > 1 else set()
    )
    assert sorted(itertools.chain(*turns)) == sorted(around)


def test_a_healthy_start_is_measured_and_only_that(tmp_path: Path) -> None:
    flags = [*TINY, "--tensor_parallel=2", f"--experiment_dir={tmp_path}", "--preflight=only"]
    for start in range(2):
        log = succeed(flags, 4).output
        assert (
            "preflight: all checks passed" in log
            and "right" in log
            and "nothing was trained" in log
        )
        record = json.loads((tmp_path / "runs" / str(start) / "artifacts" / FILE_NAME).read_text())
        # Neighbours among all ranks, in both tensor-parallel and in both data-parallel pairs.
        assert {(low, high) for low, high, _ in record["links"]} == {
            *itertools.combinations(range(4), 2)
        }
        assert len(record["machines"]) == 4 and all(speed > 0 for *_, speed in record["links"])
    assert not (tmp_path / "checkpoints").exists()


def test_a_full_disk_ends_the_start(tmp_path: Path) -> None:
    flags = [*TINY, f"--experiment_dir={tmp_path}", "--preflight=1", "--train_iters=1000000000"]
    outcome = run([*flags, "--checkpoint_interval=1", "--max_checkpoints=none"])
    assert outcome.codes == [8] and "make room" in outcome.error_lines()[0]
