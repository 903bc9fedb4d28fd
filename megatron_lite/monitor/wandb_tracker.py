"""Weights & Biases in a separate thread, so that it cannot delay training."""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import shlex
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lite.config import Config, flatten
from megatron_lite.errors import EXIT_PREEMPTED
from megatron_lite.monitor.logging import get_logger
from megatron_lite.monitor.metrics import format_record
from megatron_lite.run.durable_files import replace_file

INIT_TIMEOUT_S = 10
FINISH_TIMEOUT_S = 20
MAX_QUEUED_RECORDS = 1000
ID_FILE = "wandb.json"
ALSO = {"loss": "language_model_loss"}  # the name of a key in Fast-LLM, whose charts show it
_STEP = "iteration"  # our own step: the library's must not decrease, and a resumed run goes back a little


def _run_id(experiment_dir: Path | None) -> str:
    """Return the id with which every start of an experiment continues one Weights & Biases run."""
    if experiment_dir is None:
        return secrets.token_hex(4)
    path = experiment_dir / ID_FILE
    try:
        known = json.loads(path.read_text(encoding="utf-8"))["id"]
        if isinstance(known, str) and known.isalnum():
            return known
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError):
        get_logger().warning("%s is not readable; this start is a new Weights & Biases run", path)
    new = secrets.token_hex(4)
    try:
        replace_file(path, json.dumps({"id": new}).encode() + b"\n")
    except OSError as error:
        get_logger().warning("cannot write %s: %s; the next start is a new Weights & Biases run", path, error.strerror)
    return new


