"""Weights & Biases in a separate thread: one run per experiment, which every start continues;
alerts; automatic offline mode.

If the service is slow, unreachable or dies, points are dropped and counted, and training does not
wait. The key comes from the variable WANDB_API_KEY or the text file at WANDB_API_KEY_PATH, and goes
to the library only: it never becomes an option, so no command line, configuration, log or saved
file has it.
"""

from __future__ import annotations

import contextlib
import json
import netrc
import os
import re
import secrets
import shlex
import tempfile
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import megatron_lite
from megatron_lite.config import Config, JsonObject, flatten
from megatron_lite.config.monitoring import RUN_ID
from megatron_lite.distributed.processes import kill_children
from megatron_lite.errors import EXIT_PREEMPTED, UsageError
from megatron_lite.monitor.logging import get_logger
from megatron_lite.monitor.metric_lines import Record, format_record
from megatron_lite.monitor.trackers.queued_tracker import QueuedTracker, numbers_of
from megatron_lite.monitor.watch import Watched
from megatron_lite.run.durable_files import replace_file

INIT_TIMEOUT_S = 8  # for a run online; offline it begins within 10 s
FINISH_TIMEOUT_S = 20
FLUSH_S = 2.0  # the file for `wandb sync` lacks at most this much if the client is killed
ID_FILE = "wandb.json"
ALSO = {"loss": "language_model_loss"}  # a key's name in Fast-LLM, whose charts show it
_STEP = "iteration"  # our own step: the library's must not decrease, and a resumed run goes back a little


def read_key() -> str | None:
    """Return the key from WANDB_API_KEY or the file at WANDB_API_KEY_PATH; None without either.

    Raises:
        UsageError: if the file cannot be read or is not a single word. The message never shows the
            content.
    """
    if key := os.environ.get("WANDB_API_KEY", "").strip():
        return key
    path = os.environ.get("WANDB_API_KEY_PATH", "")
    if not path:
        return None
    try:
        words = Path(path).expanduser().read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise UsageError(
            f"WANDB_API_KEY_PATH={path} cannot be read: {reason}; give a text file with the key"
        ) from None
    if len(words) != 1:
        fact = "is empty" if not words else f"holds {len(words)} words"
        raise UsageError(f"WANDB_API_KEY_PATH={path} {fact}; it must hold the key and nothing else")
    return words[0]


def _logged_in() -> bool:
    """Return whether `wandb login` has stored a key in the user's netrc file; the library might
    prompt for one."""
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError, RuntimeError):
        return False


def why_offline(mode: str | None, key: str | None) -> str | None:
    """Return why a run is recorded on disk only, or None to go online.

    mode: the value of --wandb_mode, which overrides WANDB_MODE.
    """
    source, mode = (
        ("--wandb_mode", mode) if mode else ("WANDB_MODE", os.environ.get("WANDB_MODE", ""))
    )
    if mode in ("offline", "dryrun"):
        return f"{source}={mode}"
    if mode in ("", "online") and key is None and not _logged_in():
        return "no key in WANDB_API_KEY or in the file WANDB_API_KEY_PATH"
    return None


