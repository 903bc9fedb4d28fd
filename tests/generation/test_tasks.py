"""evaluate --tasks: lm-eval's own table of a model of ours; skipped where lm-eval is missing."""

import json
from pathlib import Path

import pytest

from megatron_lite.commands import evaluate
from tests.support.launch import TINY, succeed
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
    assert evaluate.main([f"--model={tmp_path}/run", "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["tasks"]["animals"]
    assert found["acc,none"] in (0.0, 1.0)
    assert evaluate.main([f"--model={tmp_path}/run", "--tasks", "nonsense"]) == 2
    assert "--tasks=nonsense: lm-eval has no such task" in capsys.readouterr().err
    assert evaluate.main([f"--model={tmp_path}/other", *words]) == 4
    assert "has no model in Hugging Face's format" in capsys.readouterr().err
