"""Train each combination of some options' values, and rank the runs by their validation loss.

    megatron_lite sweep --lr=1e-4,3e-4,1e-3 --weight_decay=0,0.1 -- --experiment_dir=sweeps/one ...
    megatron_lite sweep --parallel=4 --ranks=2 --seed=1,2,3,4 -- --experiment_dir=sweeps/two ...

Options to vary stand before `--`, their values between commas; behind it stand the flags that all
runs share. Every combination is checked before the first run starts. Each run has its own folder in
--experiment_dir; the tokens of text are shared.

The same command goes on after a stop or a kill at any moment: finished runs are not repeated, a run
that was cut resumes from its checkpoint. The ranking is printed and written to leaderboard.txt, with
losses.png and report.html of the best.

Exit codes: 0 done, 1 a run failed, 2 usage, 8 storage, 75 stopped on request.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_lite.cli.checks import resolved
from megatron_lite.cli.parse import Arguments, HelpRequested, parse
from megatron_lite.cli.script_parser import COUNT, ScriptParser
from megatron_lite.cli.unknown_flags import answer_to_unknown
from megatron_lite.commands.compare_runs import median_speed
from megatron_lite.commands.plot_run import write_picture
from megatron_lite.config.values import SPELLINGS, counted, digest, is_legal, shown, written
from megatron_lite.errors import (
    EXIT_DONE,
    EXIT_PREEMPTED,
    RunError,
    StorageError,
    UsageError,
    check_addresses,
)
from megatron_lite.reports.picture import PALETTE, draw, read_losses
from megatron_lite.reports.report import MOST_RUNS, REPORT_FILE, write_report
from megatron_lite.reports.watched_run import watched
from megatron_lite.run.durable_files import lock_file, replace_file
from megatron_lite.run.exit_status import print_failure, print_page
from megatron_lite.run.experiment import is_in_use
from megatron_lite.run.host import available_cores
from megatron_lite.run.launch import requested_threads
from megatron_lite.run.progress_line import aligned
from megatron_lite.run.run_process import LONGEST_ERROR, RunProcess, visible_gpus

FINISHED = "finished.txt"  # digests of the command lines of finished runs
POLL_S = 0.1
LEFT_OVER_S = 120.0  # limit on waiting for a run that still saves after its sweep was killed


class Trial(NamedTuple):
    """A combination of values, and the command line of its run."""

    values: list[str]
    folder: Path
    words: list[str]

    @property
    def console(self) -> Path:
        """The file with what the newest start of the run has printed."""
        return self.folder.with_name(f"{self.folder.name}.txt")


class Places(NamedTuple):
    """Shares of the machine: `ranks` for each run, and a value of a variable for each at a time."""

    ranks: int
    variable: str
    values: list[str]


def varied(words: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each option to vary, as typed.

    Raises: UsageError for a word that is no option with values, and an option given twice.
    """
    found = dict[str, list[str]]()
    for word in words:
        spelling, equals, text = word.partition("=")
        flag = SPELLINGS.get(spelling[2:].replace("-", "_"))
        if not spelling.startswith("--") or (flag and not equals):
            raise UsageError(f"{shown(word)}: before -- write --<option>=<value>,<value>")
        if flag is None:
            raise UsageError(answer_to_unknown(spelling, text))
        if flag.name in found:
            raise UsageError(f"--{flag.name} is given twice; write all of its values at once")
        if "," in text and (flag.is_list or is_legal(flag, text)):
            rule = "may be one value with a comma in it, and a comma separates values here"
            raise UsageError(f"{shown(word)}: {rule}; write the flag after --")
        found[flag.name] = text.split(",")
    return found


