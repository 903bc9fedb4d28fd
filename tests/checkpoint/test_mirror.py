"""--mirror against moto's S3 server and against a folder: what counts there is whole, and comes
back bit for bit.

The server is refused, cut, held up and given wrong keys, as real ones are; only pauses are shorter.
"""

import contextlib
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs

from megatron_lite.checkpoint import mirror, retention
from megatron_lite.checkpoint.resume import set_aside
from megatron_lite.config import CheckpointConfig, Config
from megatron_lite.config.structured_values import storage_address
from megatron_lite.errors import CheckpointError, StorageError, UsageError
from megatron_lite.run.remote_storage import failure
from tests.support.harness import FORKSERVER
from tests.support.launch import TINY, succeed
from tests.support.mirrors import RUN, finish, make, restore, save, wait_until
from tests.support.results import checkpoints, curve, digests, weights
from tests.support.s3_server import VARIABLES, Proxy, S3Server

CANARIES = [
    VARIABLES[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
]
LAST_SAVE = 12


@contextlib.contextmanager
def through(proxy: Proxy) -> Iterator[None]:
    """Let new mirrors reach their store through a proxy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        s3fs.S3FileSystem.clear_instance_cache()
        yield
    s3fs.S3FileSystem.clear_instance_cache()


def run_folder(root: Path, *iterations: int, ranks: int = 2) -> Path:
    """Save checkpoints, an export and records, as a run does."""
    root.mkdir()
    for iteration in iterations:
        save(root / "checkpoints", iteration, iteration, ranks)
    export = root / "export" / "10"
    export.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (export / name).write_text(f"{name} of the export")
    (root / "metrics.jsonl").write_text('{"iteration": 10}\n{"iterat')
    (root / "wandb.json").write_text('{"id": "abc"}\n')
    return root


def content(bucket: Any) -> dict[str, bytes]:
    return {one.key: one.get()["Body"].read() for one in bucket.objects.all()}


def copied(root: Path) -> dict[str, bytes]:
    """Return what the mirror of a folder must hold, without the marks of exports."""
    paths = [path for path in root.rglob("*") if path.is_file()]
    found = {f"run/{path.relative_to(root)}": path.read_bytes() for path in paths}
    return {
        name: data[: data.rfind(b"\n") + 1] if name.endswith(".jsonl") else data
        for name, data in found.items()
    }


def post(url: str, data: bytes) -> None:
    with urllib.request.urlopen(
        urllib.request.Request(url, data, {"Content-Type": "text/plain"}, method="POST")
    ):
        pass


def same_checkpoint(one: Path, other: Path, iteration: int) -> bool:
    folders = (root / "checkpoints" / str(iteration) for root in (one, other))
    return digests(next(folders)) == digests(next(folders))


def test_s3_gets_the_layout_of_the_folder_and_each_mark_last(
    bucket: Any, server: S3Server, tmp_path: Path
) -> None:
    """Keys and bytes below the address are those of the folder; a mark is the last file; nothing
    goes twice."""
    root = run_folder(tmp_path / "a", 10, 20)
    shutil.copytree(root / "export" / "10", root / "export" / "best")
    finish(make(root, f"s3://{bucket.name}/run"))
    found = content(bucket)
    assert found.pop("run/export/10/mirror.json") and found.pop("run/export/best/mirror.json")
    assert json.loads(found.pop("run/mirror.json"))["run"] == RUN
    assert found == copied(root)
    puts = [path.removeprefix(f"/{bucket.name}/run/") for path in server.take("PUT")]
    assert len(puts) == len(set(puts))
    for folder, mark in (
        ("checkpoints/10", "manifest"),
        ("checkpoints/20", "manifest"),
        ("export/10", "mirror"),
    ):
        inside = [path for path in puts if path.startswith(folder)]
        assert inside[-1] == f"{folder}/{mark}.json" and len(inside) > 2, inside
    assert puts.index("checkpoints/20/manifest.json") < puts.index(
        "checkpoints/10/manifest.json"
    ), "the newest first"


@pytest.mark.parametrize("kind", ["s3", "folder", pytest.param("file", marks=pytest.mark.slow)])
def test_an_empty_folder_gets_the_newest_whole_checkpoint(
    kind: str, bucket: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Half and damaged ones are named and skipped, older ones are tried, records come along."""
    place = tmp_path / "store" / "run"
    address = {"s3": f"s3://{bucket.name}/run", "folder": str(place), "file": f"file://{place}"}[
        kind
    ]
    root = run_folder(tmp_path / "a", 10, 20, 30)
    finish(make(root, address))
    if kind == "s3":
        bucket.Object("run/checkpoints/30/manifest.json").delete()
        damaged = bytearray(
            bucket.Object("run/checkpoints/20/rank_001.safetensors").get()["Body"].read()
        )
        damaged[-1] ^= 1
        bucket.Object("run/checkpoints/20/rank_001.safetensors").put(Body=bytes(damaged))
    else:
        assert {f"run/{name}" for name in digests(place)} - {
            "run/export/10/mirror.json",
            "run/mirror.json",
        } == set(copied(root))
        (place / "checkpoints/30/manifest.json").unlink()
        with open(place / "checkpoints/20/rank_001.safetensors", "r+b") as file:
            file.truncate(100)
    with caplog.at_level(logging.INFO, "megatron_lite"):
        restore(make(tmp_path / "b", address))
    assert checkpoints(tmp_path / "b") == [10] and same_checkpoint(root, tmp_path / "b", 10)
    assert (tmp_path / "b" / "metrics.jsonl").read_text() == '{"iteration": 10}\n'
    assert (tmp_path / "b" / "wandb.json").read_text() == '{"id": "abc"}\n'
    half, bad, restored = (record.getMessage() for record in caplog.records[-3:])
    assert "checkpoints/30 is not complete; skipped" in half
    assert "checkpoints/20: rank_001.safetensors: " in bad
    assert restored.startswith(f"restored checkpoints/10 from --mirror={address}")
    restore(make(root, address))
    assert checkpoints(root) == [10, 20, 30], "a directory that is whole needs no other"


def test_only_damaged_checkpoints_end_the_start_and_an_empty_store_does_not(
    bucket: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With none usable a run does not restart from zero by itself; without any, one line says
    so."""
    address = f"s3://{bucket.name}/run"
    with caplog.at_level(logging.INFO, "megatron_lite"):
        restore(make(tmp_path / "b", address))
    assert caplog.records[-1].getMessage() == f"--mirror={address} holds no checkpoint"
    finish(make(run_folder(tmp_path / "a", 10), address))
    bucket.Object("run/checkpoints/10/rank_000.safetensors").delete()
    with pytest.raises(CheckpointError, match=r"(?s)no usable checkpoint.*checkpoints/10: "):
        restore(make(tmp_path / "b", address))
    assert (
        f"--mirror={address}: checkpoints/10: rank_000" in caplog.text
        and checkpoints(tmp_path / "b") == []
    )
    with pytest.raises(StorageError, match="bucket does not exist; .*leave the flag out"):
        restore(make(tmp_path / "b", "s3://no-such-bucket/run"))


def test_going_back_restores_what_the_flag_names(bucket: Any, tmp_path: Path) -> None:
    """--resume_iteration=10 restores that one; once the run has saved under that flag, the newest
    of those."""
    address = f"s3://{bucket.name}/run"
    root = run_folder(tmp_path / "a", 10, 40)
    finish(make(root, address))
    restore(make(tmp_path / "b", address, resume_iteration=10))
    assert checkpoints(tmp_path / "b") == [10]
    back = restore(make(root, address, resume_iteration=10))
    before = {key: data for key, data in content(bucket).items() if "checkpoints/40/" in key}
    back.set_aside(10)
    set_aside(root / "checkpoints", 10)
    save(
        root / "checkpoints", 20, 1, config=Config(checkpoint=CheckpointConfig(resume_iteration=10))
    )
    finish(back)
    moved = {
        key.replace("checkpoints/", "checkpoints/set_aside/1/"): data
        for key, data in before.items()
    }
    found = content(bucket)
    assert {key: found[key] for key in found if "/40/" in key} == moved and len(moved) > 2
    restore(make(tmp_path / "c", address, resume_iteration=10))
    assert checkpoints(tmp_path / "c") == [20]


# -- faults
# ------------------------------------------------------------------------------------------------------------


def fail_once(made: mirror.Mirror, caplog: pytest.LogCaptureFixture) -> None:
    """Upload until the first warning, however long a busy machine takes for it, then end."""
    made.update()
    wait_until(lambda: any("the next attempt is in" in one.getMessage() for one in caplog.records))
    made.close(0.1, None)


def test_a_cut_upload_continues_with_what_is_missing(
    bucket: Any, server: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What had arrived whole is not sent again, what was cut is; nothing counted before; a warning
    is one line."""
    root = run_folder(tmp_path / "a", 10, ranks=4)
    size = (root / "checkpoints/10/rank_000.safetensors").stat().st_size
    with Proxy(server.port, cut_after=3 * size).listen() as proxy, through(proxy):
        fail_once(make(root, f"s3://{bucket.name}/run"), caplog)
        there = content(bucket)
    assert "run/checkpoints/10/manifest.json" not in there
    ranks = {f"run/checkpoints/10/rank_{rank:03d}.safetensors" for rank in range(4)}
    assert 0 < len(ranks & set(there)) < 4
    warning, lacks = (one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING)
    assert "training goes on, the next attempt is in" in warning and "\n" not in warning
    assert (
        "lacks checkpoints/10, export/10; the next start with the same command continues" in lacks
    )
    again = make(root, f"s3://{bucket.name}/run")
    again.compare()
    server.requests.clear()
    finish(again)
    sent = {path.removeprefix(f"/{bucket.name}/") for path in server.take("PUT")}
    assert {key for key in sent if "checkpoints" in key} == ranks - set(there) | {
        "run/checkpoints/10/manifest.json"
    }
    assert content(bucket).items() >= copied(root).items()


def test_a_store_that_refuses_is_tried_until_it_works(
    bucket: Any,
    server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One warning at the first failure, one line when it works again; a start that needs the store
    is refused."""
    root, address = run_folder(tmp_path / "a", 10), f"s3://{bucket.name}/run"
    with (
        Proxy(server.port) as proxy,
        through(proxy),
        caplog.at_level(logging.INFO, "megatron_lite"),
    ):
        with pytest.raises(
            StorageError,
            match=r"Could not connect to the endpoint .*a start compares its directory",
        ):
            restore(make(tmp_path / "b", address))
        attempts: list[int] = []
        monkeypatch.setattr(mirror, "pause_s", lambda attempt: attempts.append(attempt) or 0.01)
        made = make(root, address)
        made.update()
        wait_until(lambda: len(attempts) >= 3)
        proxy.listen()
        finish(made)
    lines = [one.getMessage() for one in caplog.records]
    assert attempts[:3] == [1, 2, 3]
    assert len([line for line in lines if "Could not connect" in line]) == 1
    assert len([line for line in lines if line.endswith("works again")]) == 1
    assert content(bucket).items() >= copied(root).items()


def test_wrong_keys_are_one_line_without_them(
    bucket: Any, server: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither key, secret nor token is shown, whether a start is refused or an upload fails."""
    root, address = run_folder(tmp_path / "a", 10), f"s3://{bucket.name}/run"
    post(f"{server.url}/moto-api/reset-auth", b"0")
    try:
        with pytest.raises(StorageError) as refused:
            restore(make(tmp_path / "b", address))
        fail_once(make(root, address), caplog)
    finally:
        post(f"{server.url}/moto-api/reset-auth", b"inf")
    texts = [str(refused.value), *(one.getMessage() for one in caplog.records)]
    assert len(texts) == 3 and all("\n" not in text for text in texts)
    assert all(
        "does not exist in our records" in text or "Forbidden" in text for text in texts[:2]
    ), texts
    assert not [canary for canary in CANARIES for text in texts if canary in text]


@pytest.mark.parametrize(
    ("address", "rule"),
    [
        ("s3://", "must be the address of a folder, as in s3"),
        ("S3://bucket/run", "must be the address of a folder, as in s3"),
        ("simplecache::s3://bucket/run", "must be the address of a folder, as in s3"),
    ],
)
def test_addresses_are_checked_first(address: str, rule: str) -> None:
    """An address has a scheme, a bucket and no second address."""
    with pytest.raises(UsageError, match=rule):
        storage_address(address, "mirror")


def test_errors_show_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a library writes about a store becomes one line without the values of secret
    variables."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary/secret")
    monkeypatch.setenv("MY_STORE_TOKEN", "canary-token")
    text = failure(
        OSError(
            "https://user:canary-pw@host/a?sig=canary-sig\n failed: canary/secret, canary-token"
        )
    )
    assert "canary" not in text and "\n" not in text and text.startswith("https://...")


def test_a_missing_package_or_scheme_is_a_usage_error(tmp_path: Path) -> None:
    """Both name the flag and the fix; without --mirror nothing is imported."""
    with pytest.raises(UsageError, match=r"--mirror=abfs://.*pip install '.\[remote\]'"):
        make(tmp_path, "abfs://bucket/run")
    with pytest.raises(UsageError, match=r"--mirror=nowhere://bucket.*give s3://"):
        make(tmp_path, "nowhere://bucket/run")
    code = "import sys, megatron_lite.run.remote_storage; sys.exit('fsspec' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )


# -- while a run trains
# ------------------------------------------------------------------------------------------------


def test_a_slow_store_holds_up_nothing_and_gets_whole_checkpoints(
    bucket: Any, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the store stands still, a run saves on; what is under upload stays until it is
    there."""
    root = run_folder(tmp_path / "a", 10)
    with Proxy(server.port).listen() as proxy, through(proxy):
        made = make(root, f"s3://{bucket.name}/run", max_checkpoints=1)
        (root / "metrics.jsonl").unlink()  # so that the checkpoint comes first
        (root / "wandb.json").unlink()
        # the checkpoint meets the slow store
        monkeypatch.setattr(made, "_check_claim", lambda: None)
        proxy.open.clear()
        made.update()
        wait_until(lambda: made.held() == {10})
        for iteration in (20, 30, 40):
            save(root / "checkpoints", iteration, iteration, 2)
            retention.prune(root / "checkpoints", 1, iteration, held=made.held())
            made.update((1, iteration, None, made.held()))
        assert checkpoints(root) == [10, 40] and made.held() == {10}
        proxy.open.set()
        finish(made)
    puts = [path.split("/")[-2] for path in server.take("PUT") if path.endswith("manifest.json")]
    # the library sends again what took long on a busy machine
    assert [*dict.fromkeys(puts)] == ["10", "40"]


def test_adapters_and_merged_models_are_there_too(tmp_path: Path) -> None:
    root = run_folder(tmp_path / "a", 10)
    files = [f"{name}/adapter_config.json" for name in ("best", "10")]
    files += [f"merged/{name}/config.json" for name in ("best", "10")]
    for name in files:
        (root / "export" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "export" / name).write_text(name)
    finish(make(root, str(tmp_path / "store")))
    for name in files:
        assert (tmp_path / "store" / "export" / name).read_text() == name


def test_the_best_checkpoint_and_its_export_are_there_too(tmp_path: Path) -> None:
    """A restore brings the checkpoint that the newest one names as the best; a replaced export/best
    is sent again."""
    root = run_folder(tmp_path / "a", 10, 20)
    store = tmp_path / "store"
    elsewhere = tmp_path / "b"
    counts = {"measured": "0" * 16, "value": (1.0).hex(), "iteration": 10, "seen": 30, "bad": 1}
    save(root / "checkpoints", 30, 30, state={"best": counts})
    made = make(root, str(store), max_checkpoints=1)
    for text in ("first", "a better one"):
        (root / "export" / "new").mkdir()
        (root / "export" / "new" / "config.json").write_text(text)
        shutil.rmtree(root / "export" / "best", ignore_errors=True)
        (root / "export" / "new").rename(root / "export" / "best")
        finish(made)
        assert (store / "export" / "best" / "config.json").read_text() == text
    restore(make(elsewhere, str(store)))
    assert checkpoints(elsewhere) == [10, 30] and same_checkpoint(root, elsewhere, 10)
    shutil.rmtree(elsewhere)
    (store / "checkpoints" / "10" / "manifest.json").unlink()
    restore(make(elsewhere, str(store)))
    assert checkpoints(elsewhere) == [30]


def test_rotation_follows_after_the_newer_one_is_there(
    bucket: Any, server: S3Server, tmp_path: Path
) -> None:
    """Temporary ones go, manifest first, also those that were never here; permanent ones stay."""
    address, before = f"s3://{bucket.name}/run", tmp_path / "a"
    before.mkdir()
    kept = Config(checkpoint=CheckpointConfig(keep_checkpoints=("20",)))
    for iteration, config in ((10, Config()), (20, kept), (30, Config()), (40, Config())):
        save(before / "checkpoints", iteration, iteration, config=config)
    finish(make(before, address))
    elsewhere = tmp_path / "b"
    made = make(elsewhere, address, max_checkpoints=2)
    restore(made)
    assert checkpoints(elsewhere) == [40]
    finish(made)
    assert not server.take("DELETE"), "nothing is deleted before this run has saved"
    save(elsewhere / "checkpoints", 50, 50)
    made.update((2, 50, None, set()))
    finish(made)
    there = sorted({int(key.split("/")[2]) for key in content(bucket) if "/checkpoints/" in key})
    assert there == [20, 40, 50]
    order = [
        (method, path) for method, path in server.requests if method in ("PUT", "DELETE", "POST")
    ]
    first = next(index for index, (method, _) in enumerate(order) if method == "DELETE")
    assert ("PUT", f"/{bucket.name}/run/checkpoints/50/manifest.json") in order[:first]
    assert order[first][1].endswith("/manifest.json")
    save(elsewhere / "checkpoints", 60, 60)
    # the thread has found and sent it before the run deletes another and tells what is to stay
    finish(made)
    shutil.rmtree(elsewhere / "checkpoints" / "40")
    made.update((2, 60, None, set()))
    finish(made)
    assert sorted(
        {int(key.split("/")[2]) for key in content(bucket) if "/checkpoints/" in key}
    ) == [20, 50, 60]


def test_another_save_of_an_iteration_replaces_the_first(
    bucket: Any, server: S3Server, tmp_path: Path
) -> None:
    """Its manifest goes first, so that at no moment the files of two saves count as one; exports
    likewise."""
    root, address = run_folder(tmp_path / "a", 10), f"s3://{bucket.name}/run"
    made = make(root, address)
    finish(made)
    shutil.rmtree(root / "checkpoints" / "10")
    save(root / "checkpoints", 10, 99, 3)
    shutil.rmtree(root / "export" / "10")
    (root / "export" / "10").mkdir()
    for name, text in (
        ("config.json", "config.json of the export"),
        ("model.safetensors", "MODEL of the export"),
    ):
        (root / "export" / "10" / name).write_text(text)  # the first as before
    server.requests.clear()
    finish(made)
    changes = [
        (method, path) for method, path in server.requests if method in ("PUT", "DELETE", "POST")
    ]
    inside = [change for change in changes if "/checkpoints/10" in change[1]]
    assert inside[0] == ("DELETE", f"/{bucket.name}/run/checkpoints/10/manifest.json")
    assert inside[-1] == ("PUT", f"/{bucket.name}/run/checkpoints/10/manifest.json")
    found = content(bucket)
    assert found.pop("run/export/10/mirror.json") and found.pop("run/mirror.json")
    assert found == copied(root)


def test_a_folder_replaced_during_its_upload_does_not_count(
    bucket: Any, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of two exports never count as one: the mark comes after the files of the second."""
    root, address = run_folder(tmp_path / "a", 10), f"s3://{bucket.name}/run"
    folder, later = root / "export" / "10", root / "export" / ".later"
    made = make(root, address)
    upload = made._remote.upload

    def replacing(path: Path, name: str, told: Any) -> int:
        if path.name == "model.safetensors" and not later.exists():
            shutil.copytree(folder, later)
            (later / "model.safetensors").write_text("of the second")
            os.rename(folder, root / "export" / ".old")
            os.rename(later, folder)
            later.mkdir()
        return upload(path, name, told)

    monkeypatch.setattr(made._remote, "upload", replacing)
    finish(made)
    changes = [
        (method, path.rpartition("/")[2])
        for method, path in server.requests
        if "export/10/" in path
    ]
    assert [name for method, name in changes if method == "PUT"].count("mirror.json") == 1
    assert content(bucket)["run/export/10/model.safetensors"] == b"of the second"


# -- whole runs
# --------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_elsewhere_bit_for_bit(bucket: Any, server: S3Server, tmp_path: Path) -> None:
    """The machine's folder is removed after four of six iterations; the same command in an empty
    one goes on.

    Two ranks; weights, moments, exports and metrics.jsonl are compared, and no secret is in any
    file or output.
    """
    flags = [
        *TINY,
        *"--checkpoint_interval=2 --max_checkpoints=1 --export_interval=3 --hidden_dropout=0.1".split(),
    ]
    environment = {**VARIABLES, "AWS_ENDPOINT_URL": server.url}
    mirrored = [*flags, f"--mirror=s3://{bucket.name}/run"]
    first = tmp_path / "run"
    elsewhere = tmp_path / "other" / "run"
    reference = tmp_path / "reference" / "run"
    outcome = succeed(
        [*mirrored, f"--experiment_dir={first}", "--stop_interval=4"], 2, variables=environment
    )
    assert outcome.stdouts[0].splitlines()[-1].startswith("stopped at iteration 4 of 6 as planned")
    export = (first / "export" / "3" / "model.safetensors").read_bytes()
    texts = [
        path.read_text("utf-8")
        for path in first.rglob("*.*")
        if path.suffix in (".json", ".jsonl", ".txt")
    ]
    shutil.rmtree(first)
    succeed([*flags, f"--experiment_dir={reference}"], 2)
    resumed = succeed([*mirrored, f"--experiment_dir={elsewhere}"], 2, variables=environment)
    assert "restored checkpoints/4 from" in resumed.output and "at iteration 4" in resumed.output
    assert curve(elsewhere) == curve(reference) and weights(elsewhere) == weights(reference)
    names = [
        reference / "export" / "6" / "model.safetensors",
        elsewhere / "export" / "6" / "model.safetensors",
    ]
    assert names[0].read_bytes() == names[1].read_bytes()
    assert (reference / "export" / "3" / "model.safetensors").read_bytes() == export
    keys = set(content(bucket))
    assert {key.split("/")[2] for key in keys if key.startswith("run/checkpoints/")} == {"6"}
    assert {"run/export/3/mirror.json", "run/export/6/mirror.json", "run/metrics.jsonl"} <= keys
    texts += [outcome.output, resumed.output]
    assert not [canary for canary in CANARIES for text in texts if canary in text]


@pytest.mark.slow
def test_fifty_kills_leave_whole_checkpoints_or_none(
    bucket: Any, server: S3Server, tmp_path: Path
) -> None:
    """SIGKILL at drawn moments while saves are mirrored and rotated: a start elsewhere gets a whole
    one, or none.

    Every kill ends a process of its own, which went on from what the one before had left. No
    restore goes back.
    """
    environment = {**VARIABLES, "AWS_ENDPOINT_URL": server.url}
    saves = tmp_path / "saves"
    generator = random.Random(time.time_ns())
    newest = 0
    outcomes = list[int]()
    saves.mkdir()
    for iteration in range(1, LAST_SAVE + 1):
        save(saves, iteration, iteration, 4)
    address = f"s3://{bucket.name}/run"
    for kill in range(50):
        root, elsewhere = tmp_path / f"run-{kill}", tmp_path / f"elsewhere-{kill}"
        # requests after which it dies
        seen = len(server.requests)
        changes = generator.randrange(80)
        process = FORKSERVER.Process(target=mirror_saves, args=(environment, saves, root, address))
        process.start()
        wait_until(lambda: len(server.requests) >= seen + changes or not process.is_alive())  # noqa: B023
        time.sleep(generator.random() * 0.01)
        process.kill()
        process.join()
        restore(make(elsewhere, address))
        found = checkpoints(elsewhere)
        assert len(found) == 1 or (not found and newest == 0), (
            f"kill {kill}: {newest} was there before"
        )
        for iteration in found:
            assert digests(elsewhere / "checkpoints" / str(iteration)) == digests(
                saves / str(iteration)
            )
            assert iteration >= newest, f"kill {kill}: {newest} was there before"
            newest = iteration
        outcomes.append(newest)
        if newest == LAST_SAVE:
            address, newest = f"s3://{bucket.name}/run-{kill}", 0
    assert len(set(outcomes)) > 4, f"the kills did not fall into the uploads: {outcomes}"


def mirror_saves(environment: dict[str, str], saves: Path, root: Path, address: str) -> None:
    """Publish saves one after the other, from the one that the mirror restores on, and rotate
    both."""
    os.environ.update(environment)
    made = make(root, address, max_checkpoints=2)
    restore(made)
    folder = root / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    for iteration in range(max(checkpoints(root), default=0) + 1, LAST_SAVE + 1):
        shutil.copytree(saves / str(iteration), folder / ".tmp")
        os.rename(folder / ".tmp", folder / str(iteration))
        held = made.held()
        retention.prune(folder, 2, iteration, held=held)
        made.update((2, iteration, None, held))
        time.sleep(0.1)
    finish(made)
