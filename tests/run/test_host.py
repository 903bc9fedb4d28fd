"""The threads of a process: from the work, the cores and the ranks, never from the load; and they
spin only shortly."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_lite.distributed.processes import Place, sharing_cores
from megatron_lite.errors import UsageError
from megatron_lite.generation.model import choose_device
from megatron_lite.kernels.matmul_library import onednn_is_exact
from megatron_lite.monitor import banner
from megatron_lite.run import host, launch
from megatron_lite.run.host import available_cores, choose_threads, threads_of
from tests.support.harness import tiny_config
from tests.support.launch import TINY, run
from tests.support.threads import THREADS

ROOT = Path(__file__).resolve().parents[2]


def test_threads_follow_from_the_work_and_a_fair_share() -> None:
    for hidden_size, tokens, cores, ranks, expected in (
        (64, 4096, 4, 1, 1),  # the README's command without a file, 248 thousand parameters
        (384, 2048, 4, 1, 4),
        (384, 2048, 64, 1, 18),
        (256, 512, 4, 1, 2),  # where two threads clearly pay
        (128, 512, 4, 1, 1),
        (384, 2048, 4, 2, 2),
        (4096, 8192, 4, 8, 1),
        (4096, 8192, 96, 8, 12),
        (16, 1, 1, 1, 1),
    ):
        config = tiny_config(
            hidden_size=hidden_size, sequence_length=tokens, micro_batch_size=1, batch_size=1
        )
        assert threads_of(config, cores, ranks).number == expected, (
            hidden_size,
            tokens,
            cores,
            ranks,
        )


def test_ranks_that_share_layers_share_the_work() -> None:
    """Four ranks have a quarter of each product."""
    options = dict(hidden_size=384, sequence_length=2048, micro_batch_size=1, batch_size=1)
    numbers = [
        threads_of(tiny_config(ranks, tensor_parallel=ranks, **options), 64, 1).number
        for ranks in (1, 4)
    ]
    assert numbers == [18, 4]


def test_cores_are_those_of_the_affinity_and_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "own_cores", lambda: frozenset(range(6)))
    for quota, expected in ((None, 6), (2.5, 2), (1.5, 1), (0.4, 1), (64.0, 6)):
        monkeypatch.setattr(host, "_quota", lambda quota=quota: quota)
        assert available_cores.__wrapped__() == expected


def test_ranks_with_cores_of_their_own_do_not_divide_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As srun binds them: the affinity of each is its share. A quota of time is divided by all
    ranks of the machine."""
    bound = [Place(rank, "host", "machine", 1, cores=0b1111 << 4 * rank) for rank in range(2)]
    free = [Place(rank, "host", f"container {rank}", 1, cores=0xFF) for rank in range(2)]
    pairs = [
        Place(rank, "host", "machine", 1, cores=0b1111 << 4 * (rank // 2)) for rank in range(4)
    ]
    unknown = [Place(rank, "host", "machine", 1) for rank in range(2)]
    assert [
        sharing_cores(places, 1, local) for places, local in ((bound, range(2)), (free, range(2)))
    ] == [1, 2]
    assert [
        sharing_cores(places, 1, local)
        for places, local in ((pairs, range(4)), (unknown, range(2)))
    ] == [2, 2]
    config = tiny_config(hidden_size=384, sequence_length=2048, micro_batch_size=1, batch_size=1)
    monkeypatch.setattr(host, "available_cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for quota, expected in ((None, 4), (4.0, 2)):
        monkeypatch.setattr(host, "_quota", lambda quota=quota: quota)
        assert choose_threads(config, local_world_size=2, sharing_cores=1).number == expected


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3.0),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/../outside\n", {"cpu.max": "max 100000\n"}, None),
        (
            "4:memory:/x\n3:cpu,cpuacct:/jobs/7\n",
            {"cpu/jobs/7/cpu.cfs_quota_us": "200000\n", "cpu/jobs/7/cpu.cfs_period_us": "100000\n"},
            2.0,
        ),
        (
            "3:cpu:/docker/7\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            None,
        ),
        (None, {}, None),
    ],
)
def test_the_quota_is_the_smallest_of_all_groups_around(
    own: str | None,
    files: dict[str, str],
    expected: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of `systemd-run -p CPUQuota=150%`, a container or a batch job; files of control groups 2
    and 1."""
    (tmp_path / "groups").mkdir()
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    if own is not None:
        (tmp_path / "own").write_text(own)
    folders = list(host._control_groups(tmp_path / "groups", tmp_path / "own"))
    monkeypatch.setattr(host, "_control_groups", lambda: folders)
    assert host._quota() == expected


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/job\n", {"job/memory.max": "900\n", "job/memory.current": "600\n"}, 300),
        (  # an outer group is the tighter one, and files that are only cached can go
            "0::/job/step\n",
            {
                **{"job/step/memory.max": "max\n", "job/step/memory.current": "600\n"},
                **{"job/memory.max": "700\n", "job/memory.current": "650\n"},
                "job/memory.stat": "anon 500\ninactive_file 100\n",
            },
            150,
        ),
        (
            "4:memory:/docker/7\n",
            {
                "memory/docker/7/memory.limit_in_bytes": "800\n",
                "memory/docker/7/memory.usage_in_bytes": "700\n",
                "memory/docker/7/memory.stat": "inactive_file 5\ntotal_inactive_file 20\n",
            },
            120,
        ),
        (
            "0::/job\n",
            {"job/memory.max": "500\n", "job/memory.current": "600\n", "job/memory.stat": "\n"},
            0,
        ),
        ("0::/\n", {"memory.max": "max\n"}, 1000 * 1024),
    ],
)
def test_memory_is_what_the_machine_and_all_groups_leave(
    own: str, files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MemAvailable, unless a control group of version 2 or 1, the process's own or one around it,
    leaves less."""
    for name, text in {"meminfo": "MemFree: 9 kB\nMemAvailable:   1000 kB\n", "own": own}.items():
        (tmp_path / name).write_text(text)
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
        (tmp_path / "groups" / name).with_name("memory.stat").touch()
    monkeypatch.setattr(host, "MEMINFO", tmp_path / "meminfo")
    folders = list(host._control_groups(tmp_path / "groups", tmp_path / "own", "memory"))
    monkeypatch.setattr(host, "_control_groups", lambda controller: folders)
    assert host.available_bytes() == expected


def said(code: str, without: tuple[str, ...], **variables: str) -> str:
    """What a new Python process prints; no variable of its environment begins with a word of
    `without`."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(without)
    }
    environment |= {"PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


VARIABLES: list[dict[str, str]] = [
    {"OMP_PROC_BIND": "true", "OMP_MAX_ACTIVE_LEVELS": "0", "OMP_DYNAMIC": "true"},
    *({}, {"OMP_PLACES": "cores"}, {"OMP_MAX_ACTIVE_LEVELS": "0"}, {"OMP_DYNAMIC": "true"}),
]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity")
@pytest.mark.skipif(not onednn_is_exact(), reason="oneDNN rounds fp32 factors on this processor")
@pytest.mark.parametrize(
    "variables",
    [VARIABLES[0], *(pytest.param(some, marks=pytest.mark.slow) for some in VARIABLES[1:])],
    ids=str,
)
def test_openmp_hides_no_core_and_gives_all_threads(variables: dict[str, str]) -> None:
    """Cores are counted before OpenMP binds this thread to one. With fewer threads than asked,
    oneDNN would leave blocks of a product as they were in memory."""
    code = (
        "import os; from megatron_lite.run.host import available_cores, prepare_libraries, _quota; "
        "cores = len(os.sched_getaffinity(0)); prepare_libraries(); import torch; torch.set_num_threads(2); "
        "from megatron_lite.kernels.matmul_library import onednn_is_exact; "
        "print(available_cores() == max(1, min(cores, int(_quota() or cores))), onednn_is_exact())"
    )
    assert said(code, ("OMP_", "GOMP_"), **variables) == "True True\n"


def test_the_users_limit_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """OMP_THREAD_LIMIT caps the chosen and the user's own number, and the threads of generation and
    evaluation."""
    large = tiny_config(hidden_size=384, sequence_length=2048, micro_batch_size=1, batch_size=1)
    monkeypatch.setattr(host, "available_cores", lambda: 8)
    for given, limit, expected in (
        (None, "3", (3, "OMP_THREAD_LIMIT")),
        (None, "20", (8, "all cores")),
        ("6", "4", (4, "OMP_THREAD_LIMIT")),
        ("2", "4", (2, "OMP_NUM_THREADS")),
        ("2", "nonsense", (2, "OMP_NUM_THREADS")),
    ):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if given is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", given)
        monkeypatch.setenv("OMP_THREAD_LIMIT", limit)
        assert host.choose_threads(large, 1, 1) == expected
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        monkeypatch.setenv("OMP_THREAD_LIMIT", "1")
        assert choose_device("cpu").type == "cpu" and torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_the_users_number_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are read as OpenMP reads them, so the first of a list counts."""
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for text, expected in (
        ("3", 3),
        ("1", 1),
        (" 2 ", 2),
        ("+4", 4),
        ("4,1", 4),
        (" 3 , 2", 3),
        ("007", 7),
    ):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert launch.requested_threads() == expected
    for text in ("", " ", "0", "-1", "many", "3.5", "2 3", ",2", "²"):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert launch.requested_threads() is None
    for text in ("100000", "9" * 200):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        with pytest.raises(
            UsageError, match="environment variable OMP_NUM_THREADS=.* is too large"
        ):
            launch.requested_threads()


@pytest.mark.parametrize("given", [True, False])
def test_one_thread_by_torchrun_is_not_the_users(given: bool) -> None:
    child = "from megatron_lite.run.launch import requested_threads; print(requested_threads())"
    torchrun = (
        "import os, subprocess, sys; os.environ |= dict(OMP_NUM_THREADS='1', TORCHELASTIC_RUN_ID='x', "
        f"LOCAL_WORLD_SIZE='2'); subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    variables = {"OMP_NUM_THREADS": "1"} if given else {}
    assert said(torchrun, ("OMP_NUM_THREADS",), **variables) == ("1\n" if given else "None\n")


@pytest.mark.parametrize(
    "name",
    [
        *(None, "OMP_WAIT_POLICY"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")
        ),
    ],
)
def test_threads_sleep_after_a_short_wait_unless_the_user_says_otherwise(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.setenv(other, "")  # restored at the end of the test
        monkeypatch.delenv(other)
    if name is not None:
        monkeypatch.setenv(name, "7")
    host.limit_spinning()
    ours = str(host.SPINS)  # beside KMP_BLOCKTIME, too, which GNU's OpenMP does not know
    assert os.environ.get("OMP_WAIT_POLICY") == (
        {None: "PASSIVE", "OMP_WAIT_POLICY": "7"}.get(name)
    )
    assert os.environ.get("GOMP_SPINCOUNT") == {"GOMP_SPINCOUNT": "7", "OMP_WAIT_POLICY": None}.get(
        name or "", ours
    )


def test_every_command_that_computes_prepares_libraries_before_torch_is_imported() -> None:
    """OpenMP reads its variables when its library is loaded; `main` and what it imports come
    later."""
    flags = (
        "--num_layers=1 --hidden_size=16 --num_attention_heads=2 --vocab_size=16 --train_iters=1"
    )
    flags += " --dataset_source=random"
    commands = [
        str(ROOT / name)
        for name in ("pretrain_gpt.py", "scripts/generate.py", "scripts/evaluate.py")
    ]
    code = (
        "import runpy, sys, megatron_lite.run.host as host\n"
        "def prepared(): assert 'torch' not in sys.modules; sys.exit('prepared')\n"
        "host.prepare_libraries = prepared\n"
        f"for path in {commands}:\n"
        f"    sys.argv = [path, *{flags.split()}]\n"
        "    try: runpy.run_path(path, run_name='__main__')\n"
        "    except SystemExit as end: print(end)\n"
    )
    assert said(code, ()) == "prepared\n" * len(commands)


def test_the_log_says_how_many_threads_and_why() -> None:
    outcome = run([*TINY, "--device=cpu"])
    assert (
        f"{THREADS} thread{'s' if THREADS > 1 else ''} per rank (OMP_NUM_THREADS)" in outcome.output
    )


def test_the_log_says_how_many_of_the_cores_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for cores, words in ((8, "cpu, 8 cores, "), (3, "cpu, 3 of 8 cores, ")):
        monkeypatch.setattr(banner, "available_cores", lambda cores=cores: cores)
        assert banner.describe_device(torch.device("cpu")).startswith(words)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is Linux's")
@pytest.mark.parametrize(
    "variable", [None, pytest.param("MALLOC_ARENA_MAX", marks=pytest.mark.slow)]
)
def test_freed_memory_is_used_again(variable: str | None) -> None:
    """Blocks of 2 to 20 MiB take new pages once and not a hundred times, unless the user has set
    glibc's variables."""
    code = (
        "import resource; from megatron_lite.run.host import prepare_libraries; prepare_libraries(); "
        "import numpy; faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt; "
        "use = lambda: [numpy.ones(mib * 131072) for mib in (2, 20, 7)]; use(); before = faults(); "
        "all(use() for _ in range(100)); print(faults() - before)"
    )
    variables = {"NUMPY_MADVISE_HUGEPAGE": "0"} | ({variable: "8"} if variable else {})
    assert (int(said(code, ("MALLOC_", "GLIBC_"), **variables)) < 1000) == (variable is None)
