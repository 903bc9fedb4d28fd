"""Saving and loading: any layout loads any other, a crash or a full disk loses nothing, only our
files are deleted."""

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.checkpoint import blocks, files, reading, retention
from megatron_lite.checkpoint.manifest import KINDS, Manifest
from megatron_lite.checkpoint.resume import Choice, find
from megatron_lite.checkpoint.writing import Save, write_now
from megatron_lite.config import Config, flatten
from megatron_lite.errors import CheckpointError, StorageError
from tests.support.fakes import (
    FakeModel,
    Layout,
    Values,
    World,
    empty_model,
    held,
    make_specs,
    one_rank,
    put,
    random_values,
    run_state,
    same,
    take,
)

SPECS, CONFIG = make_specs(), Config()


def save(
    root: Path,
    iteration: int,
    seed: int,
    world_size: int = 1,
    num_per_stage: int = 3,
    state: Any = None,
    config: Config = CONFIG,
    **more: Any,
) -> Values:
    """Save random values from a model of this `Layout`; return its values, or raise the error of
    rank 0."""
    layout = Layout(world_size, num_per_stage, **more)
    values = held(random_values(SPECS, seed, KINDS), layout)
    for result in saved_by_all(lambda _: root, iteration, values, layout, state, config):
        if isinstance(result, Exception):
            raise result
    return values


def saved_by_all(
    root_of: Callable[[int], Path],
    iteration: int,
    values: Values,
    layout: Layout,
    state: Any = None,
    config: Config = CONFIG,
) -> list[Any]:
    """Save on every rank into its root; return the ranks' results or errors."""

    def rank_main(distributed: Any) -> None:
        model: Any = put(empty_model(SPECS, layout, distributed.rank), values, distributed.rank)
        state_or_default = run_state() if state is None else state
        write_now(
            Save(root_of(distributed.rank), iteration, model, state_or_default, config, distributed)
        )

    if layout.world_size == 1:  # without a thread, so that a simulated kill reaches the test
        return [rank_main(one_rank())]
    return World(layout.world_size, layout.tensor_ranks).run(rank_main)


def newest(root: Path) -> tuple[Path, Manifest] | None:
    return Choice(tuple(find(root))).newest


def load(
    root: Path, world_size: int = 1, num_per_stage: int = 3, specs: Any = SPECS, **more: Any
) -> tuple[Manifest | None, Values, list[str]]:
    """Return (the manifest of the checkpoint that is loaded, the values in the shards of this
    `Layout`, the lines)."""
    layout = Layout(world_size, num_per_stage, **more)
    models: list[FakeModel] = [empty_model(specs, layout, rank) for rank in range(world_size)]
    lines: list[list[str]] = [[] for _ in range(world_size)]
    results = World(world_size, layout.tensor_ranks).run(
        lambda distributed: reading.load_first_good(
            find(root),
            root,
            models[distributed.rank],
            distributed,
            lines[distributed.rank].append,  # type: ignore[arg-type]
        )
    )
    for result in results:
        if isinstance(result, Exception):
            assert all(type(other) is type(result) for other in results), results
            raise result
    assert all(other == lines[0] for other in lines)
    values, padding_is_zero = take(models)
    assert padding_is_zero
    return results[0] and results[0][1], values, lines[0]


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


# -- the format
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saving", [(1, 8), (1, 1), (2, 3), (3, 2), (3, 8)])
def test_any_layout_reads_any_other(saving: tuple[int, int], tmp_path: Path) -> None:
    """(ranks, parameters per stage): weights and both moments arrive bit for bit, padding stays
    zero."""
    saved = save(tmp_path, 10, 1, *saving, state=run_state(updates=7))
    for loading in ((1, 3), (1, 8), (2, 1), (2, 8), (3, 3)):
        loaded, values, lines = load(tmp_path, *loading)
        assert same(saved, values), loading
        assert loaded is not None and lines == []
        assert (loaded.iteration, loaded.world_size) == (10, saving[0])
        assert loaded.state == run_state(updates=7)
        assert (
            loaded.config["split"] == [969.0, 30.0, 1.0]
            and loaded.config.keys() == flatten(Config()).keys()
        )


