"""Weights & Biases through a stand-in module: points sent and dropped, offline runs, and keys that
never leak."""

import dataclasses
import json
import sys
import types

import pytest

from megatron_lite.config import Config, RunConfig, TrackingConfig, flatten
from megatron_lite.errors import EXIT_PREEMPTED, UsageError
from megatron_lite.monitor.logging import start_logging, stop_logging
from megatron_lite.monitor.trackers.opening import open_trackers
from tests.support.metrics import read_metrics

CANARY = "c0ffee00" * 5
OPTIONS = TrackingConfig(
    trackers=("jsonl", "wandb"),
    wandb_entity_name="me",
    wandb_project_name="project",
    wandb_group_name="v1",
)


class FakeRun:
    def __init__(self, module, mode):
        self.module, self.url = module, None if mode == "offline" else "https://example.org/run"

    def define_metric(self, name, step_metric=None):
        self.module.metrics.append((name, step_metric))

    def log(self, values):
        if self.module.broken:
            raise ConnectionError(f"server said no to {CANARY}")
        self.module.logged.append(values)

    def alert(self, title, text):
        self.module.alerts.append((title, text))

    def finish(self, exit_code):
        self.module.finished.append(exit_code)


class FakeWandb(types.ModuleType):
    """Records its calls; `unreachable` and `broken` make it fail."""

    def __init__(self):
        super().__init__("wandb")
        self.inits = []
        self.metrics = []
        self.logged = []
        self.alerts = []
        self.finished = []
        self.unreachable = self.broken = False
        self.teardowns = 0

    class Settings:
        model_fields = ("init_timeout", "silent", "console", "api_key")

        def __init__(self, **values):
            assert set(values) <= set(self.model_fields)
            self.values = values

    def setup(self, settings):
        pass

    def teardown(self):
        self.teardowns += 1

    def init(self, mode=None, settings=None, **arguments):
        self.inits.append({"mode": mode, "settings": settings.values, **arguments})
        if self.unreachable and mode != "offline":
            raise ConnectionError(f"cannot reach the server with key {CANARY}")
        return FakeRun(self, mode)


@pytest.fixture
def wandb(monkeypatch, tmp_path, capsys):
    for name in ("WANDB_API_KEY", "WANDB_API_KEY_PATH", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # no netrc
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")  # restored afterwards
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    start_logging(tmp_path / "log.txt", to_console=True)
    yield module
    stop_logging()


@pytest.fixture
def key(monkeypatch, wandb):
    monkeypatch.setenv("WANDB_API_KEY", CANARY)


def settings(experiment_name=None, **options):
    tracking = dataclasses.replace(OPTIONS, **options)
    return Config(run=RunConfig(experiment_name=experiment_name), tracking=tracking)


def run(directory, *records, exit_code=0, number=0, **options):
    trackers = open_trackers(settings(**options), directory, number)
    for record in records:
        trackers.log(record)
    trackers.close(exit_code)


def training(iteration, loss=1.0):
    return {
        "phase": "training",
        "iteration": iteration,
        "train_iters": 100,
        "loss": loss,
        "skip_reason": "none",
    }


def test_points_and_settings_that_are_sent(tmp_path, wandb, key):
    directory = tmp_path / "llama-small"
    run(
        directory,
        training(10, 2.5),
        {"phase": "validation", "iteration": 10, "loss": 2.75},
        number=3,
    )
    (init,) = wandb.inits
    assert (init["entity"], init["project"], init["group"], init["name"]) == (
        "me",
        "project",
        "v1",
        "llama-small",
    )
    assert init["config"] == flatten(settings())
    assert init["resume"] == "allow" and init["settings"]["init_timeout"] == 8
    assert init["dir"] == str(directory / "runs/3")
    # our step, which may go back on a resume
    assert wandb.metrics == [("iteration", None), ("*", "iteration")]
    first, second = wandb.logged
    assert first["iteration"] == 10 and first["training/loss"] == 2.5 and first["training/run"] == 3
    assert (
        first["training/language_model_loss"] == 2.5
        and second["validation/language_model_loss"] == 2.75
    )
    assert all(
        key == "iteration" or key.split("/")[0] in ("training", "validation")
        for key in {**first, **second}
    )
    assert all(
        set(record) <= {"phase", "iteration", "train_iters", "loss", "skip_reason", "run", "time"}
        for record in read_metrics(directory / "metrics.jsonl")
    )
    assert "training/skip_reason" not in first and "training/train_iters" not in first
    assert second["iteration"] == 10 and second["validation/loss"] == 2.75
    assert wandb.finished == [0] and wandb.alerts == []


def test_later_starts_continue_the_same_run(tmp_path, wandb, key):
    for number in range(2):
        run(tmp_path / "exp", number=number)
    assert wandb.inits[0]["id"] == wandb.inits[1]["id"]
    assert json.loads((tmp_path / "exp/wandb.json").read_text()) == {"id": wandb.inits[0]["id"]}
    run(tmp_path / "another", experiment_name="other")
    assert wandb.inits[2]["id"] != wandb.inits[0]["id"]
    # the option wins over the folder
    assert [init["name"] for init in wandb.inits] == ["exp", "exp", "other"]


def test_a_chosen_id_is_kept(tmp_path, wandb, key):
    """Later starts continue the run without the flag; another id begins another run."""
    for chosen in ("my-run_1", None, "other", None):
        run(tmp_path / "exp", wandb_id=chosen)
    assert [init["id"] for init in wandb.inits] == ["my-run_1", "my-run_1", "other", "other"]


def test_a_damaged_id_file_starts_a_new_run(tmp_path, wandb, key):
    for content in ("", "{", "[]", '{"id": 3}', '{"id": "../../x"}'):
        (tmp_path / "exp").mkdir(exist_ok=True)
        (tmp_path / "exp/wandb.json").write_text(content)
        run(tmp_path / "exp")
        assert (
            json.loads((tmp_path / "exp/wandb.json").read_text())["id"] == wandb.inits[-1]["id"]
        ), content


def test_without_an_entity_the_package_is_not_touched(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would fail
    trackers = open_trackers(settings(trackers=("jsonl",)), tmp_path, 0)
    trackers.log(training(1))
    trackers.close(0)


def test_a_missing_package_is_a_usage_error_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match="--wandb_entity_name=me .*python -m pip install wandb"):
        run(tmp_path)


@pytest.mark.parametrize("has_variable", [False, True])
def test_the_key_can_come_from_a_file(tmp_path, wandb, monkeypatch, has_variable):
    """The variable wins over the file, which then is not read."""
    (tmp_path / "key.txt").write_text(f"  {CANARY}\n")
    monkeypatch.setenv(
        "WANDB_API_KEY_PATH", "/nowhere" if has_variable else str(tmp_path / "key.txt")
    )
    monkeypatch.setenv("WANDB_API_KEY", CANARY if has_variable else "")
    run(tmp_path / "exp")
    assert wandb.inits[0]["settings"]["api_key"] == CANARY


def test_a_useless_key_file_is_refused_without_showing_it(tmp_path, wandb, monkeypatch):
    path = tmp_path / "key.txt"
    monkeypatch.setenv("WANDB_API_KEY_PATH", str(path))
    two = f"key: {CANARY}".encode()
    facts = {
        b"": "is empty",
        b"\n \n": "is empty",
        b"\xff\xfe": "not a text file",
        two: "holds 2 words",
    }
    for content, fact in {None: "No such file", **facts}.items():
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UsageError) as error:
            run(tmp_path / "exp")
        assert fact in str(error.value) and f"WANDB_API_KEY_PATH={path}" in str(error.value)
        assert CANARY not in str(error.value) and wandb.inits == []


