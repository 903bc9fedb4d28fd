"""--mirror against a store that goes silent: on connections that stay open, and of which no library
says a word."""

import asyncio
import logging
import socket
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem

from megatron_lite.checkpoint import mirror
from megatron_lite.errors import StorageError, UsageError
from megatron_lite.run import remote_storage
from megatron_lite.run.remote_storage import Storage
from megatron_lite.run.silence import Line
from tests.checkpoint.test_mirror import content, copied, run_folder, through
from tests.support.mirrors import WITHIN_S, finish, make, restore, wait_until
from tests.support.s3_server import Proxy, S3Server

FOR_GOOD_S = 10**4  # nothing may wait for so long
SILENT_S = 5.0  # longer than a loaded machine takes to answer


def test_an_upload_that_went_silent_is_tried_again_on_a_new_connection(
    bucket: Any,
    server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The old connections stay dead, as behind a firewall; the store is said once to be silent, and
    gets everything."""
    root, pauses = run_folder(tmp_path / "a", 10), list[int]()
    monkeypatch.setattr(mirror, "pause_s", lambda attempt: pauses.append(attempt) or 0.01)
    with Proxy(server.port, stay_dead=True).listen() as proxy, through(proxy):
        with caplog.at_level(logging.INFO, "megatron_lite"):
            made = make(root, f"s3://{bucket.name}/run", mirror_timeout=SILENT_S)
            made.compare()  # opens connections
            proxy.open.clear()
            made.update()
            wait_until(lambda: len(pauses) >= 2)
            proxy.open.set()
            finish(made)
    lines = [one.getMessage() for one in caplog.records]
    assert (
        len(
            [
                line
                for line in lines
                if f"no byte has moved for {SILENT_S:g} s; training goes on, the next" in line
            ]
        )
        == 1
    )
    assert len([line for line in lines if line.endswith("works again")]) == 1
    assert content(bucket).items() >= copied(root).items()


@pytest.mark.parametrize("pause_s", [None, 0.05], ids=["silent", "slow"])
def test_the_end_of_a_run_waits_only_for_a_store_that_moves(
    pause_s: float | None,
    bucket: Any,
    server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After a signal, silence counts from its first moment, long before the limit on it, and 40 kB/s
    are no better."""
    monkeypatch.setattr(mirror, "STOPPED_PATIENCE_S", 1.0)
    root = run_folder(tmp_path / "a", 10)
    (root / "checkpoints" / "10" / "rank_000.safetensors").write_bytes(bytes(10**6))
    with Proxy(server.port, pause_s=pause_s or 0.0).listen() as proxy, through(proxy):
        made = make(root, f"s3://{bucket.name}/run", mirror_timeout=FOR_GOOD_S)
        if pause_s is None:
            proxy.open.clear()
        begin_s = time.monotonic()
        made.close(FOR_GOOD_S, None)
        assert time.monotonic() - begin_s < WITHIN_S
    assert "lacks checkpoints/10, export/10; the next start" in caplog.text


def test_a_store_fails_from_the_first_moment_of_its_silence(
    bucket: Any, server: S3Server, tmp_path: Path
) -> None:
    """A stopped run counts its patience from there, not from the end of the call that has waited."""
    with Proxy(server.port).listen() as proxy, through(proxy):
        made = make(
            run_folder(tmp_path / "a", 10), f"s3://{bucket.name}/run", mirror_timeout=SILENT_S
        )
        proxy.open.clear()
        made.update()
        wait_until(lambda: made._failed_s is not None)
        assert time.monotonic() - (made._failed_s or 0.0) >= 1.0


def test_a_start_says_what_it_waits_for_and_ends(
    bucket: Any, server: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The line comes before the wait, whose limit --startup_timeout may make shorter."""
    address = f"s3://{bucket.name}/run"
    with (
        Proxy(server.port).listen() as proxy,
        through(proxy),
        caplog.at_level(logging.INFO, "megatron_lite"),
    ):
        proxy.open.clear()
        options = make(tmp_path / "a", address)._options
        made = mirror.Mirror(tmp_path / "b", options, startup_timeout_s=1.0)
        assert caplog.records[-1].getMessage() == f"asking --mirror={address} what it holds"
        with pytest.raises(
            StorageError, match="no byte has moved for 1 s; a start compares its directory"
        ):
            restore(made)


@pytest.mark.slow
def test_a_slow_store_that_lives_gets_everything(
    bucket: Any, server: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """20 kB/s, for three times the limit of silence: no attempt is given up."""
    root = run_folder(tmp_path / "a", 10)
    (root / "export" / "10" / "model.safetensors").write_bytes(bytes(600_000))
    with Proxy(server.port, pause_s=0.1).listen() as proxy, through(proxy):
        finish(make(root, f"s3://{bucket.name}/run", mirror_timeout=10.0))
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert content(bucket).items() >= copied(root).items()


def test_only_silence_ends_a_call() -> None:
    """A byte now and then, in either direction, is no silence; then the connection is closed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        line = Line(2.0)
        ours = line.open_socket((socket.AF_INET, socket.SOCK_STREAM, 0))
        ours.connect(("127.0.0.1", port))
        theirs, _ = listener.accept()
        with ours, theirs:

            async def moving(seconds: int) -> str:
                for place in range(5 * seconds):
                    (ours if place % 2 else theirs).sendall(b"x")
                    await asyncio.sleep(0.2)
                return "done"

            assert line.wait_for(moving(4)) == "done" and line.silent_s == 0.0
            with pytest.raises(TimeoutError, match="no byte has moved for 2 s"):
                line.wait_for(asyncio.sleep(FOR_GOOD_S))
            assert line.silent_s == 2.0 and theirs.recv(1000).strip(b"x") == b""
            theirs.settimeout(WITHIN_S)
            assert theirs.recv(1) == b"", "closed"


class Unwatched(AsyncFileSystem):  # type: ignore[misc]
    """A library that opens connections of its own."""

    protocol = "unwatched"

    async def _cat_file(self, path: str, **options: Any) -> bytes:
        await asyncio.sleep(1.0)
        return b"read"


def test_nothing_is_silent_whose_bytes_nobody_counts() -> None:
    fsspec.register_implementation("unwatched", Unwatched, clobber=True)
    assert Storage("unwatched://bucket", "mirror", 0.4).call("cat_file", "name") == b"read"


def test_without_an_account_a_mirror_in_gcs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, before anything is asked of the store; public data are read without."""
    pytest.importorskip("google.auth")
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST", "CLOUDSDK_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    with pytest.raises(
        UsageError, match="^--mirror=gs://bucket/run: no Google account; name a key file in GOOGLE"
    ) as error:
        Storage("gs://bucket/run", "mirror", anonymous=False)
    assert "\n" not in str(error.value)


def test_a_search_for_an_account_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Google's library asks a metadata server behind a firewall for half a minute."""
    auth = pytest.importorskip("google.auth")
    found = threading.Event()

    def search(_: Any) -> None:
        found.wait(3 * WITHIN_S)
        raise auth.exceptions.DefaultCredentialsError

    monkeypatch.setattr(auth, "default", search)
    monkeypatch.setattr(remote_storage, "_ACCOUNT_S", 0.1)
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    begin_s = time.monotonic()
    with pytest.raises(UsageError, match="no Google account; name a key file in GOOGLE"):
        Storage("gs://bucket/run", "mirror", anonymous=False)
    assert time.monotonic() - begin_s < WITHIN_S
    found.set()
