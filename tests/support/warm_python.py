"""A `python` that has imported torch already, for tests of commands: what bash runs by that name is
forked.

The interpreter's start and `import torch` take two seconds of a command. `folder()` holds a program
`python` for the front of PATH, and a `torchrun` that starts ranks with it. This `python` hands its
words, folder, environment and streams to a server, a fork of the harness's, and ends with the code
of the process that the server forks. Words that it cannot serve (`-X`, `-S`, an interactive
interpreter) go to the interpreter itself. A killed `python` takes what was forked for it along;
other signals are not passed on, so a test of signals starts a real interpreter, and so does a test
of what torch reads from the environment when imported.
"""

import atexit
import contextlib
import functools
import io
import json
import os
import runpy
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing import connection, parent_process, process
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.support.harness import FORKSERVER
from tests.support.threads import THREADS

ROOT = Path(__file__).resolve().parents[2]
# Isolated and without site, the client starts in 20 ms.
CLIENT = """#!{interpreter} -IS
import json, os, socket, struct, sys
words = sys.argv[1:]
if not words or words[0] == "-" or (words[0].startswith("-") and words[0] not in ("-m", "-c", "-u")):
    os.execv({interpreter!r}, [{interpreter!r}, *words])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([words, os.getcwd(), dict(os.environ)]).encode("utf-8", "surrogateescape")
socket.send_fds(server, [struct.pack("<Q", len(request))], [0, 1, 2])
server.sendall(request)
sys.exit(server.recv(1)[0])
"""
TORCHRUN = """#!/bin/sh
PYTHON_EXEC="{python}" exec "{python}" -m torch.distributed.run "$@"
"""


def server_process() -> int | None:
    """Return the number of the server of this process, None before its start."""
    return _started()[1].pid if _started.cache_info().currsize else None


def folder() -> Path:
    """Start the server of this process once; return the folder of its `python`."""
    return _started()[0]


@functools.cache
def _started() -> tuple[Path, BaseProcess]:
    """The folder, and the server, which ends when this process has ended or forgotten it."""
    path = Path(tempfile.mkdtemp(prefix="megatron_lite_python_"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    address = str(path / "server")
    server = FORKSERVER.Process(target=_serve, args=(address,))
    server.start()
    process._children.discard(server)  # type: ignore[attr-defined]  # nobody's left-over, nor to be waited for
    client = path / "python"
    client.write_text(CLIENT.format(interpreter=sys.executable, address=address))
    launcher = path / "torchrun"
    launcher.write_text(TORCHRUN.format(python=client))
    for program in (client, launcher):
        program.chmod(0o755)
    deadline = time.monotonic() + 60
    while not os.path.exists(address):
        assert time.monotonic() < deadline, "the server of warm interpreters did not start"
        time.sleep(0.005)
    return path, server


def search_path() -> str:
    """PATH with this `python` first, then the interpreter's own folder."""
    return os.pathsep.join([str(folder()), str(Path(sys.executable).parent), os.environ["PATH"]])


def environment() -> dict[str, str]:
    """The environment of a user of this checkout without a GPU, with this `python`."""
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(THREADS), "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **own, "PATH": search_path()}


def _serve(address: str) -> None:
    """Fork for every connection, until the process of the tests ends."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)
    tests = parent_process()
    assert tests is not None
    signal.signal(signal.SIGCHLD, _reap)
    while tests.sentinel not in connection.wait([listener, tests.sentinel]):
        client, _ = listener.accept()
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            _answer(client)
        client.close()


def _reap(*_: object) -> None:
    """Collect the children that have ended; their seconds of CPU count from then on."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _answer(client: socket.socket) -> None:
    """Run what one client asks for in a child; tell its exit code, or end the child if the client
    is gone."""
    header, streams, _, _ = socket.recv_fds(client, 8, 3)
    (size,) = struct.unpack("<Q", header)
    text = b""
    while len(text) < size:
        text += client.recv(size - len(text))
    words, place, environment = json.loads(text.decode("utf-8", "surrogateescape"))
    child = os.fork()
    if not child:
        client.close()
        _become(words, place, environment, streams)
    client.setblocking(False)
    for stream in streams:
        os.close(stream)
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        time.sleep(0.005)
        with contextlib.suppress(BlockingIOError):
            if not client.recv(1):
                os.killpg(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(ended[1])
    with contextlib.suppress(OSError):
        client.send(bytes([code if code >= 0 else 128 - code]))
    os._exit(0)


def _become(words: list[str], place: str, environment: dict[str, str], streams: list[int]) -> None:
    """Be what `python <words>` would be, in a session of its own."""
    os.setsid()
    atexit._clear()  # functions of the server
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(place)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    sys.stdout = io.TextIOWrapper(
        open(1, "wb", closefd=False), "utf-8", line_buffering=os.isatty(1)
    )
    sys.stderr = io.TextIOWrapper(
        open(2, "wb", closefd=False), "utf-8", "backslashreplace", line_buffering=True
    )
    import torch

    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", THREADS)))
    code: Any = 1
    try:
        _run(words)
        code = 0
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
        code = code if isinstance(code, int) else int(code is not None)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as an interpreter does
        atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 255)


def _run(words: list[str]) -> None:
    """Run a module, a line of code or a file as __main__."""
    if words[0] == "-u":
        words = words[1:]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if words[0] in ("-m", "-c"):
        sys.path[:0] = ["", *paths]
        sys.argv = [words[0], *words[2:]]
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[:0] = [os.path.dirname(os.path.realpath(words[0])), *paths]
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