TENSOR_PARALLEL = [
    *itertools.product([(1, 1, 8), (4, 2, 8), (12, 4, 8)], [(1, 1, 3), (6, 2, 3), (4, 4, 8)]),
    *itertools.product(
        [(2, 2, 3), (6, 2, 1), (4, 4, 3)], [(3, 1, 8), (2, 2, 8), (6, 2, 3), (4, 4, 8)]
    ),
]


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        pair if index < 9 else pytest.param(*pair, marks=pytest.mark.slow)
        for index, pair in enumerate(TENSOR_PARALLEL)
    ],
    ids=str,
)
def test_any_tensor_parallel_layout_reads_any_other(
    saving: tuple[int, int, int],
    loading: tuple[int, int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """(ranks, tensor-parallel ranks among them, parameters per stage): every copy arrives bit for
    bit.

    Columns are read in several chunks.
    """
    monkeypatch.setattr(files, "CHUNK_BYTES", 200)
    saved = save(tmp_path, 10, 1, saving[0], saving[2], tensor_ranks=saving[1])
    loaded, values, lines = load(tmp_path, loading[0], loading[2], tensor_ranks=loading[1])
    assert loaded is not None and same(saved, values) and lines == []


def test_special_values_keep_their_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint keeps NaN payloads, negative zero, subnormal numbers and infinities; in pieces
    of any size."""
    monkeypatch.setattr(files, "CHUNK_BYTES", 100)
    for module in (blocks, files):
        monkeypatch.setattr(module, "BLOCK_BYTES", 52)
    values = random_values(SPECS, 1)
    bits = torch.tensor(
        [0x7FC12345, 0xFF800000 - 2**32, 0x80000000 - 2**32, 1, 0x7F800000], dtype=torch.int32
    )
    values["exp_avg"]["embedding.word.weight"].view(-1)[:5] = bits.view(torch.float32)
    saved_by_all(lambda _: tmp_path, 1, values, Layout(2))
    assert same(values, load(tmp_path, 3, 2)[1])


# -- finding
# ------------------------------------------------------------------------------------------------------


def test_nothing_at_all_is_none(tmp_path: Path) -> None:
    """A missing or empty directory, or one without checkpoints, is a fresh start."""
    assert load(tmp_path / "missing")[0] is None
    assert load(tmp_path)[0] is None
    (tmp_path / "latest").write_text("abc")
    (tmp_path / "30").write_text("a file")
    (tmp_path / "step-40").mkdir()
    (tmp_path / ".tmp-50-0123456789abcdef").mkdir()
    for name in ("-1", "007", "1e3", "+5", "٣", "9" * 30, "5.aside-0123456789abcdef"):
        (tmp_path / name).mkdir()
    assert load(tmp_path, world_size=2)[0] is None
    assert newest(tmp_path) is None
    assert newest(tmp_path / "missing") is None


def test_the_newest_by_number_is_loaded_and_its_config_is_found_first(tmp_path: Path) -> None:
    """10 is newer than 9; the config can be read without the tensors, and skips damaged
    manifests."""
    saved = [save(tmp_path, iteration, iteration) for iteration in (10, 9)]
    loaded, values, _ = load(tmp_path)
    assert loaded is not None and loaded.iteration == 10 and same(values, saved[0])
    found = newest(tmp_path)
    assert found is not None and found[0].name == "10" and found[1].config["hidden_size"] == 1024
    (tmp_path / "10" / "manifest.json").write_text("{")
    found = newest(tmp_path)
    assert found is not None and found[0].name == "9"


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (make_specs()[:-1], "head.output.weight is not in the model"),
        (
            make_specs() + make_specs([("head.extra", (3,), True)]),
            "head.extra is not in the checkpoint",
        ),
        (
            make_specs([("embedding.word.weight", (37, 17), True)]) + make_specs()[1:],
            r"embedding.word.weight has shape \[37, 16\], the model's has \[37, 17\]",
        ),
        (
            make_specs([(f"p{i}", (2,), True) for i in range(9)]),
            r"p4 is not in the checkpoint \(and 12 more\)",
        ),
    ],
)
def test_other_parameters_are_refused(specs: Any, message: str, tmp_path: Path) -> None:
    """Names and shapes must be the model's; the older checkpoint is not tried, no shard is
    touched."""
    save(tmp_path, 9, 1)
    save(tmp_path, 10, 1, world_size=2)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, world_size=2, specs=specs)


# -- crashes and full disks
# -----------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process ends here; no handler of the program runs."""


def fail_to_write(monkeypatch: pytest.MonkeyPatch, rank: int, times: int, number: int) -> None:
    """Let a rank fail to write its file, this many times, with this error number."""
    real_write, failures = files.write_tensors, iter(range(times))

    def write(path: Path, *arguments: Any) -> files.WrittenFile:
        if path.name == f"rank_00{rank}.safetensors" and next(failures, None) is not None:
            path.write_bytes(b"half")
            raise OSError(number, os.strerror(number))
        return real_write(path, *arguments)

    monkeypatch.setattr(files, "write_tensors", write)


MUTATING = ("open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir")


def fail_at(
    number: int, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], int]:
    """Let the `number`-th (from 0) mutating call of `os` fail; return a counter of the calls so
    far."""
    calls = itertools.count()
    latest = [-1]

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            latest[0] = next(calls)
            if latest[0] == number:
                raise error
            return function(*arguments, **named)

        return call

    for name in MUTATING:
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))
    return lambda: latest[0] + 1


