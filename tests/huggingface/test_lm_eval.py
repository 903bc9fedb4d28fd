"""lm-eval's own loader for Hugging Face models takes an export as it is, without a network."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.launch import TINY, run

TASK = """\
task: animals
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("lm_eval") is None, reason="lm_eval is not installed (pip install lm_eval accelerate)")
def test_a_task_of_ones_own(tmp_path: Path) -> None:
    """A model with its tokenizer answers questions with choices; the accuracy of a made-up task is a number."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    flags = ["--vocab_size=257", "--export_interval=6", f"--tokenizer_file={tmp_path}/tokenizer.json"]
    outcome = run([*TINY, "--max_position_embeddings=256", *flags, f"--experiment_dir={tmp_path}/run"])
    assert outcome.codes == [0], outcome.output

    questions = [{"question": "A bird can", "choices": [" fly", " read"], "answer": 0}] * 3
    (tmp_path / "animals.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "animals.yaml").write_text(TASK.format(data=tmp_path / "animals.jsonl"))
    command = f"lm_eval --model hf --model_args pretrained={tmp_path}/run/export/6 --tasks animals --device cpu"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(
        [*command.split(), "--include_path", str(tmp_path / "tasks")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"\|animals\|.*\|acc +\|.*\| *[01]\|", done.stdout), done.stdout