class WandbTracker:
    """A Weights & Biases run fed through a bounded queue. No method blocks for long or raises.

    Args:
        wandb: the module.
        key: goes to the library only; None lets the library use the key of `wandb login`.
        offline: reason to record the run on disk only, or None to go online.
    """

    def __init__(
        self, wandb: Any, config: Config, key: str | None, offline: str | None, experiment_dir: Path | None, run: int
    ) -> None:
        options, self._wandb, self._key, self._offline = config.run, wandb, key, offline
        self._name = options.experiment_name or (experiment_dir.absolute().name if experiment_dir else None)
        folder = experiment_dir / "runs" / str(run) if experiment_dir else Path(tempfile.mkdtemp(prefix="wandb-"))
        self._directory = folder.absolute()
        self._init_arguments: dict[str, Any] = {
            "entity": options.wandb_entity_name,
            "project": options.wandb_project_name,
            "group": options.wandb_group_name,
            "name": self._name,
            "id": _run_id(experiment_dir),
            "resume": "allow",
            "dir": str(self._directory),
            "config": flatten(config),
        }
        self._status_interval, self._post_alerts = options.wandb_status_interval, options.wandb_post_alerts
        if self._post_alerts is None:
            self._post_alerts = self._status_interval is not None
        self._last_status: int | None = None
        self._queue: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(MAX_QUEUED_RECORDS)
        self._dropped = self._failed = 0  # records
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self._thread.start()
        self.alert(f"{self._name} started", f"run {run}")

    def log(self, record: Mapping[str, Any]) -> None:
        """Send a record: numbers as `<phase>/<key>` over `iteration`, and an alert at each status interval.

        `training/loss` is also `training/language_model_loss`, and so are those of other phases.
        """
        phase, iteration = record["phase"], record[_STEP]
        record = {**record, **{other: record[key] for key, other in ALSO.items() if key in record}}
        numbers = {
            f"{phase}/{key}": value
            for key, value in record.items()
            if key not in (_STEP, "train_iters") and isinstance(value, (int, float))
        }
        self._put("log", ({**numbers, _STEP: iteration},))
        if self._status_interval is None or phase != "training":
            return
        # Records come at log intervals, which may miss the status interval.
        status = iteration // self._status_interval
        if self._last_status is not None and status > self._last_status or iteration % self._status_interval == 0:
            self._put("alert", (f"{self._name} at iteration {iteration}", format_record(record)))
        self._last_status = status

    def alert(self, title: str, text: str) -> None:
        """Post an alert if --wandb_post_alerts is on."""
        if self._post_alerts:
            self._put("alert", (title, text))

    def close(self, exit_code: int) -> None:
        """Send the queued records and finish the run; give up within a minute."""
        how = {0: "ended", EXIT_PREEMPTED: "stopped and saved"}.get(exit_code, f"failed with exit code {exit_code}")
        self.alert(f"{self._name} {how}", f"exit code {exit_code}")
        try:
            self._queue.put(("finish", (exit_code,)), timeout=FINISH_TIMEOUT_S)
            self._thread.join(INIT_TIMEOUT_S + FINISH_TIMEOUT_S)
        except queue.Full:
            pass
        if self._thread.is_alive():
            # Its exit hook would wait for the hung service forever; tearing down removes the hook.
            threading.Thread(target=self._wandb.teardown, name="wandb teardown", daemon=True).start()
            get_logger().warning("Weights & Biases does not answer; to send what is missing: %s", self._sync_command())
        if lost := self._dropped + self._failed:
            get_logger().warning("%d points did not reach Weights & Biases; metrics.jsonl has them all", lost)

    def _put(self, action: str, arguments: tuple[Any, ...]) -> None:
        try:
            self._queue.put_nowait((action, arguments))
        except queue.Full:
            self._dropped += action == "log"
            if self._dropped == 1:
                get_logger().warning("Weights & Biases is too slow; points are dropped (metrics.jsonl keeps them)")

    # -- in the thread ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        run, action = self._start(), ""
        while action != "finish":
            action, arguments = self._queue.get()
            try:
                getattr(run, action)(*arguments)
            except Exception as error:
                self._failed += action == "log"
                if run is not None and (self._failed <= 1 or action == "finish"):
                    get_logger().warning("Weights & Biases: %s", self._describe(error))
        self._tear_down()

    def _start(self) -> Any | None:
        """Open the run online, else offline; None if neither works."""
        logger = get_logger()
        if self._offline is None:
            try:
                run = self._init(None)
                if url := getattr(run, "url", None):
                    logger.info("Weights & Biases: %s", url)
                return run
            except Exception as error:
                self._offline = self._describe(error)
                self._tear_down()  # its service still holds the run id
        logger.warning(
            "Weights & Biases is offline (%s); to send the run later: %s", self._offline, self._sync_command()
        )
        try:
            return self._init("offline")
        except Exception as error:
            logger.warning("no Weights & Biases: %s", self._describe(error))
            return None

    def _tear_down(self) -> None:
        with contextlib.suppress(Exception):
            self._wandb.teardown()

    def _init(self, mode: str | None) -> Any:
        settings: dict[str, Any] = {
            "init_timeout": INIT_TIMEOUT_S,
            "finish_timeout": FINISH_TIMEOUT_S,
            "finish_timeout_raises": True,
            "silent": True,  # this class logs what users need
            "console": "off",  # with stdout captured, a hung service would block every print
        }
        if self._key is not None and mode != "offline":
            settings["api_key"] = self._key  # unlike wandb.login(key), this is not stored in the user's netrc
        fields = getattr(self._wandb.Settings, "model_fields", settings)  # older versions know fewer
        settings = {name: value for name, value in settings.items() if name in fields}
        self._wandb.setup(self._wandb.Settings(silent=True))  # init's settings come too late for its login messages
        self._directory.mkdir(parents=True, exist_ok=True)
        run = self._wandb.init(mode=mode, settings=self._wandb.Settings(**settings), **self._init_arguments)
        run.define_metric(_STEP)
        run.define_metric("*", step_metric=_STEP)
        return run

    def _sync_command(self) -> str:
        runs = "run-*" if self._offline is None else "offline-run-*"
        return f"wandb sync {shlex.quote(str(self._directory))}/wandb/{runs}"

    def _describe(self, error: Exception) -> str:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return (text.replace(self._key, "<key>") if self._key else text)[:200]