def every_point(
    action: Callable[[Path], Any], prepare: Callable[[Path], Any], tmp_path: Path, error: Any
) -> Any:
    """Run the action on a fresh directory with a failure at its first, second ... mutating call,
    until none is hit."""
    for number in itertools.count():
        root = tmp_path / f"{type(error).__name__}_{number}"
        prepare(root)
        with pytest.MonkeyPatch.context() as patch:
            count = fail_at(number, error, patch)
            try:
                action(root)
                failed = False
            except (Killed, StorageError):
                failed = True
            finished = count() <= number
        yield root, failed
        if finished:
            assert number > 5
            return


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("iteration", "error"),
    [
        pytest.param(20, Killed(), id="new-kill"),
        pytest.param(10, FULL, id="again-disk"),
        pytest.param(20, FULL, id="new-disk", marks=pytest.mark.slow),
        pytest.param(10, Killed(), id="again-kill", marks=pytest.mark.slow),
    ],
)
def test_every_crash_point_of_a_save(iteration: int, error: BaseException, tmp_path: Path) -> None:
    """Whatever call fails, the old or the new checkpoint loads; the next save works and leaves
    nothing behind."""
    old, new = random_values(SPECS, 1), random_values(SPECS, 2)
    points = every_point(
        lambda root: save(root, iteration, 2), lambda root: save(root, 10, 1), tmp_path, error
    )
    outcomes = []
    for root, failed in points:
        loaded, values, lines = load(root)
        assert loaded is not None and lines == []
        is_new = same(values, new)
        assert is_new or same(values, old)
        assert is_new or failed, "a save that succeeded is the one that is loaded"
        outcomes.append(is_new)
        save(root, 30, 3)
        # an unreadable old one is kept
        left = {name for name in names(root) if not name.startswith("10.aside-")}
        assert left == ({"10", "20", "30"} if iteration == 20 and is_new else {"10", "30"})
        assert same(load(root)[1], random_values(SPECS, 3))
    assert outcomes[-1] is True
    if isinstance(error, Killed):
        assert outcomes[0] is False and outcomes == sorted(outcomes), "once it is visible it stays"


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(Killed(), id="kill"),
        pytest.param(OSError(errno.EIO, "Input/output error"), id="disk", marks=pytest.mark.slow),
    ],
)
def test_every_crash_point_of_pruning(error: BaseException, tmp_path: Path) -> None:
    """The newest survives whatever call fails, and a half-deleted folder is never loaded."""

    def prepare(root: Path) -> None:
        for iteration in (1, 2, 3):
            save(root, iteration, iteration)

    for root, _ in every_point(lambda root: retention.prune(root, 1, 3), prepare, tmp_path, error):
        assert same(load(root)[1], random_values(SPECS, 3))
        assert load(root)[2] == []
        retention.prune(root, 1, 3)
        save(root, 4, 4)
        assert names(root) == {"3", "4"}


