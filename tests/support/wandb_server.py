"""A stand-in for the server of Weights & Biases on loopback: takes runs, alerts and history from
the real client."""

from __future__ import annotations

import http.server
import json
import threading
from typing import Any


class WandbServer:
    """Answers as much of the protocol as a run needs, until it dies. `with WandbServer() as server:
    ...`"""

    def __init__(self) -> None:
        self.runs: list[
            dict[str, Any]
        ] = []  # variables of each request that creates or changes a run
        self.alerts: list[str] = []
        self.history: list[dict[str, Any]] = []
        self.exit_codes: list[int] = []
        self.has_died = False
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

            def do_POST(self) -> None:  # noqa: N802 - the name that the base class calls
                if owner.has_died:  # drop a connection that is kept open
                    self.close_connection = True
                    return
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
                body = json.dumps(owner.answer(self.path, request)).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_PUT = do_GET = do_POST  # noqa: N815

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> WandbServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def die(self) -> None:
        """Stop answering: connections are refused from now on."""
        if not self.has_died:
            self.has_died = True
            self._server.shutdown()
            self._server.server_close()

    def answer(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        """Note what a request brings, and return the body of the answer."""
        if path.endswith("file_stream"):
            lines = request.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.history += [json.loads(line) for line in lines]
            self.exit_codes += [request["exitcode"]] if request.get("complete") else []
            return {}
        variables = request.get("variables") or {}
        if "mutation UpsertBucket" in request.get("query", ""):
            self.runs.append(variables)
        elif "mutation NotifyScriptableRunAlert" in request.get("query", ""):
            self.alerts.append(variables["title"])
        project = {"id": "p", "name": "project", "entity": {"id": "e", "name": "me"}}
        run = {
            "id": "r",
            "name": variables.get("name") or "run",
            "displayName": "run",
            "config": "{}",
        }
        return {
            "data": {
                "viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}"},
                "serverInfo": {"cliVersionInfo": {}, "features": []},
                "model": {"bucket": None},
                "upsertBucket": {
                    "bucket": {**run, "historyLineCount": 0, "project": project},
                    "inserted": True,
                },
                "notifyScriptableRunAlert": {"success": True},
                "createRunFiles": {"runID": "r", "uploadHeaders": [], "files": []},
            }
        }
