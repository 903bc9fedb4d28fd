"""--sample_interval: the same texts at every ZeRO stage and number of ranks, no trace in the training, clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import full_weights, run_distributed, same_weights, tiny_config

from megatron_lite.data.tokenizing import save_byte_tokenizer
from megatron_lite.distributed import Distributed
from megatron_lite.errors import DataError, UsageError
from megatron_lite.generation.samples import load_prompts

PROMPTS = ("the", "a longer one", "", "the")
KEPT = ("the", "a longer one", "the")
LLAMA = dict(
    use_rotary_embeddings=True, gated=True, add_linear_biases=False, normalization_type="rms_norm", head_groups=2,
    tie_word_embeddings=False, window_size=5,
)  # fmt: skip


def options(folder: Path, **more: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    save_byte_tokenizer(str(folder / "tokenizer.json"))
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return dict(
        vocab_size=257, sequence_length=24, batch_size=4, train_iters=4, lr=1e-2, lr_warmup_iters=2,
        init_method_std=0.5, tokenizer_file=str(folder / "tokenizer.json"), sample_interval=2, sample_tokens=9,
        sample_prompts=str(folder / "prompts.txt"), experiment_dir=str(folder / "run"), hidden_dropout=0.1,
    ) | more  # fmt: skip


def train_whole(distributed: Distributed, values: dict[str, Any]) -> dict[str, Any]:
    """A whole run; its weights and losses."""
    from megatron_lite.build import build
    from megatron_lite.experiment import Experiment
    from megatron_lite.stop_signal import StopSignal
    from megatron_lite.train import train

    config, stop = tiny_config(distributed.world_size, **values), StopSignal()
    torch.manual_seed(5)
    run = build(config, distributed, Experiment(config, distributed), stop, ())
    assert train(run)[0] == 0
    stop.restore()
    return {"weights": full_weights(run.model), "random": torch.rand(3).tolist()}


def lines(values: dict[str, Any]) -> list[dict[str, Any]]:
    path = Path(values["experiment_dir"]) / "samples.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_samples_leave_no_trace_and_do_not_depend_on_the_partition(architecture: str, tmp_path: Path) -> None:
    """With one rank or two, at every ZeRO stage, training is the same bit for bit as without samples, and the texts are
    those of one rank.
    """
    model = {} if architecture == "gpt2" else LLAMA
    texts = []
    for name, ranks, zero_stage in (("one", 1, 1), ("two", 2, 1), ("three", 2, 3)):
        with_samples = options(tmp_path / name, zero_stage=zero_stage, **model)
        without = {key: value for key, value in with_samples.items() if not key.startswith("sample_")}
        without["experiment_dir"] = None
        sampled = run_distributed(ranks, train_whole, with_samples)
        plain = run_distributed(ranks, train_whole, without)
        for a, b in zip(sampled, plain, strict=True):
            assert same_weights(a["weights"], b["weights"]) and a["random"] == b["random"]
        found = lines(with_samples)
        assert [line["iteration"] for line in found] == [2, 4]
        assert [[sample["prompt"] for sample in line["samples"]] for line in found] == [list(KEPT)] * 2
        assert all(len(sample["tokens"]) == 9 for line in found for sample in line["samples"])
        texts.append([sample["tokens"] for sample in found[0]["samples"]])
    assert texts[1] == texts[2] and texts[0][0] == texts[0][2]
    assert len({token for tokens in texts[0] for token in tokens}) > 4, "texts of few tokens prove little"


def test_a_resumed_run_appends_and_draws_repeat(tmp_path: Path) -> None:
    """A run that is stopped and resumed writes the lines of one that was not; equal prompts draw differently."""
    whole = options(tmp_path / "whole", sample_temperature=1.0, sample_top_k=50, sample_top_p=0.9, hidden_dropout=0.0)
    run_distributed(1, train_whole, whole)
    parts = whole | {"experiment_dir": str(tmp_path / "parts")}
    run_distributed(1, train_whole, parts | {"stop_interval": 2})
    run_distributed(1, train_whole, parts)
    expected, found = lines(whole), lines(parts)
    assert [line["samples"] for line in found] == [line["samples"] for line in expected]
    assert [line["run"] for line in found] == [0, 1]
    first = expected[0]["samples"]
    assert first[0]["prompt"] == first[2]["prompt"] and first[0]["tokens"] != first[2]["tokens"]


@pytest.mark.parametrize(
    "change, fact",
    [
        ({"sample_prompts": None}, "--sample_prompts"),
        ({"tokenizer_file": None}, "--tokenizer_file"),
        ({"sample_tokens": 24}, "--sample_tokens=23"),
        ({"sample_interval": None}, "no samples are written"),
        ({"sample_top_k": 3}, "nothing is drawn"),
        ({"sample_top_p": 0.5}, "nothing is drawn"),
    ],
)
def test_contradictions_are_found_before_training(change: dict[str, Any], fact: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        tiny_config(**(options(tmp_path) | change))
    assert fact in str(error.value)


@pytest.mark.parametrize(
    "prompts, change, fact",
    [
        (None, {}, "cannot be read"),
        (b"\n  \n", {}, "holds no prompt"),
        (b"\xff\xfe", {}, "not UTF-8"),
        (b"x" * 16, {}, "--sample_tokens=9 follow"),
        ("é".encode(), {"vocab_size": 150}, "vocabulary of 150"),
    ],
)
def test_prompts_that_do_not_fit_are_data_errors(
    prompts: bytes | None, change: dict[str, Any], fact: str, tmp_path: Path
) -> None:
    config = tiny_config(**(options(tmp_path) | change))
    path = tmp_path / "prompts.txt"
    path.unlink() if prompts is None else path.write_bytes(prompts)
    with pytest.raises(DataError) as error:
        load_prompts(config)
    assert fact in str(error.value) and "--sample_prompts" in str(error.value)