def test_syncs_come_in_the_order_that_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors, manifest and their folder are on the disk before the rename, and the rename before
    the save returns."""
    events: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        events.append("sync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.split("-")[0])
        real_fsync(descriptor)

    def rename(source: Path, target: Path) -> None:
        events.append(f"rename {Path(target).name}")
        real_rename(source, target)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    save(tmp_path / "root", 10, 1)
    expected = [
        "sync rank_000.safetensors",
        "sync manifest.json",
        "sync .tmp",
        "rename 10",
        "sync root",
    ]
    assert events == expected


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_full_disk_of_one_rank_is_an_error_on_all(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank raises StorageError with rank, path, bytes needed and free; the temporary folder
    is gone."""
    old = save(tmp_path, 10, 1, world_size=3)
    fail_to_write(monkeypatch, rank, 1, errno.ENOSPC)
    results = saved_by_all(lambda _: tmp_path, 20, random_values(SPECS, 2), Layout(3))
    num_bytes = sum(
        12 * part.layout.shard_numel for _, part in empty_model(SPECS, Layout(3), 0).parts()
    )
    for result in results:
        assert isinstance(result, StorageError) and result.exit_code == 8
        for part in (
            "iteration 20",
            f"rank {rank}: ",
            f"rank_00{rank}.safetensors",
            "No space left on device",
            f"{num_bytes:,} bytes needed",
            "bytes free",
        ):
            assert part in str(result)
    assert names(tmp_path) == {"10"}
    assert same(load(tmp_path)[1], old)


def test_an_unwritable_directory_is_a_storage_error(tmp_path: Path) -> None:
    """The error names the path; here a file stands in place of the directory."""
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(StorageError, match=f"rank 0: {tmp_path}/checkpoints"):
        save(tmp_path / "checkpoints", 10, 1, world_size=2)


def test_a_state_that_could_not_be_read_leaves_no_rank_waiting(tmp_path: Path) -> None:
    """A mistake of the caller is raised unchanged on rank 0, other ranks get StorageError, and no
    folder appears."""
    results = saved_by_all(
        lambda _: tmp_path, 20, random_values(SPECS, 2), Layout(2), run_state() | {"x": 1}
    )
    assert [type(result) for result in results] == [ValueError, StorageError]
    assert "could not be read again: state has the unknown key 'x'" in str(results[0])
    assert names(tmp_path) == set()


def test_a_rank_that_sees_another_file_system_is_named(tmp_path: Path) -> None:
    """Two nodes without a common directory get an error that says so, not a hang."""
    for result in saved_by_all(
        lambda rank: tmp_path / f"node_{rank}", 20, random_values(SPECS, 2), Layout(2)
    ):
        assert isinstance(result, StorageError)
        assert "rank 1: " in str(result) and "all ranks need the same file system" in str(result)


# -- replacing and deleting
# -------------------------------------------------------------------------------------------


def test_saving_an_iteration_again_replaces_it(tmp_path: Path) -> None:
    """After a rollback the run reaches the same iteration again, perhaps with another number of
    ranks."""
    save(tmp_path, 10, 1, world_size=3)
    new = save(tmp_path, 10, 2, world_size=2)
    assert same(load(tmp_path)[1], new)
    assert names(tmp_path) == {"10"}
    assert names(tmp_path / "10") == {
        "manifest.json",
        "rank_000.safetensors",
        "rank_001.safetensors",
    }


@pytest.mark.parametrize("kind", ["damaged", "empty", "file", "link", "dangling", "copy"])
def test_incomplete_checkpoints_are_moved_aside(kind: str, tmp_path: Path) -> None:
    """A damaged folder, a file or a link under the iteration's name is kept under another name."""
    root = tmp_path / "root"
    save(root, 9, 1)
    if kind == "damaged":
        save(root, 10, 1)
        (root / "10" / "manifest.json").write_text("{}")
    elif kind == "empty":
        (root / "10").mkdir()
    elif kind == "file":
        (root / "10").write_text("mine")
    elif kind == "copy":  # a valid checkpoint, but of iteration 9
        save(tmp_path / "other", 9, 5)
        os.rename(tmp_path / "other" / "9", root / "10")
    else:
        target = tmp_path / "elsewhere"
        if kind == "link":
            target.mkdir()
            (target / "canary").write_text("alive")
        (root / "10").symlink_to(target)
    new = save(root, 10, 2)
    loaded, values, lines = load(root)
    assert loaded is not None and loaded.iteration == 10 and same(values, new) and lines == []
    (aside,) = names(root) - {"9", "10"}
    assert aside.startswith("10.aside-")
    if kind == "link":
        assert (tmp_path / "elsewhere" / "canary").read_text() == "alive"
    save(root, 11, 3)
    assert aside in names(root)


