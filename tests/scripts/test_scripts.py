"""The commands of the README, the launch scripts and the shell scripts do what they say, or say
what is missing."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lite import validation
from megatron_lite.cli import parse
from megatron_lite.config import Config
from megatron_lite.schedules.learning_rate import learning_rate
from tests.support import documents, warm_python

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "scripts" / "examples"
SHELL_SCRIPTS = sorted(
    [
        *ROOT.glob("scripts/*.sh"),
        *EXAMPLES.glob("*.sh"),
        *EXAMPLES.glob("*.sbatch"),
        ROOT / ".ci" / "run",
    ]
)
QUICKSTART = "bash scripts/quickstart.sh"
RUN_TESTS = "bash scripts/run_tests.sh"
PREPARE = "scripts/prepare_data.py"
ACTIVATE = "source .venv/bin/activate"
# Writes its arguments as JSON to the file $CAPTURED, in the place of torchrun.
CAPTURE = f"""#!{sys.executable}
import json, os, sys
json.dump(sys.argv[1:], open(os.environ["CAPTURED"], "w"))
"""


def blocks(document: str) -> list[str]:
    """The bash blocks of a document, in order."""
    return documents.blocks((ROOT / document).read_text("utf-8"))


def block(document: str, word: str) -> str:
    """The only bash block of a document with this text in it."""
    (found,) = [text for text in blocks(document) if word in text]
    return found


def environment(**more: str) -> dict[str, str]:
    """The environment of a user with this Python active, who installs nothing and has no GPU."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("WANDB", "QUICKSTART", "SLURM"))
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept |= {
        "PATH": path,
        "VIRTUAL_ENV": sys.prefix,
        "PYTHONPATH": str(ROOT),
        "MEGATRON_LITE_NO_INSTALL": "1",
    }
    return kept | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | more


