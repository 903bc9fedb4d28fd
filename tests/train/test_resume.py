"""Repeating the command resumes after any end of the last start, as if the run had never stopped.

Bit for bit: weights and Adam moments of the last checkpoint, every export, every loss and gradient
norm of metrics.jsonl. Dropout is on, data workers read ahead, the corpus is read more than once,
several micro-batches are accumulated, and log lines sum over steps of two starts.
"""

import functools
import hashlib
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.checkpoint import manifest
from tests.support.launch import TINY, Start, command_line, read_exit, run, succeed, trains
from tests.support.results import assert_all_good, assert_same_run, checkpoints, curve, weights
from tests.support.token_files import write_documents

ITERATIONS = 30
RANKS = 2
REPEAT_S = 1.2  # after which a second signal is another request (launchers pass on one that ranks have got already)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the prefix of a data set whose training split is read about 1.5 times."""
    prefix = str(tmp_path_factory.mktemp("corpus") / "corpus")
    generator = np.random.default_rng(0)
    write_documents(
        prefix, (generator.integers(0, 64, size=int(generator.integers(1, 100))) for _ in range(60))
    )
    return prefix


def flags(corpus: str, experiment: Path, *more: str) -> list[str]:
    """Return the command of the interrupted run."""
    return [
        *TINY,
        f"--experiment_dir={experiment}",
        f"--train_iters={ITERATIONS}",
        "--dataset_source=list",
        f"--data_path={corpus}",
        *"--split=9,1,0 --num_workers=1 --hidden_dropout=0.1 --attention_dropout=0.1 --batch_size=8".split(),
        *"--micro_batch_size=2 --checkpoint_interval=4 --max_checkpoints=3 --log_interval=3".split(),
        *"--validation_iters=1 --validation_interval=5 --export_interval=10".split(),
        *more,
    ]


LAYOUTS = {
    "zero2": ["--zero_stage=2"],
    "zero3": ["--zero_stage=3"],
    "tensor": ["--tensor_parallel=2", "--sequence_tensor_parallel=1"],
}