def test_leftovers_are_swept_without_following_links(tmp_path: Path) -> None:
    """Our files in our temporary folders go; links, their targets and files of others stay."""
    canary = tmp_path / "elsewhere"
    canary.mkdir()
    (canary / "rank_000.safetensors").write_text("alive")
    root = tmp_path / "root"
    root.mkdir()
    plain, mixed = root / ".tmp-5-0123456789abcdef", root / ".trash-6-0123456789abcdef"
    for folder in (plain, mixed):
        folder.mkdir()
        (folder / "rank_000.safetensors").write_text("partial")
        (folder / "rank_001.safetensors").symlink_to(canary / "rank_000.safetensors")
    (mixed / "notes.txt").write_text("mine")
    (mixed / "manifest.json").mkdir()
    (root / ".tmp-7-0123456789abcdef").symlink_to(canary)
    (root / ".tmp-8-short").mkdir()
    (root / ".tmp-9-0123456789abcdef").write_text("a file")
    save(root, 10, 1)
    assert names(root) == {
        "10",
        mixed.name,
        ".tmp-7-0123456789abcdef",
        ".tmp-8-short",
        ".tmp-9-0123456789abcdef",
    }
    assert names(mixed) == {"notes.txt", "manifest.json"}
    assert (canary / "rank_000.safetensors").read_text() == "alive"


def test_pruning_keeps_the_newest_good_ones(tmp_path: Path) -> None:
    """Only complete checkpoints count; damaged ones, links, files and other folders are left
    alone."""
    root = tmp_path / "root"
    for iteration in (1, 2, 3, 4, 5, 30):
        save(root, iteration, iteration)
    canary = tmp_path / "elsewhere"
    save(canary, 6, 6)
    (root / "6").symlink_to(canary / "6")
    (root / "7").mkdir()
    (root / "8").write_text("")
    (root / "best").mkdir()
    os.truncate(root / "2" / "rank_000.safetensors", 100)
    (root / "3" / "manifest.json").write_text("{}")
    retention.prune(root, None, 5)
    assert {"1", "2", "3", "4", "5"} <= names(root)
    retention.prune(root, 1, 5)
    assert names(root) == {"2", "3", "5", "6", "7", "8", "30", "best"}
    assert names(canary / "6") == {"manifest.json", "rank_000.safetensors"}
    retention.prune(root, 1)
    assert names(root) == {"2", "3", "6", "7", "8", "30", "best"}


def test_a_list_that_cannot_be_read_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The new checkpoint is there: a storage that fails for a moment afterwards must not end the
    run."""
    for iteration in (1, 2):
        save(tmp_path, iteration, iteration)

    def fail(root: Path) -> list[tuple[int, Path]]:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(root))

    with monkeypatch.context() as patch:
        patch.setattr(retention.names, "find_checkpoints", fail)
        retention.prune(tmp_path, 1, 2)
    assert (
        names(tmp_path) == {"1", "2"} and "no old checkpoint is deleted: cannot read" in caplog.text
    )
    retention.prune(tmp_path, 1, 2)
    assert names(tmp_path) == {"2"}


def test_pruning_leaves_the_files_of_others(tmp_path: Path) -> None:
    """A foreign file in a checkpoint is kept."""
    for iteration in (1, 2):
        save(tmp_path, iteration, iteration)
    (tmp_path / "1" / "notes.txt").write_text("mine")
    retention.prune(tmp_path, 1, 2)
    (left,) = names(tmp_path) - {"2"}
    assert left.startswith(".trash-1-") and names(tmp_path / left) == {"notes.txt"}


def test_a_failing_deletion_is_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The checkpoint just saved is good, so the run continues."""
    for iteration in (1, 2):
        save(tmp_path, iteration, iteration)

    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    with caplog.at_level("WARNING", logger="megatron_lite"):
        retention.prune(tmp_path, 1, 2)
    assert f"cannot delete the old checkpoint {tmp_path}/1: Permission denied" in caplog.text
