"""The Hugging Face hub on the loopback device: repositories, commits and files, as far as
`HfFileSystem` asks."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

Answer = tuple[bytes, int, dict[str, str]]
NOTHING: Answer = (b"{}", 404, {"X-Error-Code": "EntryNotFound"})


class Hub:
    """A server; `requests` counts what it was asked."""

    def __init__(self) -> None:
        self.requests = 0
        # (models or datasets, owner/name) -> commits, oldest first
        self._commits: dict[tuple[str, str], list[tuple[str, Mapping[str, bytes]]]] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # noqa: N802 (the library's name)
                hub.requests += 1
                body, status, headers = hub._answer(self.path, self.headers.get("Range"))
                self.send_response(status)
                for name, value in (headers | {"Content-Length": str(len(body))}).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        serve = {"poll_interval": 0.01}
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs=serve)
        self._thread.start()

    def push(self, kind: str, name: str, files: Mapping[str, bytes]) -> str:
        """Add a commit; return its hash."""
        commits = self._commits.setdefault((kind, name), [])
        commit = hashlib.sha1(repr((name, len(commits))).encode()).hexdigest()
        commits.append((commit, files))
        return commit

    def forget(self, kind: str, name: str, commit: str) -> None:
        """Remove a commit, as a squashed history does."""
        commits = self._commits[kind, name]
        commits[:] = [one for one in commits if one[0] != commit]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, address: str, span: str | None) -> Answer:
        parts = unquote(urlsplit(address).path).strip("/").split("/")
        if parts[0] != "api":
            kind = parts.pop(0) if parts[0] == "datasets" else "models"
            return self._file(kind, parts, span)
        if len(parts) < 4:
            return NOTHING
        _, kind, owner, name, *rest = parts
        what, revision, *inside = [*rest, "", "main"][:2] + rest[2:]
        if (found := self._at(kind, f"{owner}/{name}", revision)) is None:
            known = (kind, f"{owner}/{name}") in self._commits
            return b"{}", 404, {"X-Error-Code": "RevisionNotFound" if known else "RepoNotFound"}
        commit, files = found
        if what != "tree":
            return _json({"id": f"{owner}/{name}", "sha": commit, "siblings": [], "tags": []})
        folder = "".join(f"{part}/" for part in inside)
        below = [path for path in files if path.startswith(folder)]
        entries = [
            {"type": "file", "path": path, "size": len(files[path]), "oid": _hash(files[path])}
            for path in below
            if "recursive=true" in address.lower() or "/" not in path[len(folder) :]
        ]
        folders = {
            folder + path[len(folder) :].split("/")[0]
            for path in below
            if "/" in path[len(folder) :]
        }
        entries += [{"type": "directory", "path": path, "oid": "0" * 40} for path in folders]
        return _json(entries) if below else NOTHING

    def _file(self, kind: str, parts: list[str], span: str | None) -> Answer:
        owner, name, _, revision, *path = parts
        found = self._at(kind, f"{owner}/{name}", revision)
        if found is None or (data := found[1].get("/".join(path))) is None:
            return NOTHING
        headers = {"ETag": f'"{_hash(data)}"', "X-Repo-Commit": found[0]}
        if span is None:
            return data, 200, headers
        first, last = span.removeprefix("bytes=").split("-")
        piece = data[int(first) : int(last) + 1 if last else None]
        end = int(first) + len(piece) - 1
        return piece, 206, headers | {"Content-Range": f"bytes {first}-{end}/{len(data)}"}

    def _at(self, kind: str, name: str, revision: str) -> tuple[str, Mapping[str, bytes]] | None:
        commits = self._commits.get((kind, name), [])
        return next(
            (one for one in reversed(commits) if revision in ("main", one[0])),
            None,
        )


def _hash(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _json(value: Any) -> Answer:
    return json.dumps(value).encode(), 200, {"Content-Type": "application/json"}