def shell(
    command: str, cwd: Path = ROOT, timeout: float = 120, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a command as typed into bash."""
    return subprocess.run(
        ["bash", "-c", command],
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def succeeds(result: subprocess.CompletedProcess[str]) -> str:
    """The standard output of a command that must end well."""
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


def executable(path: Path, text: str) -> None:
    """A program for the fake machine of a test."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def captured(tmp_path: Path) -> dict[str, str]:
    """Environment variables with which torchrun writes down its arguments instead of running."""
    executable(tmp_path / "bin" / "torchrun", CAPTURE)
    return {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{environment()['PATH']}",
        "CAPTURED": str(tmp_path / "captured.json"),
        "DATA_PATH": "/data/corpus",
        "EXP_BASE_DIR": str(tmp_path / "mistral"),
    }


def split_command(captured: dict[str, str]) -> tuple[list[str], list[str]]:
    """Arguments of torchrun itself, and the flags of pretrain_gpt.py."""
    command = json.loads(Path(captured["CAPTURED"]).read_text())
    (position,) = [index for index, word in enumerate(command) if word.endswith("pretrain_gpt.py")]
    return command[:position], command[position + 1 :]


def large_run() -> str:
    """The strings of the README's large run, and the command that starts it."""
    return f"{block('README.md', 'export MODEL_ARGS')}\n{block('README.md', '$MONITORING_ARGS')}"


def configuration(flags: list[str], world_size: int) -> Config:
    """The resolved configuration of a command line."""
    return validation.resolve(parse.parse(flags).config, world_size)


# --- The documents


def test_readme_begins_with_the_two_commands() -> None:
    """The first two commands of the README are the two that a newcomer needs; the others need the
    environment."""
    assert blocks("README.md")[:3] == [QUICKSTART, RUN_TESTS, ACTIVATE]


def test_ci_runs_the_test_command_and_both_end_to_end_scripts() -> None:
    """CI runs the README's test command as it stands, the quick start, and the smoke test with an
    installed wheel."""
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    commands = [line for line in lines if line and not line.startswith(("#", "set ", "cd "))]
    assert commands[0] == RUN_TESTS
    assert [
        sum(script in line for line in commands)
        for script in (QUICKSTART, "bash scripts/smoke_test.sh")
    ] == [1, 1]
    assert "scripts/fresh_environment.py" in commands[-2] and commands[-1].endswith(" --installed")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_every_documented_command_is_known_here() -> None:
    """A command added to the README or to CONTRIBUTING fails here until a test of this file runs
    it."""
    tested = {
        QUICKSTART,
        RUN_TESTS,
        ACTIVATE,
        "bash scripts/check.sh",
        f"{RUN_TESTS} tests/test_structure.py",
    }
    words = (
        "--dataset_source=random",
        "prepare_data.py",
        "export MODEL_ARGS",
        "--dry_run=1",
        "$MONITORING_ARGS",
    )
    tested |= {block("README.md", word) for word in words}
    assert {*blocks("README.md"), *blocks("CONTRIBUTING.md")} == tested


def test_every_script_stands_in_a_document() -> None:
    """A newcomer finds each command in the README, in CONTRIBUTING or in a guide."""
    # of other scripts
    inner = {"common.sh", "check_installed.py", "smoke_test.py", "build_corpus.py"}
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
    text = "".join(path.read_text("utf-8") for path in pages)
    names = {path.name for path in (*ROOT.glob("scripts/*.sh"), *ROOT.glob("scripts/[!_]*.py"))}
    assert not [name for name in names - inner if f"scripts/{name}" not in text]


@pytest.mark.guides
def test_readme_command_without_files() -> None:
    """The README's first training command works as it stands, here for fewer iterations, and writes
    nothing."""
    before = {path.name for path in ROOT.iterdir()}
    command = block("README.md", "--dataset_source=random")
    assert "--train_iters=100 " in command
    output = succeeds(shell(command.replace("=100 ", "=10 "), PATH=warm_python.search_path()))
    assert re.search(r"iteration +10/10 ", output)
    others = {"__pycache__", ".hypothesis"}  # tests beside this one may make these
    assert {path.name for path in ROOT.iterdir()} - before <= others


@pytest.mark.guides
def test_readme_commands_on_own_text(tmp_path: Path) -> None:
    """Tokenizing, training on two processes, exporting and sampling as the README shows them, with
    fewer iterations."""
    for name in ("pretrain_gpt.py", "scripts", "README.md", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    commands = block("README.md", "prepare_data.py")
    assert "--train_iters=400 " in commands
    output = succeeds(
        shell("set -e\n" + commands.replace("400", "4"), tmp_path, PATH=warm_python.search_path())
    )
    assert (tmp_path / "experiments" / "mine" / "export" / "4" / "config.json").is_file()
    assert "\nThe learning rate" in output
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    assert (
        {path.name for path in tmp_path.iterdir() if not path.is_symlink()}
        == {"data", "experiments"}
        <= ignored
    )


def test_five_commands_lead_to_a_text_of_ones_own_model() -> None:
    """From a clone: install, activate, tokenize, train, generate."""
    commands = [line for text in blocks("README.md") for line in text.splitlines()]
    commands.remove(RUN_TESTS)
    assert [command.split()[1] for command in commands[:3]] == [
        QUICKSTART.split()[1],
        ".venv/bin/activate",
        PREPARE,
    ]
    assert commands[3].startswith("torchrun --standalone ") and commands[4].startswith(
        "python scripts/generate.py "
    )


def test_readme_dry_run(tmp_path: Path) -> None:
    """The strings of the large run can be tried without data, names or GPUs."""
    commands = f"{block('README.md', 'export MODEL_ARGS')}\n{block('README.md', '--dry_run=1')}"
    unset = "unset DATA_PATH EXP_BASE_DIR WANDB_ENTITY_NAME PROJECT_NAME PROJECT_VERSION"
    typed = f"{unset}\n{commands.replace('python pre', f'python {ROOT}/pre')}"
    output = succeeds(shell(typed, tmp_path, PATH=warm_python.search_path()))
    assert "7,241,732,096" in output and "peak with state" in output


# --- Environment strings, launch scripts


def test_strings_script_and_flags_describe_one_mistral(captured: dict[str, str]) -> None:
    """The README's environment strings, split by bash as typed, make a Mistral-7B on 128 GPUs.

    train_mistral.sh launches the same configuration on every GPU, with Weights & Biases off; the
    file of flags that the guide's dry runs read describes the same model, batch and dtype.
    """
    names = {
        "WANDB_ENTITY_NAME": "someone",
        "PROJECT_NAME": "mistral",
        "PROJECT_VERSION": "default",
    }
    succeeds(shell(large_run(), **captured, **names))
    launcher, flags = split_command(captured)
    assert launcher == ["--nproc-per-node=gpu"]
    config = configuration(flags, 128)
    assert (config.model.num_layers, config.model.head_groups, config.model.window_size) == (
        32,
        8,
        4096,
    )
    assert (config.batch.micro_batch_size, config.batch.sequential_micro_batches) == (1, 1)
    assert (config.learning_rate.min_lr, config.distributed.training_dtype) == (3e-6, "bf16")
    assert (config.run.experiment_name, config.tracking.wandb_entity_name) == ("mistral", "someone")
    succeeds(shell(large_run(), **captured, **names | {"WANDB_ENTITY_NAME": ""}))
    expected = configuration(split_command(captured)[1], 128)
    succeeds(shell("bash scripts/examples/train_mistral.sh", **captured))
    launcher, flags = split_command(captured)
    assert launcher == ["--standalone", "--nproc-per-node=gpu"]
    assert configuration(flags, 128) == expected and expected.tracking.wandb_entity_name is None
    config = configuration([f"@{EXAMPLES / 'mistral_7b.flags'}", "--dataset_source=random"], 128)
    assert (config.model, config.batch) == (expected.model, expected.batch)
    assert config.distributed.training_dtype == expected.distributed.training_dtype


def test_mistral_script_names_what_is_missing() -> None:
    """Without a data path the script ends at once and says what to set."""
    result = shell("bash scripts/examples/train_mistral.sh")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and "DATA_PATH" in result.stderr


def slurm_job(folder: Path, experiment: Path) -> dict[str, str]:
    """The variables of a job of one node, with an environment in `folder`."""
    executable(folder / "venv" / "bin" / "activate", "")
    job = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "node7", "SLURM_JOB_NUM_NODES": "1"}
    job |= {
        "SLURM_JOB_ID": "42",
        "VENV": str(folder / "venv"),
        "EXP_BASE_DIR": str(experiment),
        "DATA_PATH": "corpus",
    }
    return job


@pytest.mark.parametrize("job", ["slurm_single_node", "slurm_multi_node"])
def test_slurm_jobs_have_time_to_save(job: str, tmp_path: Path) -> None:
    """Slurm signals the processes of the steps (no "B:"), torchrun waits longer for its ranks than
    its 30 s and less than Slurm waits for torchrun; and a script that is signalled too still waits
    for srun and shows exit.json."""
    text = (EXAMPLES / f"{job}.sbatch").read_text()
    (seconds,) = re.findall(r"^#SBATCH --signal=TERM@(\d+)$", text, re.MULTILINE)
    experiment, bin_folder = tmp_path / "mistral", tmp_path / "bin"
    experiment.mkdir()
    executable(bin_folder / "scontrol", "#!/usr/bin/env bash\nprintf 'node7\\n'\n")
    # Slurm signals the script at the end of a job; srun goes on saving.
    saves = f'kill -TERM $PPID\nsleep 0.2\nprintf "grace %s\\n" "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" >{experiment}/exit.json'
    executable(bin_folder / "srun", f"#!/usr/bin/env bash\n{saves}\nexit 1\n")
    slurm = slurm_job(tmp_path, experiment)
    result = shell(
        f"bash scripts/examples/{job}.sbatch", **slurm, PATH=f"{bin_folder}:{os.environ['PATH']}"
    )
    assert result.returncode == 1, result
    (grace,) = re.findall(r"^grace (\d+)$", result.stdout, re.MULTILINE)
    assert 30 < int(grace) <= int(seconds) - 60, "time for torchrun and the script to end"


class Preemptible:
    """The preemptible job under stand-ins for Slurm: each start trains to a checkpoint and ends as
    told."""

    def __init__(self, folder: Path) -> None:
        self.experiment = folder / "mistral"
        self._bin = folder / "bin"
        self._requeued = folder / "requeued"
        self.experiment.mkdir()
        self.array = dict[str, str]()  # variables of a task
        requeue = f'[ "$1" != requeue ] || echo "$2" >>{self._requeued}'
        executable(self._bin / "scontrol", f"#!/usr/bin/env bash\nprintf 'node7\\n'\n{requeue}\n")
        self.says("RUNNING None")
        self._slurm = slurm_job(folder, self.experiment) | {
            "PATH": f"{self._bin}:{os.environ['PATH']}"
        }

    def says(self, state: str) -> None:
        """Let squeue give this state of the job and its reason."""
        executable(self._bin / "squeue", f"#!/usr/bin/env bash\nprintf '{state}\\n'\n")

    def start(
        self, restart: int, code: int | None, checkpoint: int | None = None, runs: bool = True
    ) -> tuple[int, bool, str]:
        """Start for the `restart`-th time; return the job's code, whether it goes back into the
        queue, and its words.

        code: in exit.json; None: killed. checkpoint: that the start has saved. runs: whether Python
        did.
        """
        save = (
            f"mkdir -p {self.experiment}/checkpoints/{checkpoint}"
            if checkpoint is not None
            else ":"
        )
        content = json.dumps(
            {"exit_code": code, "status": "starting" if code is None else "any"}, indent=2
        ).ljust(8192)
        ends = f"printf '%s\\n' '{content}' >{self.experiment}/exit.json\nexit {137 if code is None else min(code, 1)}"
        executable(
            self._bin / "srun", f"#!/usr/bin/env bash\n{save}\n{ends if runs else 'exit 137'}\n"
        )
        self._requeued.unlink(missing_ok=True)
        count = {"SLURM_RESTART_COUNT": str(restart)} if restart else {}
        result = shell(
            "bash scripts/examples/slurm_preemptible.sbatch",
            **{**self._slurm, **count, **self.array},
        )
        requeued = self._requeued.exists() and self._requeued.read_text() == (
            "7_2\n" if self.array else "42\n"
        )
        return result.returncode, requeued, result.stderr


def test_preemptible_job_comes_back_until_the_run_is_complete(tmp_path: Path) -> None:
    """Preempted and saved, a lost node, killed in the set-up: into the queue again. Complete:
    not."""
    job = Preemptible(tmp_path)
    assert job.start(0, 75, checkpoint=100)[:2] == (0, True)
    assert job.start(1, 6, checkpoint=200)[:2] == (0, True)
    assert job.start(2, None)[:2] == (0, True)
    assert job.start(3, 0, checkpoint=1000)[:2] == (0, False)


def test_a_cancelled_job_stays_cancelled(tmp_path: Path) -> None:
    """scancel signals the run, which saves; only at a time limit does the job go back by itself."""
    job = Preemptible(tmp_path)
    for state, goes_back in (
        ("COMPLETING None", False),
        ("", False),
        ("COMPLETING TimeLimit", True),
    ):
        job.says(state)
        _, requeued, words = job.start(0, 75, checkpoint=100)
        assert requeued is goes_back and ("is not started again here" in words) is not goes_back


def test_a_start_that_writes_no_exit_is_not_judged_by_the_one_before(tmp_path: Path) -> None:
    """A driver is broken, after a data error that the user has repaired: the job goes back."""
    job = Preemptible(tmp_path)
    assert job.start(0, 3)[:2] == (3, False)
    assert job.start(1, 0, runs=False)[:2] == (0, True)
    for name in ("exit.json", "exit_before.json"):  # the first may be that of a job that trains
        assert json.loads((job.experiment / name).read_text())["exit_code"] == 3


def test_preemptible_job_gives_up_without_progress(tmp_path: Path) -> None:
    """After three restarts without a newer checkpoint; one in between begins the count again, as
    does a new job."""
    job = Preemptible(tmp_path)
    assert job.start(0, 75, checkpoint=100)[:2] == (0, True)
    assert [job.start(restart, 6)[:2] for restart in (1, 2)] == [(0, True)] * 2
    assert job.start(3, 6, checkpoint=1100)[:2] == (0, True)
    assert [job.start(restart, 1)[:2] for restart in (4, 5, 6)] == [(0, True)] * 3
    code, requeued, words = job.start(7, 1)
    assert (code, requeued) == (
        1,
        False,
    ) and "no new checkpoint after 3 restarts (newest: 1100)" in words
    assert job.start(8, 75, checkpoint=1200)[:2] == (1, False), "put back by Slurm itself: no start"
    assert not (job.experiment / "checkpoints" / "1200").exists()
    assert job.start(0, 1)[:2] == (0, True), "submitted again"


def test_preemptible_job_does_not_repeat_a_mistake(tmp_path: Path) -> None:
    job = Preemptible(tmp_path)
    for code in (2, 3, 4, 5, 7):
        returned, requeued, words = job.start(0, code)
        assert (returned, requeued) == (
            code,
            False,
        ) and f"exit code {code} would come back" in words


def test_preemptible_task_of_an_array(tmp_path: Path) -> None:
    """The id of one task is that of the whole array, which must not be requeued with it. %a is the
    task's number."""
    job = Preemptible(tmp_path)
    job.experiment = tmp_path / "mistral_2"
    job.experiment.mkdir()
    job.array = {
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "2",
        "EXP_BASE_DIR": f"{tmp_path}/mistral_%a",
    }
    assert job.start(0, 75, checkpoint=100)[:2] == (0, True)
    assert (job.experiment / "restarts.txt").exists() and not (tmp_path / "mistral_%a").exists()


@pytest.mark.parametrize(
    ("job", "state", "passed_on"),
    [
        ("slurm_multi_node", "JobState=RUNNING Reason=None PreemptTime=None", True),
        ("slurm_single_node", "JobState=RUNNING Reason=None PreemptTime=None", True),
        ("slurm_preemptible", "JobState=RUNNING Reason=None PreemptTime=None", True),
        ("slurm_multi_node", "JobState=RUNNING Reason=None PreemptTime=2026-11-29T10:39:33", False),
        ("slurm_multi_node", "JobState=COMPLETING Reason=TimeLimit PreemptTime=None", False),
    ],
)
def test_a_signal_to_the_script_alone(
    job: str, state: str, passed_on: bool, tmp_path: Path
) -> None:
    """--signal=B:... reaches the script alone, which passes it on; with scancel and preemptions the
    ranks have it."""
    experiment, bin_folder = tmp_path / "mistral", tmp_path / "bin"
    experiment.mkdir()
    executable(bin_folder / "scontrol", f"#!/usr/bin/env bash\nprintf '{state}\\n'\n")
    executable(bin_folder / "scancel", f'#!/usr/bin/env bash\necho "$*" >{tmp_path}/passed\n')
    executable(bin_folder / "squeue", "#!/usr/bin/env bash\n")
    # $SCRIPT is the process that Slurm signals; srun goes on until the signal is passed on, or for
    # a while.
    wait = f"for _ in {{1..{300 if passed_on else 10}}}; do [ -e {tmp_path}/passed ] && break; sleep 0.1; done"
    told = f"printf '  \"exit_code\": 0,\\n' >{experiment}/exit.json"
    executable(bin_folder / "srun", f"#!/usr/bin/env bash\nkill -USR1 $SCRIPT\n{wait}\n{told}\n")
    slurm = slurm_job(tmp_path, experiment)
    command = f"SCRIPT=$BASHPID exec bash scripts/examples/{job}.sbatch"
    succeeds(result := shell(command, **slurm, PATH=f"{bin_folder}:{os.environ['PATH']}"))
    assert (tmp_path / "passed").exists() == passed_on
    assert not passed_on or (tmp_path / "passed").read_text() == "--signal=TERM 42\n"
    assert '"exit_code": 0' in result.stdout


def test_the_first_signal_alone_reaches_torchrun(tmp_path: Path) -> None:
    """Slurm sends SIGTERM again at the end of a grace time, at which torchrun would end."""
    saves = f"for _ in {{1..300}}; do [ -e {tmp_path}/saved ] && break; sleep 0.1; done"
    trains = f"trap 'echo saving' TERM; echo trains; {saves}; exit 75"
    command = ["bash", "scripts/examples/first_signal.sh", "bash", "-c", trains]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as task:
        assert task.stdout is not None
        for line in ("trains\n", "saving\n"):
            assert task.stdout.readline() == line
            task.terminate()
        (tmp_path / "saved").touch()
        assert task.stdout.read() == "" and task.wait() == 75


def test_slurm_job_in_the_wrong_folder(tmp_path: Path) -> None:
    """A job submitted from elsewhere says so instead of failing somewhere later."""
    result = shell(
        f"bash {ROOT}/scripts/examples/slurm_multi_node.sbatch", SLURM_SUBMIT_DIR=str(tmp_path)
    )
    assert result.returncode == 2
    assert "root of the checkout" in result.stderr


# --- The shell scripts


def test_shell_scripts_are_sound() -> None:
    """Every script parses, stops at the first failure, and passes shellcheck where that is
    installed."""
    for script in SHELL_SCRIPTS:
        assert subprocess.run(["bash", "-n", str(script)]).returncode == 0, script
        if script.name != "common.sh":  # sourced by scripts that have set it
            assert "\nset -euo pipefail\n" in script.read_text(), script
        if shutil.which("shellcheck"):
            subprocess.run(
                ["shellcheck", "-x", "-P", "SCRIPTDIR", "-e", "SC1091", str(script)], check=True
            )


def test_scripts_say_what_is_missing(tmp_path: Path) -> None:
    """Where something is missing, a script ends with one clear line and a non-zero exit code, and
    does nothing."""
    old = tmp_path / "old" / "python3"
    executable(old, "#!/usr/bin/env bash\nexit 1\n")
    # without a .venv, whatever this checkout has
    shutil.copytree(ROOT / "scripts", tmp_path / "checkout" / "scripts")
    for command, variables, message in (
        (
            RUN_TESTS,
            {"VIRTUAL_ENV": "", "PYTHON": "/no/python"},
            "no Python found at PYTHON=/no/python",
        ),
        (RUN_TESTS, {"VIRTUAL_ENV": "/no/environment"}, "has no bin/python"),
        (RUN_TESTS, {"VIRTUAL_ENV": "", "PYTHON": str(old)}, "Python >= 3.10 is needed"),
        (QUICKSTART, {"QUICKSTART_DIR": "/proc/no"}, "set QUICKSTART_DIR to another folder"),
        (QUICKSTART, {"QUICKSTART_DIR": "/tmp/a b"}, "set QUICKSTART_DIR to another folder"),
        (f"{QUICKSTART} --experiment-dir=x", {}, "QUICKSTART_DIR sets the folder"),
    ):
        result = shell(command, cwd=tmp_path / "checkout", **variables)
        assert result.returncode == 1, command
        assert result.stderr.count("\n") == 1 and message in result.stderr, command
        assert [path.name for path in (tmp_path / "checkout").iterdir()] == ["scripts"], command


def test_extra_arguments_of_run_tests_go_to_pytest(tmp_path: Path) -> None:
    """CONTRIBUTING's command runs one test file; here a stand-in for Python prints its words."""
    executable(tmp_path / "bin" / "python", '#!/bin/sh\n[ "$1" = -c ] || echo "$@"\n')
    output = succeeds(
        shell(f"{block('CONTRIBUTING.md', 'test_structure')} -k one_way", VIRTUAL_ENV=str(tmp_path))
    )
    assert output.splitlines()[-1] == "-m pytest tests/test_structure.py -k one_way"


def test_changed_runs_the_tests_of_what_has_changed(tmp_path: Path) -> None:
    """With all options of the default suite."""
    stand_in = """#!/bin/sh
case "$*" in
    "-m tests.support.changed_tests HEAD~2") printf 'tests/a.py\\ntests/b.py\\n' ;;
    -c*sched_getaffinity*) echo 4 ;;
    -c*) ;;
    *) echo "$@" ;;
esac
"""
    executable(tmp_path / "bin" / "python", stand_in)
    output = succeeds(shell(f"{RUN_TESTS} --changed HEAD~2", VIRTUAL_ENV=str(tmp_path)))
    words = "--numprocesses 5 --dist worksteal -m not slow and not benchmarks tests/a.py tests/b.py"
    assert output.splitlines()[-1] == f"-m pytest {words}"


def test_run_tests_says_that_no_test_matches(tmp_path: Path) -> None:
    """In words, with what selects the tests that are left out by default, instead of pytest's exit
    code."""
    code = int(pytest.ExitCode.NO_TESTS_COLLECTED)
    executable(tmp_path / "bin" / "python", f'#!/bin/sh\n[ "$1" = -c ] || exit {code}\n')
    result = shell(f"{RUN_TESTS} tests/docs/test_guides.py", VIRTUAL_ENV=str(tmp_path))
    assert result.returncode == 5
    assert result.stderr.splitlines()[-1].startswith(
        "run_tests.sh: no test matches these arguments; "
    )
    assert "-m guides" in result.stderr and "exit code" not in result.stderr


def test_quickstart_explains_itself() -> None:
    """--help prints how to use it and does nothing."""
    output = succeeds(shell(f"{QUICKSTART} --help"))
    assert "QUICKSTART_DIR" in output and "set -euo" not in output


def test_quickstart_extends_without_a_jump() -> None:
    """The longer run that the quick start suggests repeats every rate so far and continues at the
    last one."""
    text = (ROOT / "scripts" / "quickstart.sh").read_text("utf-8")
    (suggested,) = re.findall(r"add `--train_iters=(\d+)`", (ROOT / "README.md").read_text("utf-8"))
    assert f"quickstart.sh --train_iters={suggested} " in text
    (iterations,) = re.findall(r"^ITERATIONS=(\d+)$", text, re.M)
    (found,) = re.findall(r'^TRAINING_ARGS="(.*?)"$', text, re.M | re.S)
    flags = [*found.replace("$ITERATIONS", iterations).split(), "--dataset_source=random"]
    first = configuration(flags, 2)
    longer = configuration([*flags, f"--train_iters={suggested}"], 2)
    last = int(iterations)
    assert first.training.train_iters == last < longer.training.train_iters
    rates = [learning_rate(longer, iteration) for iteration in range(1, int(suggested) + 1)]
    assert rates[:last] == [learning_rate(first, iteration) for iteration in range(1, last + 1)]
    assert set(rates[last:]) == {rates[last - 1]} == {first.learning_rate.min_lr}


@pytest.mark.slow
def test_quickstart_resumes_and_completes(tmp_path: Path) -> None:
    """A short quickstart ends with its results; a second one finds the run complete; a longer one
    resumes it."""
    folder = {
        "QUICKSTART_DIR": str(tmp_path / "first"),
        "QUICKSTART_CORPUS_BYTES": "1e6",
        "timeout": 300,
    }
    flags = "--lr_warmup_iters=1 --validation_interval=4 --validation_iters=1 --export_interval=2"
    short = f"{QUICKSTART} --train_iters=4 {flags}"
    output = succeeds(shell(short, **folder))
    for words in ("validation loss", "unigram entropy", "loss curve", "a sample from"):
        assert words in output
    assert re.findall(r"^==> step (\d) of 5: ", output, re.M) == list("12345")
    assert re.search(
        r"^time +packages \d+ s, data \d+ s, training \d+ s, plot \d+ s, sample \d+ s$",
        output,
        re.M,
    )
    assert (tmp_path / "first" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "complete" in succeeds(shell(short, **folder))
    succeeds(shell(f"{short} --train_iters=6", **folder))
    lines = (tmp_path / "first" / "python_gpt" / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line)["iteration"] for line in lines) == 6
    assert (tmp_path / "first" / "python_gpt" / "export" / "6" / "config.json").is_file()


@pytest.mark.slow
def test_smoke_test_passes_from_a_read_only_checkout(tmp_path: Path) -> None:
    """The smoke test passes without installation, writing only to its temporary folder, which it
    removes."""
    checkout = tmp_path / "checkout"
    ignored = shutil.ignore_patterns(".git", ".venv", "quickstart", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, checkout, ignore=ignored)
    subprocess.run(["chmod", "-R", "a-w", str(checkout)], check=True)
    (tmp_path / "temporary").mkdir()
    (tmp_path / "home").mkdir()
    before = sorted(checkout.rglob("*"))
    places = {"TMPDIR": str(tmp_path / "temporary"), "HOME": str(tmp_path / "home")}
    try:
        result = shell(
            f"bash {checkout}/scripts/smoke_test.sh", timeout=200, **places, PYTHONPATH=""
        )
        report = json.loads(succeeds(result))
        assert report["ok"] and report["resume_bit_identical"]
        assert sorted(checkout.rglob("*")) == before
        assert not [*(tmp_path / "temporary").iterdir(), *(tmp_path / "home").iterdir()]
    finally:
        subprocess.run(["chmod", "-R", "u+w", str(checkout)], check=True)


def test_smoke_test_insists_on_the_device_and_on_python() -> None:
    """--device=cuda on a machine without a GPU, and no Python: one JSON line that is not ok, a
    non-zero exit code."""
    for words, python, reason in (
        ("--device=cuda", warm_python.folder() / "python", "CUDA"),
        ("", "/no/python", ""),
    ):
        result = shell(f"bash scripts/smoke_test.sh {words}", PYTHON=str(python))
        assert result.returncode == 1
        report = json.loads(result.stdout)
        assert report["ok"] is False and reason in report["reason"]


@pytest.mark.parametrize("script", ["smoke_test.sh", "gpu_report.sh"])
def test_scripts_find_the_environment_of_the_checkout(script: str, tmp_path: Path) -> None:
    """After the quick start they use .venv, also where it is not active; an active environment and
    PYTHON win."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in (".venv", "active", "chosen"):
        executable(
            tmp_path / name / "bin" / "python", f"#!/usr/bin/env bash\nprintf '%s\\n' {name}\n"
        )
    for variables, name in (
        ({"VIRTUAL_ENV": ""}, ".venv"),
        ({"VIRTUAL_ENV": str(tmp_path / "active")}, "active"),
        ({"PYTHON": str(tmp_path / "chosen" / "bin" / "python")}, "chosen"),
    ):
        output = succeeds(shell(f"bash scripts/{script}", cwd=tmp_path, **variables))
        assert set(output.split()) == {name}


def test_corpus_is_deterministic_and_clean(tmp_path: Path) -> None:
    """The same files give the same corpus, in an order that mixes folders; tests and unreadable
    files are left out.

    A folder without Python files is an error of data, in one line, and leaves no file.
    """
    for name in ("a/one.py", "a/two.py", "b/three.py", "test/skipped.py", "b/empty.py"):
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_text("" if "empty" in name else f"name = {name!r}\n")
    (tmp_path / "source" / "latin.py").write_bytes(b"# \xe9\n")
    command = f"python scripts/build_corpus.py --source {tmp_path}/source --output {tmp_path}"
    succeeds(shell(f"{command}/first.jsonl && {command}/second.jsonl"))
    assert (tmp_path / "first.jsonl").read_bytes() == (tmp_path / "second.jsonl").read_bytes()
    written = [json.loads(line) for line in (tmp_path / "first.jsonl").read_text().splitlines()]
    assert {document["path"] for document in written} == {"a/one.py", "a/two.py", "b/three.py"}
    assert all(document["text"] == f"name = {document['path']!r}\n" for document in written)
    (tmp_path / "empty").mkdir()
    result = shell(
        f"python scripts/build_corpus.py --source {tmp_path}/empty --output {tmp_path}/empty/corpus.jsonl"
    )
    assert result.returncode == 3 and not list((tmp_path / "empty").iterdir())
    assert result.stderr.count("\n") == 1 and str(tmp_path) in result.stderr
