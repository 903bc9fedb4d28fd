"""When a run saves, what it keeps and what it loads, as flags of whole runs."""

from pathlib import Path

import numpy as np

from tests.support.launch import TINY, pretrain_after, run, succeed
from tests.support.metrics import read_metrics
from tests.support.results import assert_all_good, checkpoints, weights
from tests.support.token_files import write_documents


def test_by_time_and_by_rules(tmp_path: Path) -> None:
    """A minute is over after every iteration but the first: two ranks save each time, and keep what
    a rule names."""
    policy = [
        "--checkpoint_minutes=1e-9",
        "--keep_checkpoints=3:3 2:4",
        "--max_checkpoints=1",
        "--train_iters=7",
    ]
    outcome = succeed([*TINY, f"--experiment_dir={tmp_path}", *policy], ranks=2)
    assert outcome.output.count("saved ") == 7, outcome.output
    assert checkpoints(tmp_path) == [3, 4, 7]
    assert_all_good(tmp_path)


def test_a_long_run_saves_by_itself(tmp_path: Path) -> None:
    """Without a flag that says when, it saves by the clock, says so once, and keeps two of its own
    checkpoints.

    The fifteen minutes are none here. An earlier start's checkpoint stays.
    """
    minutes = "from megatron_lite.validation import areas; areas.DEFAULT_MINUTES = 1e-9"
    flags = [*TINY, f"--experiment_dir={tmp_path}"]
    for iterations, kept in ((3, [2, 3]), (7, [2, 3, 6, 7])):
        done = pretrain_after(minutes, [*flags, f"--train_iters={iterations}"])
        assert (
            done.returncode == 0
            and (done.stdout + done.stderr).count("saves every 1e-09 minutes") == 1
        ), done
        assert checkpoints(tmp_path) == kept
    assert_all_good(tmp_path)