def combinations(
    values: Mapping[str, list[str]], shared: Sequence[str], base: Arguments, ranks: int
) -> list[Trial]:
    """Return a trial of each combination. shared: flags of all runs. base: the same, parsed.

    Raises: UsageError with the problems of all combinations that the program refuses.
    """
    if (root := base.config.run.experiment_dir) is None:
        raise UsageError("--experiment_dir is missing after --: a sweep needs a folder")
    if twice := base.given.keys() & values.keys():
        raise UsageError(f"--{min(twice)} is given twice, before and after --; leave one out")
    own = [word for word in shared if not re.match("--experiment[_-]dir=", word)]
    if "dataset_cache" not in base.given and base.config.data.dataset_source != "random":
        own.append(f"--dataset_cache={root}/dataset_cache")
    found, problems = dict[Path, Trial](), dict[str, list[str]]()
    for chosen in itertools.product(*values.values()):
        words = list(map("--{}={}".format, values, chosen))
        try:
            given = parse([*shared, *words]).given
            typed = [written(given[name]) for name in values]
            name = ",".join(map("{}={}".format, values, typed)).replace("/", "_")
            trial = Trial(
                typed, Path(root, name), [*own, *words, f"--experiment_dir={root}/{name}"]
            )
            config = resolved(parse(trial.words), ranks)
            if not config.training.validation_iters or config.distributed.dry_run:
                raise UsageError("a sweep ranks losses of validations; write --validation_iters")
            if found.setdefault(trial.folder, trial) is not trial:
                raise UsageError("this combination is given twice")
        except RunError as error:
            problems.setdefault(str(error), []).append(" ".join(words))
    if problems:
        lines = (f"{'; '.join(which)}: {problem}" for problem, which in problems.items())
        raise UsageError("\n".join(lines))
    return [*found.values()]