def send_no_error_reports() -> None:
    """Stop the library from sending error reports, for which it would wait when the process
    ends."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")


class WandbTracker(QueuedTracker):
    """A Weights & Biases run.

    Args:
        wandb: the module.
        keeps_lines: see `QueuedTracker`.
    """

    title = "Weights & Biases"

    def __init__(
        self, wandb: Any, config: Config, experiment_dir: Path | None, run: int, keeps_lines: bool
    ) -> None:
        """Begin or continue the run. Raises: UsageError if the key file is unusable."""
        super().__init__(keeps_lines, INIT_TIMEOUT_S + FINISH_TIMEOUT_S)
        self._options, self._wandb = config.tracking, wandb
        self._key = read_key()  # None: the library uses the key of `wandb login`
        self._offline = why_offline(config.tracking.wandb_mode, self._key)
        self._name = config.run.experiment_name or (
            experiment_dir.absolute().name if experiment_dir else None
        )
        folder = (
            experiment_dir / "runs" / str(run)
            if experiment_dir
            else Path(tempfile.mkdtemp(prefix="wandb-"))
        )
        self._directory = folder.absolute()
        self._id, self._config = _run_id(experiment_dir, config.tracking.wandb_id), flatten(config)
        self._last_status: int | None = None
        self._run: Any = None
        self._thread.start()
        self.alert(f"{self._name} started", f"run {run}")

    def log(self, record: Record, watched: Watched | None = None) -> None:
        """Send a record: numbers as `<phase>/<key>` over `iteration`, and an alert at each status
        interval.

        Each phase's loss is also `<phase>/language_model_loss`.
        """
        record = {**record, **{other: record[key] for key, other in ALSO.items() if key in record}}
        super().log(record, watched)
        iteration, interval = record["iteration"], self._options.wandb_status_interval
        if interval is None or record["phase"] != "training":
            return
        # Records come at log intervals, which may miss the status interval.
        status = iteration // interval
        if (
            self._last_status is not None
            and status > self._last_status
            or iteration % interval == 0
        ):
            self.alert(
                f"{self._name} at iteration {iteration}", format_record(record), is_status=True
            )
        self._last_status = status

    def alert(self, title: str, text: str, is_status: bool = False) -> None:
        """Post an alert: status alerts always, others with --wandb_post_alerts."""
        if is_status or self._options.wandb_post_alerts:
            self._put(lambda: self._run.alert(title, text))

    def close(self, exit_code: int) -> None:
        """Send the queued records and finish the run; give up within a minute."""
        how = {0: "ended", EXIT_PREEMPTED: "stopped and saved"}.get(
            exit_code, f"failed with exit code {exit_code}"
        )
        self.alert(f"{self._name} {how}", f"exit code {exit_code}")
        super().close(exit_code)

    def _abandon(self) -> None:
        # The library's exit hook would wait for the service forever, and the service would outlive
        # this process.
        kill_children("wandb-core")
        self._thread.join(1.0)
        threading.Thread(
            target=self._wandb.teardown, name="wandb teardown", daemon=True
        ).start()  # removes the hook
        get_logger().warning(
            "Weights & Biases does not answer; to send what is missing: %s", self._sync_command()
        )

    # -- in the thread
    # ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Open the run online, else offline."""
        logger = get_logger()
        if self._offline is None:
            try:
                self._run = self._init(self._options.wandb_mode)
                if url := getattr(self._run, "url", None):
                    logger.info("Weights & Biases: %s", url)
                return
            except Exception as error:
                self._offline = self._describe(error)
                self._leave()  # its service still owns the run id
        self._run = self._init("offline")
        logger.warning(
            "Weights & Biases is offline (%s); to send the run later: %s",
            self._offline,
            self._sync_command(),
        )

    def _send(self, record: Record, watched: Watched | None) -> None:
        values: JsonObject = {**numbers_of(record), _STEP: record[_STEP]}
        if watched is not None:
            values |= dict(watched.numbers())
            for tag, histogram in watched.histograms():
                values[tag] = self._wandb.Histogram(
                    np_histogram=(histogram.counts, histogram.edges)
                )
        self._run.log(values)

    def _end(self, exit_code: int) -> None:
        self._run.finish(exit_code)

    def _leave(self) -> None:
        with contextlib.suppress(Exception):
            self._wandb.teardown()

    def _init(self, mode: str | None) -> Any:
        options = self._options
        settings: JsonObject = {
            "init_timeout": INIT_TIMEOUT_S,
            "finish_timeout": FINISH_TIMEOUT_S,
            "finish_timeout_raises": True,
            "silent": True,  # this class logs what users need
            "console": "off",  # with stdout captured, a hung service would block every print
            "save_code": options.wandb_save_code,
            "x_transaction_log_flush_interval": FLUSH_S,
        }
        if self._key is not None and mode != "offline":
            # unlike wandb.login(key), not stored in the user's netrc
            settings["api_key"] = self._key
        # older versions have fewer
        fields = getattr(self._wandb.Settings, "model_fields", settings)
        settings = {name: value for name, value in settings.items() if name in fields}
        # init's settings come too late for its login messages
        self._wandb.setup(self._wandb.Settings(silent=True))
        self._directory.mkdir(parents=True, exist_ok=True)
        run = self._wandb.init(
            mode=mode,
            settings=self._wandb.Settings(**settings),
            entity=options.wandb_entity_name,
            project=options.wandb_project_name,
            group=options.wandb_group_name,
            name=self._name,
            id=self._id,
            tags=list(options.wandb_tags) or None,
            resume="allow",
            dir=str(self._directory),
            config=self._config,
        )
        run.define_metric(_STEP)
        run.define_metric("*", step_metric=_STEP)
        if options.wandb_save_code:
            run.log_code(str(Path(megatron_lite.__file__).parent))
        return run

    def _sync_command(self) -> str:
        runs = "run-*" if self._offline is None else "offline-run-*"
        return f"wandb sync {shlex.quote(str(self._directory))}/wandb/{runs}"


def _run_id(experiment_dir: Path | None, chosen: str | None) -> str:
    """Return the id of the Weights & Biases run that all starts of an experiment continue.

    chosen: the value of --wandb_id; later starts continue it without the flag.
    """
    if experiment_dir is None:
        return chosen or secrets.token_hex(4)
    path, known = experiment_dir / ID_FILE, None
    try:
        known = json.loads(path.read_text(encoding="utf-8"))["id"]
        if isinstance(known, str) and re.fullmatch(RUN_ID, known) and chosen in (None, known):
            return known
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError):
        get_logger().warning("%s is not readable; this start is a new Weights & Biases run", path)
    new = chosen or secrets.token_hex(4)
    try:
        replace_file(path, json.dumps({"id": new}).encode() + b"\n")
    except OSError as error:
        get_logger().warning(
            "cannot write %s: %s; the next start is a new Weights & Biases run",
            path,
            error.strerror,
        )
    return new
