"""moto's S3 server on loopback, and a proxy in front of it that refuses, cuts or holds up its
connections."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

VARIABLES = {
    "AWS_ACCESS_KEY_ID": "AKIACANARYCANARY",
    "AWS_SECRET_ACCESS_KEY": "canary/secret+canary/secret",
    "AWS_SESSION_TOKEN": "canary-token",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class S3Server:
    """`with S3Server() as server: ...`; `requests` are (method, path), in order of arrival."""

    def __init__(self) -> None:
        # Most processes of tests start none, and moto takes half a second.
        from moto.moto_server.werkzeug_app import (
            DomainDispatcherApplication,
            MotoRequestHandler,
            create_backend_app,
        )
        from werkzeug.serving import make_server

        class Quiet(MotoRequestHandler):
            def log_request(self, *_: Any) -> None:
                pass

        self.requests: list[tuple[str, str]] = []
        application = DomainDispatcherApplication(create_backend_app)

        def recorded(environ: dict[str, Any], start: Any) -> Any:
            self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
            return application(environ, start)

        self._server = make_server("127.0.0.1", 0, recorded, threaded=True, request_handler=Quiet)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> S3Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def take(self, method: str) -> list[str]:
        """Return the paths of requests by one method since the last call of `take`, and forget all
        of them."""
        taken, self.requests = self.requests, []
        return [path for found, path in taken if found == method]


class Proxy:
    """Passes connections on to a port while `open` is set; `cut_after` bytes to the server it
    closes all of them.

    It listens from `listen` on. Before, its port refuses connections. A connection that was open
    while `open` was not set is dead for good with `stay_dead`, as after a firewall has forgotten
    it. Each 2 kB wait for `pause_s`.
    """

    def __init__(
        self, port: int, cut_after: int | None = None, stay_dead: bool = False, pause_s: float = 0.0
    ) -> None:
        self._target = port
        self.left = cut_after
        self._lock = threading.Lock()
        self._stay_dead, self._pause_s = stay_dead, pause_s
        self._over = threading.Event()
        self.open = threading.Event()
        self.open.set()
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._pairs: list[socket.socket] = []

    def listen(self) -> Proxy:
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.open.set()
        self._over.set()
        for one in (self._listener, *self._pairs):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(("127.0.0.1", self._target))
                self._pairs += [here, there]
                threading.Thread(target=self._pump, args=(here, there, True), daemon=True).start()
                threading.Thread(target=self._pump, args=(there, here, False), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, to_server: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**14):
                if not self.open.is_set() and self._stay_dead:
                    self._over.wait()
                self.open.wait()
                if to_server and self.left is not None:
                    with self._lock:
                        data = data[: self.left]
                        self.left -= len(data)
                for place in range(0, len(data) if self._pause_s else 0, 2048):
                    self._over.wait(self._pause_s)
                    target.sendall(data[place : place + 2048])
                if not self._pause_s:
                    target.sendall(data)
                if self.left == 0:
                    break
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