def test_the_default_interval_gives_a_curve(tmp_path: Path) -> None:
    """At least 50 points of a run, and its early iterations, in metrics.jsonl; a restart logs the
    same ones."""
    words = [word for word in TINY if not word.startswith("--log_interval")]
    flags = [
        *words,
        "--train_iters=299",
        "--checkpoint_interval=1000",
        "--num_layers=1",
        "--lr_warmup_iters=0",
    ]
    flags += ["--hidden_size=8", "--num_attention_heads=1", "--sequence_length=4", "--batch_size=1"]
    succeed([*flags, f"--experiment_dir={tmp_path / 'whole'}"])
    for _ in range(2):
        succeed([*flags, f"--experiment_dir={tmp_path / 'two'}", "--stop_interval=151"])
    iterations = [
        [record["iteration"] for record in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("whole", "two")
    ]
    assert {1, 2, 4, 6, 11, 299} <= {*iterations[0]} and len(iterations[0]) > 50
    assert iterations[0] == iterations[1]


def test_by_time_in_the_background(tmp_path: Path) -> None:
    """Saves by rank 0's clock that each wait for the one before, on two ranks; then a start that
    deletes only its own.

    A save is published at the next look, so a checkpoint becomes old only after the next one is
    whole: the second start keeps the last of the first one, its own last one, and nothing between
    them.
    """
    flags = [
        *TINY,
        f"--experiment_dir={tmp_path}",
        "--checkpoint_minutes=1e-9",
        "--async_checkpoint=1",
    ]
    flags += ["--max_checkpoints=1"]
    outcome = run([*flags, "--train_iters=5"], ranks=2)
    assert outcome.codes == [0, 0] and outcome.output.count("saved ") == 5, outcome.output
    assert outcome.output.count("training waited") == 5 and checkpoints(tmp_path) == [5]
    outcome = run([*flags, "--train_iters=8", "--delete_old_temp_checkpoints=0"], ranks=2)
    assert outcome.codes == [0, 0] and outcome.output.count("saved ") == 3, outcome.output
    assert checkpoints(tmp_path) == [5, 8]
    assert_all_good(tmp_path)
    outcome = run([*flags, "--train_iters=9"], ranks=2)
    assert outcome.codes == [0, 0] and checkpoints(tmp_path) == [9], outcome.output


def test_going_back_and_on(tmp_path: Path) -> None:
    """--resume_iteration repeats the same iterations, to the bit, without the newer checkpoints;
    then it goes on."""
    flags = [*TINY, f"--experiment_dir={tmp_path / 'run'}", "--checkpoint_interval=2"]
    succeed([*flags, "--train_iters=6"])
    before = weights(tmp_path / "run")
    assert (
        "checkpoints/2 at iteration 2"
        in succeed([*flags, "--train_iters=6", "--resume_iteration=2", "--stop_interval=4"]).output
    )
    assert checkpoints(tmp_path / "run") == [2, 4]
    aside = tmp_path / "run" / "checkpoints" / "set_aside" / "1"
    assert sorted(path.name for path in aside.iterdir()) == ["4", "6"]
    assert (
        "was followed by an earlier start"
        in succeed([*flags, "--train_iters=6", "--resume_iteration=2"]).output
    )
    assert checkpoints(tmp_path / "run") == [2, 4, 6] and weights(tmp_path / "run") == before


def test_resuming_from_another_folder(tmp_path: Path) -> None:
    """The state comes along: the run is the one that was never moved; its own checkpoints win
    afterwards."""
    flags = [*TINY, "--train_iters=6", "--checkpoint_interval=2"]
    succeed([*flags, f"--experiment_dir={tmp_path / 'a'}"])
    flags += [f"--load_checkpoint_path={tmp_path / 'a'}", f"--experiment_dir={tmp_path / 'b'}"]
    succeed([*flags, "--resume_iteration=2"])
    assert checkpoints(tmp_path / "b") == [4, 6] and weights(tmp_path / "b") == weights(
        tmp_path / "a"
    )
    assert checkpoints(tmp_path / "a") == [2, 4, 6]
    outcome = run([*flags, "--load_policy=never"])
    assert (
        outcome.codes == [2]
        and "a run that starts from scratch loads no checkpoint" in outcome.output
    )


def write_corpus(prefix: Path, seed: int) -> None:
    write_documents(prefix, np.random.default_rng(seed).integers(0, 64, size=(50, 60)))


def test_data_replaced_under_the_same_path(tmp_path: Path) -> None:
    """Another corpus of the same size is refused on resume, or allowed by name; the same corpus may
    move."""
    write_corpus(tmp_path / "c", 1)
    flags = [
        *TINY,
        "--dataset_source=list",
        "--num_workers=0",
        "--split=1,0,0",
        f"--experiment_dir={tmp_path / 'run'}",
    ]
    same, moved = f"--data_path={tmp_path / 'c'}", f"--data_path={tmp_path / 'moved'}"
    succeed([*flags, same, "--train_iters=2"])
    write_corpus(tmp_path / "moved", 1)
    succeed([*flags, moved, "--train_iters=3"])
    write_corpus(tmp_path / "c", 2)
    outcome = run([*flags, same, "--train_iters=4"])
    assert (
        outcome.codes == [4]
        and "data set 0: " in outcome.output
        and "fingerprint" in outcome.output
    ), outcome.output
    assert (
        "allowed by --allow_data_change=1: data set 0"
        in succeed([*flags, same, "--train_iters=4", "--allow_data_change=1"]).output
    )


def test_parts_of_another_run(tmp_path: Path) -> None:
    """With model, optimizer and step a new run is the continuation, to the bit; model alone begins
    at iteration 0."""
    flags = [*TINY, "--train_iters=6", "--checkpoint_interval=2"]
    succeed([*flags, f"--experiment_dir={tmp_path / 'a'}"])
    flags += [f"--pretrained_checkpoint_path={tmp_path / 'a' / 'checkpoints' / '2'}"]
    assert (
        "the run continues after its iteration 2"
        in succeed(
            [*flags, f"--experiment_dir={tmp_path / 'b'}", "--load_parts=model,optimizer,step"]
        ).output
    )
    assert checkpoints(tmp_path / "b") == [4, 6] and weights(tmp_path / "b") == weights(
        tmp_path / "a"
    )
    other = [*flags, "--num_layers=1", "--qk_layernorm=1", "--ignore_pretrained_config=1"]
    outcome = run([*other, f"--experiment_dir={tmp_path / 'c'}"])
    assert outcome.codes == [4] and "does not fit the model" in outcome.output, outcome.output
    outcome = run([*other, f"--experiment_dir={tmp_path / 'd'}", "--allow_partial_checkpoint=1"])
    assert outcome.codes == [0] and checkpoints(tmp_path / "d") == [2, 4, 6], outcome.output
    assert "4 parameters initialized, because it lacks them: blocks.0." in outcome.output, (
        outcome.output
    )
    assert "parameters not used, because the model lacks them: blocks.1." in outcome.output, (
        outcome.output
    )
    outcome = run([*flags, "--load_parts=optimizer"])
    assert outcome.codes == [2] and "as in --load_parts=model,optimizer,step" in outcome.output
