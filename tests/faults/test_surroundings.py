"""Whatever surrounds a run (paths, environment variables, the umask), it trains and saves as
ever."""

import os
import stat
from pathlib import Path

import pytest

from tests.support.launch import TINY, run, succeed
from tests.support.results import assert_all_good, checkpoints

RUN = (*TINY, "--train_iters=2", "--checkpoint_interval=1", "--export_interval=2")


@pytest.mark.parametrize(
    "name", ["-a b  c", "Übung 実験 🙂 %s{0}$HOME`x`", "n" * 240], ids=["blanks", "signs", "long"]
)
def test_odd_paths(name: str, tmp_path: Path) -> None:
    """A directory of any name works."""
    experiment = tmp_path / name
    succeed([*RUN, f"--experiment_dir={experiment}"])
    assert (
        checkpoints(experiment) == [1, 2]
        and (experiment / "export" / "2" / "model.safetensors").is_file()
    )
    assert_all_good(experiment)


def test_a_path_with_a_line_break(tmp_path: Path) -> None:
    """It is refused, and the message has no line break."""
    outcome = run([*RUN, f"--experiment_dir={tmp_path / 'a'}\nb"])
    assert outcome.codes == [2] and len(outcome.error_lines()) == 1, outcome.output


def test_an_odd_environment(tmp_path: Path) -> None:
    """No HOME, an unknown language and time zone, no folder for temporary files, a narrow umask."""
    experiment = tmp_path / "run"
    previous = os.umask(0o077)
    try:
        variables = {
            "HOME": "",
            "LANG": "xx_YY",
            "LC_ALL": "C",
            "TZ": "No/Where",
            "TMPDIR": str(tmp_path / "gone"),
        }
        outcome = run(
            [*RUN, f"--experiment_dir={experiment}"], how="processes", variables=variables
        )
    finally:
        os.umask(previous)
    assert outcome.codes == [0], outcome.output
    assert_all_good(experiment)
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in experiment.rglob("*")} == {0}
