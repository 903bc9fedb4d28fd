"""evaluate --tasks: lm-eval's own table of a model of ours, skipped where lm-eval is missing, and
its results among the metrics of the run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.commands import compare_runs, evaluate
from megatron_lite.generation import tasks
from megatron_lite.generation.tasks import record_results
from megatron_lite.reports.report import page
from megatron_lite.reports.watched_run import read_runs
from tests.reports.test_report import make_run
from tests.support.launch import TINY, succeed
from tests.support.metrics import read_metrics
from tests.support.token_files import save_byte_tokenizer

TASK = """\
task: animals
dataset_path: json
dataset_kwargs:
  data_files: {test: %s}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
"""
QUESTION = {"question": "A bird can", "choices": [" fly", " read"], "answer": 0}


RESULTS: dict[str, dict[str, Any]] = {  # as lm-eval returns them
    "animals": {
        "name": "animals",
        "alias": "animals",
        "sample_len": 8,
        "acc,none": 0.625,
        "acc_stderr,none": "N/A",
    },
    "gsm8k": {"exact_match,strict-match": 0.25, "exact_match_stderr,strict-match": 0.125},
}


def test_results_among_the_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of an export of an iteration, merged or not, and of no other folder; no start of the run is
    ended by them, and the page and the comparison show the last ones."""
    run, plain = make_run(tmp_path / "run"), make_run(tmp_path / "plain")
    for folder in ("run/export/200", "run/export/merged/300"):
        record_results(tmp_path / folder, RESULTS)
    for folder in ("run/export/best", "elsewhere/export/200", "200"):
        record_results(tmp_path / folder, RESULTS)
    added = [record for record in read_metrics(run / "metrics.jsonl") if record["phase"] == "tasks"]
    assert [record["iteration"] for record in added] == [200, 300]
    numbers = {"gsm8k/exact_match,strict-match": 0.25, "animals/acc": 0.625}
    numbers |= {"gsm8k/exact_match_stderr,strict-match": 0.125}
    for record in added:
        time_s = record.pop("time")
        assert time_s > 0 and record.keys() - numbers.keys() == {"phase", "iteration"}
        assert numbers.items() <= record.items()
    one, other = read_runs([run, plain])
    assert one.metrics.starts == other.metrics.starts
    assert (one.metrics.curve("training", "loss").iterations[-1]) == 400
    text = page([one])
    assert "<tr><td>animals/acc</td><td>300</td><td>0.6250</td></tr>" in text
    assert compare_runs.main([str(run), str(plain)]) == 0
    assert re.search(r"^animals/acc +0\.625 +- +-$", capsys.readouterr().out, re.M)


def test_results_leave_the_line_of_a_live_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be within its line, which a start completes or removes; an ended run's is torn."""
    (tmp_path / "export" / "200").mkdir(parents=True)
    file = tmp_path / "metrics.jsonl"
    for in_use, first in ((True, '{"phase": "tr{"phase": "tasks"'), (False, '{"phase": "tasks"')):
        file.write_text('{"phase": "tr')
        monkeypatch.setattr(tasks, "is_in_use", lambda root, in_use=in_use: in_use)
        record_results(tmp_path / "export" / "200", RESULTS)
        assert file.read_text().startswith(first)


@pytest.mark.slow
def test_a_task_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run's newest export, by its folder; a task that does not exist; a run without an export."""
    pytest.importorskip("lm_eval")
    save_byte_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "animals.jsonl").write_text(json.dumps(QUESTION) + "\n")
    (tmp_path / "animals.yaml").write_text(TASK % (tmp_path / "animals.jsonl"))
    tiny = [*TINY, "--vocab_size=257", f"--tokenizer_file={tmp_path}/tokenizer.json"]
    succeed([*tiny, f"--experiment_dir={tmp_path}/run", "--export_interval=1"])
    succeed([*tiny, f"--experiment_dir={tmp_path}/other", "--checkpoint_interval=1"])
    words = ["--device=cpu", f"--include_path={tmp_path}", "--tasks", "animals"]
    assert evaluate.main([f"--model={tmp_path}/run", *words]) == 0
    assert "|animals|" in capsys.readouterr().out
    (record,) = (
        line
        for line in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if line["phase"] == "tasks"
    )
    assert record["iteration"] == 6 and record["animals/acc"] in (0.0, 1.0)
    assert evaluate.main([f"--model={tmp_path}/run", "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["tasks"]["animals"]
    assert found["acc,none"] in (0.0, 1.0)
    assert evaluate.main([f"--model={tmp_path}/run", "--tasks", "nonsense"]) == 2
    assert "--tasks=nonsense: lm-eval has no such task" in capsys.readouterr().err
    assert evaluate.main([f"--model={tmp_path}/other", *words]) == 4
    assert "has no model in Hugging Face's format" in capsys.readouterr().err