def test_without_a_key_the_run_is_offline_and_says_how_to_send_it(tmp_path, wandb, capsys):
    run(tmp_path / "exp", training(10))
    assert [init["mode"] for init in wandb.inits] == ["offline"] and len(wandb.logged) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "wandb sync" in line]
    assert len(lines) == 1 and "no key" in lines[0] and str(tmp_path / "exp/runs/0") in lines[0]


@pytest.mark.parametrize("why", ["netrc", "WANDB_MODE"])
def test_what_the_library_decides_is_left_to_it(tmp_path, wandb, monkeypatch, why):
    """A login in netrc counts as a key; the library reads WANDB_MODE itself."""
    if why == "netrc":
        (tmp_path / "home").mkdir()
        (tmp_path / "home/.netrc").write_text(
            f"machine api.wandb.ai\n  login user\n  password {CANARY}\n"
        )
        (tmp_path / "home/.netrc").chmod(0o600)
    else:
        monkeypatch.setenv("WANDB_MODE", "disabled")
    run(tmp_path / "exp")
    assert wandb.inits[0]["mode"] is None and "api_key" not in wandb.inits[0]["settings"]


def test_an_unreachable_server_means_offline(tmp_path, wandb, key, capsys):
    wandb.unreachable = True
    run(tmp_path / "exp", training(10))
    assert [init["mode"] for init in wandb.inits] == [None, "offline"]
    assert wandb.inits[0]["id"] == wandb.inits[1]["id"] and len(wandb.logged) == 1
    assert capsys.readouterr().out.count("wandb sync") == 1


def test_failures_while_logging_are_reported_once_and_counted(tmp_path, wandb, key, capsys):
    wandb.broken = True
    run(tmp_path / "exp", *(training(iteration) for iteration in range(1, 6)))
    out = capsys.readouterr().out
    assert out.count("ConnectionError") == 1 and "5 points did not reach" in out
    assert len(read_metrics(tmp_path / "exp/metrics.jsonl")) == 5


def test_alerts_tell_start_and_end(tmp_path, wandb, key):
    for exit_code in (0, 3, EXIT_PREEMPTED):
        run(tmp_path / "exp", exit_code=exit_code, wandb_post_alerts=True)
    titles = [title for title, _ in wandb.alerts]
    assert titles[::2] == ["exp started"] * 3
    assert titles[1::2] == ["exp ended", "exp failed with exit code 3", "exp stopped and saved"]
    assert wandb.finished == [0, 3, EXIT_PREEMPTED]


def test_status_alerts_carry_the_metrics_once_per_interval(tmp_path, wandb, key):
    records = [training(iteration, 2.0) for iteration in (1, 10, 20, 27, 33, 41)]
    run(tmp_path / "exp", *records, wandb_status_interval=20, wandb_post_alerts=False)
    assert [title for title, _ in wandb.alerts] == ["exp at iteration 20", "exp at iteration 41"]
    assert "language model loss: 2.00000" in wandb.alerts[0][1]


def test_the_key_gets_nowhere(tmp_path, wandb, key, capsys):
    """Not into files, logs, the run's config or the command line, even when the library's errors
    quote it."""
    wandb.unreachable = wandb.broken = True
    run(tmp_path / "exp", training(1), training(2), exit_code=1, wandb_post_alerts=True)
    for init in wandb.inits:
        init["settings"].pop("api_key", None)  # the one place it is handed to
    told = (
        repr((wandb.inits, wandb.alerts, wandb.logged)) + capsys.readouterr().out + repr(sys.argv)
    )
    assert CANARY not in told and "<key>" in told
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"metrics.jsonl", "wandb.json", "log.txt"} <= {path.name for path in files}
    assert not [path for path in files if CANARY.encode() in path.read_bytes()]