def divide(parallel: int, ranks: int | None, on_gpus: bool) -> Places:
    """Divide the GPUs, or else the cores, between runs.

    Raises: UsageError if there are fewer GPUs than ranks.
    """
    gpus = visible_gpus() if on_gpus else []
    each = ranks or max(1, len(gpus) // parallel)
    if not gpus:
        threads = max(1, available_cores() // (each * parallel), requested_threads() or 1)
        return Places(each, "OMP_THREAD_LIMIT", [str(threads)] * parallel)
    if each * parallel > len(gpus):
        asked = f"--parallel={parallel} runs on {counted(each, 'rank')} each"
        raise UsageError(f"{asked}: there are {counted(len(gpus), 'GPU')}; write smaller numbers")
    shares = [gpus[place * each : (place + 1) * each] for place in range(parallel)]
    return Places(each, "CUDA_VISIBLE_DEVICES", list(map(",".join, shares)))


def train(trials: Sequence[Trial], places: Places) -> dict[str, str] | None:
    """Run what is not finished; return why runs have failed, by name, or None after a stop."""
    finished = trials[0].folder.with_name(FINISHED)
    done = finished.read_text().split() if finished.exists() else []
    waiting = [trial for trial in trials if digest(trial.words) not in done]
    active, failures = dict[int, tuple[Trial, RunProcess]](), dict[str, str]()
    left_over_s, is_stopped = time.monotonic() + LEFT_OVER_S, False
    while active or (waiting and not is_stopped):
        try:
            for place, value in enumerate(places.values):
                if place in active:
                    trial, run = active[place]
                    if run.process.poll() is None:
                        continue
                    said = trial.console.read_text("utf-8", "replace")[-LONGEST_ERROR:]
                    failure, ending = run.failure(said), "done"
                    if failure is not None:
                        failures[trial.folder.name] = ending = str(failure)
                    elif run.process.returncode == EXIT_DONE:
                        with finished.open("a") as file:
                            file.write(f"{digest(trial.words)}\n")
                    else:
                        is_stopped, ending = True, "stopped"
                    print_page(f"{trial.folder.name}: {ending}")
                    del active[place]
                elif waiting and not is_stopped:
                    if is_in_use(waiting[0].folder) and time.monotonic() < left_over_s:
                        break
                    trial = waiting.pop(0)
                    print_page(f"{trial.folder.name}: starts; {trial.console} has its output")
                    variables = {places.variable: value}
                    with trial.console.open("wb") as output:
                        run = RunProcess(trial.words, places.ranks, trial.folder, output, variables)
                    active[place] = trial, run
            time.sleep(POLL_S)
        except KeyboardInterrupt:
            is_stopped = True
            for _, run in active.values():
                run.stop()
    return None if is_stopped else failures


def rank(names: Sequence[str], trials: Sequence[Trial], failures: Mapping[str, str]) -> None:
    """Print and write the ranking, a plot and a page. names: of the varied options."""
    rows = list[tuple[bool, float, Path, list[str]]]()
    for trial in trials:
        failure = failures.get(trial.folder.name)
        loss, numbers = math.inf, ["-"] * 3
        with contextlib.suppress(ValueError):  # no metrics, or no loss
            metrics = watched(trial.folder).metrics
            curve = metrics.curve("validation", "loss").finite()
            best = curve.values.argmin()
            speed = median_speed(metrics, "tokens_per_sec")
            loss = float(curve.values[best])
            numbers = [f"{loss:.5f}", f"{curve.iterations[best]:,}", f"{speed:,.0f}"]
        cells = [*trial.values, *numbers, (failure or "").partition("\n")[0]]
        rows.append((failure is not None, loss, trial.folder, cells))
    rows.sort(key=lambda row: row[:2])
    head = [*names, "validation loss", "at iteration", "tokens/s", "failure"]
    table = "\n".join(aligned([head, *(cells for *_, cells in rows)], {0, len(head) - 1}))
    print_page(table)
    root = trials[0].folder.parent
    replace_file(root / "leaderboard.txt", f"{table}\n".encode())
    if ranked := [folder for _, loss, folder, _ in rows if loss < math.inf]:
        picture = draw(read_losses(ranked[: len(PALETTE)]), [])
        write_report(ranked[:MOST_RUNS], root / REPORT_FILE)
        print_page(f"{write_picture(picture, root / 'losses.png')}\n{root / REPORT_FILE}")


def run_sweep(before: Sequence[str], shared: list[str], parallel: int, ranks: int | None) -> int:
    """Plan, train and rank; return the exit code. before: words before --. shared: behind it.

    Raises: RunError before the first run starts, or if the ranking cannot be written.
    """
    values, base = varied(before), parse(shared)
    places = divide(parallel, ranks, base.config.distributed.device != "cpu")
    trials = combinations(values, shared, base, places.ranks)
    root = trials[0].folder.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = (root / "sweep.lock").open("a")
    except OSError as error:
        problem = f"the sweep cannot write there ({error.strerror}); choose another folder"
        raise StorageError(f"--experiment_dir={root}: {problem}") from None
    if not lock_file(lock.fileno()):
        raise StorageError(f"--experiment_dir={root}: another sweep uses it; wait for its end")
    shares = f"{places.variable}={' and '.join(places.values)}"
    runs, each = counted(len(trials), "run"), counted(places.ranks, "rank")
    print_page(f"{runs}, {parallel} at a time, each on {each} with {shares}")
    failures = train(trials, places)
    lock.close()
    if failures is None:
        print_page("stopped; the same command goes on")
        return EXIT_PREEMPTED
    rank([*values], trials, failures)
    return 1 if failures else EXIT_DONE


def main(arguments: Sequence[str], program: str | None = None) -> int:
    """Run the sweep; return the exit code."""
    words = "[--parallel=N] [--ranks=N] --OPTION=VALUE,VALUE ... -- A RUN'S FLAGS"
    parser = ScriptParser(__doc__, prog=program, usage=f"%(prog)s {words}")
    parser.add_argument("--parallel", type=COUNT, default=1, help="runs at a time (default: 1)")
    parser.add_argument(
        "--ranks", type=COUNT, help="ranks of each run (default: its share of the GPUs, or 1)"
    )
    try:
        check_addresses(arguments)
    except UsageError as error:
        parser.error(str(error))
    place = [*arguments, "--"].index("--")
    own, before = list[str](), list[str]()
    for word in arguments[:place]:
        (own if re.match("-h|--(help|parallel|ranks)(=|$)", word) else before).append(word)
    options = parser.parse_args(own)
    if place == len(arguments) or not before:
        parser.error(f"write {words}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        return run_sweep(before, [*arguments[place + 1 :]], options.parallel, options.ranks)
    except HelpRequested as page:
        print_page(str(page))
        return EXIT_DONE
    except Exception as error:
        return print_failure(error)