@pytest.fixture(
    scope="module",
    params=[
        layout if layout == "zero3" else pytest.param(layout, marks=pytest.mark.slow)
        for layout in LAYOUTS
    ],
)
def reference(
    request: pytest.FixtureRequest, corpus: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Return the experiment directory of an uninterrupted run."""
    experiment = tmp_path_factory.mktemp(f"{request.param}-") / "reference"
    succeed(flags(corpus, experiment, *LAYOUTS[request.param]), RANKS)
    assert (experiment / "export" / str(ITERATIONS) / "model.safetensors").is_file()
    assert len(curve(experiment)) == 11 + 6, (
        "11 lines of training (1, 4, ..., 28, 30) and 6 of validation"
    )
    yield experiment


def layout_of(reference: Path) -> list[str]:
    return LAYOUTS[reference.parent.name.partition("-")[0]]


def num_lines(experiment: Path) -> int:
    path = experiment / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_lines(start: Start, experiment: Path, count: int) -> bool:
    """Wait for N new lines of metrics.jsonl; return False if the run ends earlier."""
    wanted = num_lines(experiment) + count
    return start.wait_until(
        lambda: num_lines(experiment) >= wanted, f"{wanted} lines of metrics.jsonl"
    )


def kill_at_random(start: Start, experiment: Path, chance: random.Random) -> str:
    """Send SIGKILL to every rank or to one, sometimes to the data workers too; return when."""
    startup, workers = chance.random() < 0.2, chance.random() < 0.5
    lines, delay_s = chance.randint(1, 5), chance.uniform(0.0, 0.3 if startup else 0.08)
    rank = chance.randrange(RANKS) if chance.random() < 0.3 and not startup else None
    if not startup:
        wait_for_lines(start, experiment, lines)
    time.sleep(delay_s)
    start.signal(signal.SIGKILL, rank, workers)
    when = f"{delay_s * 1e3:.1f} ms after " + ("the start" if startup else f"line {lines}")
    return f"{'all' if rank is None else f'rank {rank}'} {when}{', with its workers' if workers else ''}"


def assert_same_when_killed(
    command: list[str], experiment: Path, reference: Path, seed: int, kills: int
) -> None:
    """Start and kill repeatedly, let the last start finish, and compare with a run that was not
    killed."""
    chance = random.Random(seed)
    story = [f"seed {seed}"]  # for messages
    for _ in range(kills):
        with Start(command, RANKS) as start:
            moment = kill_at_random(start, experiment, chance)
            outcome = start.wait()
            start.assert_nothing_left()
        story.append(
            f"killed {moment}: exit codes {outcome.codes}, checkpoints {checkpoints(experiment)}"
        )
        assert set(outcome.codes) <= {-signal.SIGKILL, 6, 0}, f"{story}\n{outcome.output}"
        assert_all_good(experiment)
    outcome = run(command, RANKS)
    assert outcome.codes == [0, 0], f"{story}\n{outcome.output}"
    assert sum(str(-signal.SIGKILL) in line for line in story[1:]) >= 1, (
        f"{story}: no kill came in time"
    )
    try:
        assert_same_run(experiment, reference)
    except AssertionError as error:
        raise AssertionError(f"{story}\n{error}") from error


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 22))]
)
def test_killed_run_is_the_run_that_was_not(
    reference: Path, corpus: str, tmp_path: Path, seed: int
) -> None:
    """SIGKILL at random moments, to all ranks or to one, several times in one run: nothing differs
    in the end.

    With odd seeds checkpoints are written in the background, unlike those of the reference.
    """
    experiment, how = tmp_path / "killed", f"--async_checkpoint={seed % 2}"
    kills = 2 if seed == 1 else 4
    assert_same_when_killed(
        flags(corpus, experiment, *layout_of(reference), how), experiment, reference, seed, kills
    )


# Three cycles with warmups, steps that are dropped (the limits are low), batches of 8, 16 and 4
# samples.
EVERYTHING = (
    "--batch_size=none",
    "--batch_size_schedule=0:8 11:16 19:4",
    *"--lr=0.02 --lr_decay_style=cosine --lr_warmup_iters=3 --lr_cycle_minima=10,21 --lr_rewarmup_iters=2".split(),
    *"--min_lr_ratio=0.1 --skip_bad_steps=1 --skip_bad_steps_window=8 --skip_bad_steps_sigma=1.2".split(),
    *"--weight_decay=0.1 --adamc_weight_decay=1 --ema_beta=0.9 --logit_z_loss=0.001".split(),
)
OPTIONS: dict[str, tuple[str, ...]] = {
    "frozen, low precision": (
        *"--zero_stage=3 --training_dtype=bf16 --store_frozen_weights_in_optimization_precision=0".split(),
        *"--freeze=embedding,*.bias,blocks.0.mlp --lr_scales=head:0.5".split(),
    ),
    "frozen, split masters": (
        *"--zero_stage=2 --training_dtype=bf16 --split_master_weights=1 --freeze=embedding.position,blocks.1".split(),
    ),
    "everything, adamw": (
        *EVERYTHING,
        *"--zero_stage=3 --ema_type=ema --adam_nesterov=1 --clip_update_norm_sigma=1".split(),
    ),
    "everything, muon": (
        *EVERYTHING,
        *"--zero_stage=1 --training_dtype=bf16 --optimizer=muon --ema_type=ema_decay_sqrt".split(),
        *"--ema_switch_iter=9 --ema_decay_iters=15".split(),
    ),
}


@pytest.mark.slow  # by default without kills: test_bad_steps.py, test_batches.py, and the engines of tests/checkpoint
@pytest.mark.parametrize("name", OPTIONS)
def test_killed_run_with_more_state(corpus: str, tmp_path: Path, name: str) -> None:
    """Frozen parameters, which have no moments, and split masters, which no buffer holds in full,
    resume too. So do cycles, rewarmup, averages, AdamC and a batch schedule; what was dropped, and
    why, is decided again as it was."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    succeed(flags(corpus, whole, *OPTIONS[name]), RANKS)
    assert_same_when_killed(flags(corpus, killed, *OPTIONS[name]), killed, whole, 3, kills=2)
    if "frozen" in name:
        content = manifest.read(whole / "checkpoints" / str(ITERATIONS))
        frozen = [
            name
            for name, parameter in content.parameters.items()
            if "exp_avg" not in parameter.slices
        ]
        assert 0 < len(frozen) < len(content.parameters)
        return
    lines = {
        iteration: line for (phase, iteration), line in curve(whole).items() if phase == "training"
    }
    assert 0 < float.fromhex(lines[ITERATIONS]["skipped_iters"]) < ITERATIONS / 2
    assert any(line["skip_reason"] for line in lines.values())
    assert {float.fromhex(line["batch_size"]) for line in lines.values()} == {8.0, 16.0, 4.0}
    assert all(
        "averaged_loss" in line
        for (phase, _), line in curve(whole).items()
        if phase == "validation"
    )
    assert any(key.endswith(" average") for key in weights(whole))


@pytest.mark.parametrize("reference", ["zero3"], indirect=True)
def test_signal_to_one_rank_or_to_all(reference: Path, corpus: str, tmp_path: Path) -> None:
    """SIGTERM to one rank, then to everything: each time all ranks save and exit with 75; the third
    start finishes."""
    experiment = tmp_path / "stopped"
    command = flags(corpus, experiment, *layout_of(reference))
    for rank, everything in ((1, False), (None, True)):
        with Start(command, RANKS) as start:
            assert wait_for_lines(start, experiment, 3), "ended too early"
            start.signal(signal.SIGTERM, rank, workers=everything)
            outcome = start.wait()
            start.assert_nothing_left()
        assert outcome.codes == [75, 75], outcome.output
        ended, newest = read_exit(experiment), checkpoints(experiment)[-1]
        assert (ended["exit_code"], ended["status"]) == (75, "stopped"), ended
        assert f"saved at iteration {newest};" in ended["message"], ended
        assert newest >= max(iteration for _, iteration in curve(experiment)), (
            "more than the running iteration is lost"
        )
        assert_all_good(experiment)
    outcome = succeed(command, RANKS)
    assert (
        f"resumed from {experiment}/checkpoints/{newest} at iteration {newest}"
        in outcome.stdouts[0]
    )
    assert_same_run(experiment, reference)


@pytest.mark.parametrize("ranks", [1, pytest.param(RANKS, marks=pytest.mark.slow)])
def test_signal_during_a_long_validation(ranks: int, tmp_path: Path) -> None:
    """A validation that was told to stop does: the ranks save, and the next start validates what it
    has loaded, before anything else, also when the run was at its end. In the log nothing is
    missing, and nothing differs."""
    more = (
        "--num_layers=1",
        "--train_iters=4",
        "--validation_iters=400",
        "--validation_interval=2",
        "--test_iters=1",
        "--ema_type=ema",
    )
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    succeed([*TINY, *more, f"--experiment_dir={whole}"], ranks)

    def validates(number: int, iteration: int) -> bool:
        """Whether start `number` is about to validate a new step or, every other one, what it has
        loaded."""
        log = stopped / "runs" / str(number) / "logs" / "logs_rank_000.txt"
        line = "resumed from" if number % 2 else f"training @ iteration {iteration}"
        return (
            log.exists()
            and line in log.read_text("utf-8")
            and read_exit(stopped).get("status") == "running"
        )

    for number, iteration in enumerate((2, 2, 4)):
        with Start([*TINY, *more, f"--experiment_dir={stopped}"], ranks) as start:
            reached = start.wait_until(
                functools.partial(validates, number, iteration), f"iteration {iteration}"
            )
            assert reached, "ended too early"
            start.signal(signal.SIGTERM)
            outcome = start.wait()
            start.assert_nothing_left()
        assert outcome.codes == [75] * ranks, outcome.output
        assert checkpoints(stopped)[-1] == iteration and ("validation", iteration) not in curve(
            stopped
        )
    succeed([*TINY, *more, f"--experiment_dir={stopped}"], ranks)
    assert_same_run(stopped, whole)
    outcome = run([*TINY, *more, f"--experiment_dir={stopped}"], ranks)
    assert "nothing to do" in outcome.output and "validation @" not in outcome.output


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("reference", ["zero2"], indirect=True)
def test_signal_at_any_moment(reference: Path, corpus: str, tmp_path: Path, seed: int) -> None:
    """Every stop signal to one rank or all at random moments, in saves, exports and validations
    too: exit 75 each time, and the run in the end is the one that was never stopped."""
    experiment = tmp_path / "stopped"
    chance = random.Random(seed)
    story = [f"seed {seed}"]
    command = flags(corpus, experiment, *layout_of(reference), f"--async_checkpoint={seed % 2}")
    for _ in range(4):
        number = chance.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
        rank = chance.choice([0, 1, None])
        lines = chance.randint(1, 3)
        delay_s = chance.uniform(0.0, 0.1)
        with Start(command, RANKS) as start:
            wait_for_lines(start, experiment, lines)
            time.sleep(delay_s)
            start.signal(number, rank)
            outcome = start.wait()
            start.assert_nothing_left()
        story.append(
            f"{number.name} to {rank} {delay_s * 1e3:.1f} ms after line {lines}: {outcome.codes}"
        )
        assert outcome.codes in ([75, 75], [0, 0]), f"{story}\n{outcome.output}"
        assert not outcome.error_lines(), f"{story}\n{outcome.stderrs}"
        assert_all_good(experiment)
    assert "75" in str(story[1:]), f"{story}: no signal came in time"
    succeed(command, RANKS)
    assert_same_run(experiment, reference)


def stamps(*paths: Path) -> dict[str, tuple[int, str]]:
    """Time of change and digest of every file below the paths."""
    files = [
        file
        for path in paths
        for file in ([path] if path.is_file() else path.rglob("*"))
        if file.is_file()
    ]
    return {
        str(file): (file.stat().st_mtime_ns, hashlib.sha256(file.read_bytes()).hexdigest())
        for file in files
    }


@pytest.mark.parametrize("reference", ["zero3"], indirect=True)
def test_complete_run_is_left_alone(reference: Path, corpus: str) -> None:
    """The command of a complete run says so, exits with 0, and touches no checkpoint, export or
    metric."""
    kept = [reference / name for name in ("checkpoints", "export", "metrics.jsonl")]
    before = stamps(*kept)
    outcome = succeed(flags(corpus, reference, *layout_of(reference)), RANKS)
    assert f"the run is complete: iteration {ITERATIONS} of {ITERATIONS}" in outcome.stdouts[0]
    assert read_exit(reference)["exit_code"] == 0
    assert stamps(*kept) == before


def test_more_iterations_resume(corpus: str, tmp_path: Path) -> None:
    """A larger --train_iters continues the run to the weights of a run that was that long from the
    start."""
    long, short = tmp_path / "long", tmp_path / "short"
    succeed(flags(corpus, long, "--train_iters=14", "--num_workers=0"))
    succeed(flags(corpus, short, "--train_iters=9", "--num_workers=0"))
    outcome = succeed(flags(corpus, short, "--train_iters=14", "--num_workers=0"))
    assert f"resumed from {short}/checkpoints/9 at iteration 9" in outcome.stdouts[0]
    assert "train_iters: 9 in the checkpoint, 14 now" in outcome.stdouts[0]
    assert checkpoints(short)[-1] == checkpoints(long)[-1] == 14
    assert weights(short) == weights(long)
    norms = [
        {key: values["grad_norm"] for key, values in curve(path).items() if "grad_norm" in values}
        for path in (long, short)
    ]
    assert norms[1].pop(("training", 9)), "the line of the run's first end"
    assert norms[0] == norms[1]


@pytest.mark.slow  # by default, without a restart: tests/zero/test_recompute.py
def test_other_levels_of_recomputation_resume(corpus: str, tmp_path: Path) -> None:
    """A run whose --mlp_recompute_level changes at every start is bit for bit the run that kept one
    level."""
    one, changing = tmp_path / "one", tmp_path / "changing"
    succeed(flags(corpus, one, "--train_iters=12", "--num_layers=3"))
    for end, level in (
        (3, "none"),
        (6, "activation,full:2"),
        (9, "full"),
        (12, "none,full:1,activation:1"),
    ):
        stop = ["--stop_interval=3"] if end < 12 else []
        command = flags(
            corpus,
            changing,
            "--train_iters=12",
            "--num_layers=3",
            f"--mlp_recompute_level={level}",
            *stop,
        )
        outcome = run(command)
        assert outcome.codes == [0] and checkpoints(changing)[-1] == end, outcome.output
    assert_same_run(changing, one)


def test_other_world_size_and_zero_stage(tmp_path: Path) -> None:
    """A run resumes with other numbers of ranks and ZeRO stages; losses agree to 1e-6 with one
    rank's."""
    common = [
        *TINY,
        "--train_iters=15",
        "--batch_size=12",
        "--micro_batch_size=2",
        "--validation_iters=2",
    ]
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    succeed([*common, f"--experiment_dir={alone}"])
    for ranks, zero_stage, end in ((2, 3, 5), (3, 2, 10), (1, 1, 15)):
        stop = ["--stop_interval=5"] if end < 15 else []
        succeed([*common, f"--experiment_dir={moved}", f"--zero_stage={zero_stage}", *stop], ranks)
        assert checkpoints(moved)[-1] == end
        assert_all_good(moved)
    expected, found = curve(alone), curve(moved)
    assert expected.keys() == found.keys()
    for key, values in expected.items():
        for name in ("loss", "grad_norm"):
            if name in values:
                wanted = float.fromhex(values[name])
                assert float.fromhex(found[key][name]) == pytest.approx(wanted, rel=1e-6), (
                    key,
                    name,
                )
    assert float.fromhex(found["training", 15]["loss"]) != float.fromhex(
        found["training", 1]["loss"]
    )


def data_workers(start: Start) -> list[int]:
    return [pid for pid in start.left_over() if "spawn_main" in command_line(pid)]


def test_second_signal_ends_at_once(corpus: str, tmp_path: Path) -> None:
    """A run that cannot react to SIGTERM (it waits for data) dies of the second; its checkpoints
    are good."""
    experiment = tmp_path / "stuck"
    command = flags(corpus, experiment)
    with Start(command) as start:
        assert wait_for_lines(start, experiment, 4)
        (worker,) = data_workers(start)
        os.kill(worker, signal.SIGSTOP)
        time.sleep(0.3)  # by now all that was read ahead is used up
        start.signal(signal.SIGTERM, 0, workers=False)
        time.sleep(REPEAT_S)
        assert start.running(), "the first signal asks, it does not kill"
        start.signal(signal.SIGTERM, 0, workers=False)
        outcome = start.wait(timeout_s=5)
        os.kill(worker, signal.SIGCONT)
        start.assert_nothing_left()
    assert outcome.codes[0] in (-signal.SIGTERM, 128 + signal.SIGTERM), outcome.output
    assert_all_good(experiment)
    assert checkpoints(experiment), "nothing was saved before the signal"


def test_second_signal_ends_a_rank_that_waits_for_its_peer(corpus: str, tmp_path: Path) -> None:
    """With a peer that stopped answering, a second SIGTERM need not wait for a time-out of an
    hour."""
    experiment = tmp_path / "stuck"
    with Start(flags(corpus, experiment, "--num_workers=0"), RANKS) as start:
        assert wait_for_lines(start, experiment, 2)
        start.signal(signal.SIGSTOP, 1)
        time.sleep(0.2)
        start.signal(signal.SIGTERM, 0, workers=False)
        time.sleep(REPEAT_S)
        start.signal(signal.SIGTERM, 0, workers=False)
        assert start.processes[0].wait(5) not in (None, 0)


def test_time_limit_stops_all_ranks_at_one_iteration(corpus: str, tmp_path: Path) -> None:
    """After --max_minutes, by a clock that all ranks agree on, the run saves, exits with 75 and
    says why."""
    experiment = tmp_path / "limited"
    command = flags(
        corpus,
        experiment,
        "--train_iters=1000000",
        "--max_minutes=0.02",
        "--checkpoint_interval=1000000",
    )
    outcome = run(command, RANKS)
    assert outcome.codes == [75, 75], outcome.output
    (newest,) = checkpoints(experiment)
    message = f"stopped by --max_minutes: saved at iteration {newest}; the same command resumes"
    assert read_exit(experiment)["message"] == message
    assert "the run saves and stops at 20" in outcome.stdouts[0]


def test_signal_during_start_up_saves_at_once(corpus: str, tmp_path: Path) -> None:
    """A stop request before the first iteration leaves a checkpoint and exit code 75, and loses
    nothing."""
    experiment = tmp_path / "early"
    command = flags(corpus, experiment)
    with Start(command, RANKS) as start:
        assert start.wait_until(lambda: trains(experiment), "the end of the set-up")
        start.signal(signal.SIGTERM, 1, workers=False)
        outcome = start.wait()
    assert outcome.codes == [75, 75], outcome.output
    saved = re.search(r"saved at iteration (\d+)", read_exit(experiment)["message"])
    assert saved and int(saved[1]) == checkpoints(experiment)[-1]
