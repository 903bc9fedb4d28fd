"""Time out a remote store that stays silent, whatever its library waits for.

Libraries limit connecting and reading, but not sending: s3fs sends the head of an upload and waits
for permission to send the body, and aiohttp waits until a body is sent, both forever. So this
module asks the kernel about each connection: how many bytes the other side has acknowledged, and
how many have arrived. A slow line moves.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import socket
import struct
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any, TypeVar

CONNECT_S = 10  # limit on an attempt to connect
_LOOK_S = 1.0  # at most, between looks at the connections
# tcpi_bytes_acked and tcpi_bytes_received of struct tcp_info
_COUNTS = struct.Struct("@QQ")
_OFFSET = 120
_TCP_INFO: int = getattr(socket, "TCP_INFO", 0)  # 0: not Linux, and there is no limit

T = TypeVar("T")


class Line:
    """The connections to a store.

    limit_s: how long no byte may move during a call. Time is counted in looks, so that a process
    that was stopped meanwhile does not count its own pause as silence.
    """

    def __init__(self, limit_s: float) -> None:
        import fsspec.asyn

        self._loop = fsspec.asyn.get_loop()
        self._limit_s, self._look_s = limit_s, min(_LOOK_S, limit_s / 4)
        self._counts = dict[socket.socket, int]()
        self.silent_s = 0.0  # how long the call under way has moved nothing, also once it failed
        self._moved_bytes = 0  # so far
        self._work: concurrent.futures.Future[Any] | None = None

    def open_socket(self, address: Any) -> socket.socket:
        """Open a socket for aiohttp. address: as returned by `socket.getaddrinfo`."""
        opened = socket.socket(*address[:3])
        self._counts[opened] = 0
        return opened

    def session(self) -> dict[str, Any]:
        """Return options for an aiohttp session with these connections, in which a transfer may
        last while it moves."""
        import aiohttp

        connector = aiohttp.TCPConnector(loop=self._loop, socket_factory=self.open_socket)
        return {
            "connector": connector,
            "timeout": aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        }

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a library's work.

        Raises:
            TimeoutError: if no byte has moved for too long. Closes all connections: the others may
                be dead as well.
        """
        return self._result(self._begin(work))

    def in_turn(self, works: Iterable[Coroutine[Any, Any, T]], at_a_time: int) -> Iterator[T]:
        """Yield the results of works in their order; the next ones are under way meanwhile. See
        `wait_for`; an error cancels what is under way."""
        begun = deque[concurrent.futures.Future[T]]()
        try:
            for work in works:
                begun.append(self._begin(work))
                if len(begun) == at_a_time:
                    yield self._result(begun.popleft())
            while begun:
                yield self._result(begun.popleft())
        finally:
            for future in begun:
                future.cancel()

    def _begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _result(self, future: concurrent.futures.Future[T]) -> T:
        self.silent_s = 0.0
        self._work = future
        try:
            self._moved()
            while not concurrent.futures.wait([future], self._look_s).done:
                self.silent_s = 0.0 if self._moved() else self.silent_s + self._look_s
                if self.silent_s >= self._limit_s:
                    raise TimeoutError(f"no byte has moved for {self._limit_s:g} s")
        except BaseException:
            self.close()
            raise
        self.silent_s = 0.0
        return future.result()

    def moved_bytes(self) -> float:
        """Return how many bytes have moved so far; not a number if none was counted."""
        return self._moved_bytes or math.nan

    def _moved(self) -> bool:
        """Return whether a byte has moved since the last look."""
        moved_bytes = self._moved_bytes
        for one, before in list(self._counts.items()):
            try:
                count = sum(
                    _COUNTS.unpack_from(one.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256), _OFFSET)
                )
            except OSError:  # closed
                del self._counts[one]
            else:
                self._counts[one] = count
                self._moved_bytes += count - before
        return self._moved_bytes > moved_bytes or not _TCP_INFO

    def close(self) -> None:
        """Close the connections. Another thread may do this; a call in progress then raises an
        error."""
        if self._work is not None:
            self._work.cancel()
        for one in list(self._counts):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
