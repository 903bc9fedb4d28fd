"""Pretrained weights with more tokens: rows are kept to the bit, new ones are the mean of the old
ones or random."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.cli.parse import parse
from megatron_lite.errors import CheckpointError
from megatron_lite.validation import resolve
from tests.huggingface.test_load_pretrained import FLAGS, train
from tests.support.families import write_folder
from tests.support.harness import run_distributed
from tests.support.launch import run

NAMES = ("embedding.word.weight", "head.output.weight")


def resized(folder: Path, tokens: int) -> dict[str, np.ndarray]:
    """Rows by transformers: it adds to the mean a noise of 3e-5 of the spread."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.resize_token_embeddings(tokens, mean_resizing=True)
    both = model.get_input_embeddings(), model.get_output_embeddings()
    return {name: layer.weight.detach().numpy() for name, layer in zip(NAMES, both, strict=True)}


@pytest.mark.parametrize(
    ("family", "layout", "how"),
    [
        ("gpt2", {}, "mean"),
        ("gpt2", {}, "random"),
        ("qwen2, yarn", {"tensor_parallel": 2}, "mean"),
        ("qwen3", {"zero_stage": 3}, "random"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_rows_of_new_tokens(family: str, layout: dict[str, Any], how: str, tmp_path: Path) -> None:
    """As transformers adds them, on any layout; what was there is the same."""
    folder = write_folder(
        family, tmp_path / "model", **({"num_key_value_heads": 2} if "yarn" in family else {})
    )
    old = json.loads((folder / "config.json").read_text())["vocab_size"]
    given = dict(pretrained_checkpoint_path=str(folder), num_workers=0)
    plain = run_distributed(1, train, given)[0].initial
    wanted = resized(folder, old + 9)
    ranks = 2 if layout else 1
    more = {**given, **layout, "vocab_size": old + 9, "resize_vocabulary": how}
    grid = {name: size for name, size in layout.items() if "parallel" in name}
    found = run_distributed(ranks, train, more, **grid)[0].initial
    assert found.keys() == plain.keys()
    for name, weight in found.items():
        if name not in NAMES:
            assert np.array_equal(weight, plain[name]), name
            continue
        assert len(weight) == old + 9 and np.array_equal(weight[:old], wanted[name][:old])
        spread = wanted[name][:old].std()
        if how == "mean":
            assert np.allclose(weight[old:], wanted[name][old:], atol=1e-3 * spread)
        else:
            assert 0.015 < weight[old:].std() < 0.025, "initializer_range of config.json is 0.02"
            assert len(np.unique(weight[old:])) == weight[old:].size


def test_a_run_with_more_tokens_exports_and_resumes(tmp_path: Path) -> None:
    """The export has the new size, and a resume goes on from its own rows: the same losses as
    without a stop."""
    from transformers import AutoModelForCausalLM

    folder = write_folder("gpt2", tmp_path / "model")
    old = json.loads((folder / "config.json").read_text())["vocab_size"]
    start = [
        *FLAGS,
        f"--pretrained_checkpoint_path={folder}",
        "--resize_vocabulary=random",
        f"--vocab_size={old + 5}",
    ]
    losses = []
    for name, stops in (
        ("whole", ["--train_iters=4"]),
        ("cut", ["--train_iters=4", "--stop_interval=2"]),
    ):
        words = [*start, f"--experiment_dir={tmp_path / name}", "--export_interval=4", *stops]
        for _ in stops:
            assert run(words).codes == [0]
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        losses.append([record["loss"] for record in records if record["phase"] == "training"])
    assert losses[0] == losses[1] and len(losses[0]) == 4
    given = {"pretrained_checkpoint_path": str(tmp_path / "cut"), "num_workers": 0}
    plain = run_distributed(1, train, given)[0].initial["embedding.word.weight"]
    more = {**given, "vocab_size": old + 40, "resize_vocabulary": "mean", "zero_stage": 3}
    # from a checkpoint of its own
    rows = run_distributed(2, train, more)[0].initial["embedding.word.weight"]
    assert np.array_equal(rows[: old + 5], plain) and np.allclose(
        rows[old + 5 :], plain.mean(0), atol=1e-7
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "cut" / "export" / "4")
    assert model.get_input_embeddings().weight.shape[0] == model.config.vocab_size == old + 5


def test_sizes_that_differ_are_named(tmp_path: Path) -> None:
    """The flag with the folder's value, and the way to add tokens."""
    folder = write_folder("gpt2", tmp_path / "model")
    flags = [*FLAGS, f"--pretrained_checkpoint_path={folder}", "--train_iters=1"]
    for flag, stated in (
        ("--vocab_size=700", "--vocab_size="),
        ("--max_position_embeddings=99", "--max_position_emb"),
    ):
        outcome = run([*flags, flag, "--ignore_pretrained_config=1"])
        assert outcome.codes == [4] and f"its config.json says {stated}" in outcome.output
        assert "download" not in outcome.output
        assert ("or --resize_vocabulary=mean" in outcome.output) == (stated == "--vocab_size=")
    for more in ([], ["--use_pretrained_config=0"]):
        with pytest.raises(
            CheckpointError, match="--vocab_size: .* in the checkpoint, 700 now"
        ) as refused:
            parse([*flags, "--vocab_size=700", *more])
        assert "or --resize_vocabulary=mean for other tokens:\n" in str(refused.value)
    with pytest.raises(CheckpointError) as refused:
        parse([*flags, "--hidden_size=48"])
    assert "resize_vocabulary" not in str(refused.value)
    assert (
        resolve(
            parse([*flags, "--vocab_size=700", "--resize_vocabulary=mean"]).config, 1
        ).model.vocab_size
        == 700
    )
