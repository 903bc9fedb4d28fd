"""--sample_interval: the same texts at every ZeRO stage and number of ranks, no effect on training,
clear errors."""

import contextlib
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.data.tokenizing import ByteTokenizer
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import DataError, UsageError
from megatron_lite.generation.samples import Samples, load_prompts
from megatron_lite.model.kv_cache import KeyValueCache
from megatron_lite.monitor.trackers.metrics_file import MetricsFile
from megatron_lite.monitor.trackers.opening import Trackers
from megatron_lite.run.stop_signal import StopRequested
from tests.support.harness import (
    full_weights,
    run_distributed,
    same_weights,
    tiny_config,
    train_whole,
)
from tests.support.token_files import save_byte_tokenizer

PROMPTS = ("the", "a longer one", "", "the")
KEPT = ("the", "a longer one", "the")
LLAMA = dict(
    use_rotary_embeddings=True,
    gated=True,
    add_linear_biases=False,
    normalization_type="rms_norm",
    head_groups=2,
    tie_word_embeddings=False,
    window_size=5,
)


def options(folder: Path, **more: Any) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    save_byte_tokenizer(str(folder / "tokenizer.json"))
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return (
        dict(
            vocab_size=257,
            sequence_length=24,
            batch_size=4,
            train_iters=4,
            lr=1e-2,
            lr_warmup=2,
            init_method_std=0.5,
            tokenizer_file=str(folder / "tokenizer.json"),
            sample_interval=2,
            sample_tokens=9,
            sample_prompts=str(folder / "prompts.txt"),
            experiment_dir=str(folder / "run"),
            hidden_dropout=0.1,
        )
        | more
    )


def train_each(distributed: Distributed, *every: dict[str, Any]) -> list[dict[str, Any]]:
    """Run several trainings; return the weights of each, and the next number of the global random
    generator."""
    results: list[dict[str, Any]] = []
    for values in every:
        torch.manual_seed(5)
        run = train_whole(distributed, tiny_config(distributed.world_size, **values))
        results.append({"weights": full_weights(run.model), "random": torch.rand(3).tolist()})
    return results


def lines(values: dict[str, Any]) -> list[dict[str, Any]]:
    path = Path(values["experiment_dir"]) / "samples.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "model, layouts",
    [
        pytest.param({"hidden_dropout": 0.0}, ((1, 1), (2, 3)), id="gpt2: 1 rank, 2 with ZeRO 3"),
        pytest.param(
            LLAMA,
            ((2, 1), (2, 2), (2, 3)),
            id="llama: 2 ranks with ZeRO 1, 2, 3",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_samples_leave_no_trace_and_do_not_depend_on_the_partition(
    model: dict[str, Any], layouts: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    """Samples do not change a bit of the training, and the texts are the same for every layout."""
    texts = []
    for ranks, zero_stage in layouts:
        with_samples = options(tmp_path / f"{ranks} {zero_stage}", zero_stage=zero_stage, **model)
        without = {
            key: value for key, value in with_samples.items() if not key.startswith("sample_")
        }
        without["experiment_dir"] = None
        for sampled, plain in run_distributed(ranks, train_each, with_samples, without):
            assert (
                same_weights(sampled["weights"], plain["weights"])
                and sampled["random"] == plain["random"]
            )
        found = lines(with_samples)
        assert [line["iteration"] for line in found] == [2, 4]
        assert [[sample["prompt"] for sample in line["samples"]] for line in found] == [
            list(KEPT)
        ] * 2
        assert all(len(sample["tokens"]) == 9 for line in found for sample in line["samples"])
        texts.append([sample["tokens"] for line in found for sample in line["samples"]])
    assert texts[0] == texts[1] and texts[0][0] == texts[0][2]
    assert len({token for tokens in texts[0] for token in tokens}) > 4, (
        "texts of few tokens prove little"
    )


def test_a_resumed_run_appends_and_draws_repeat(tmp_path: Path) -> None:
    """A run that was stopped and resumed writes the same lines as one that was not; equal prompts
    draw differently."""
    whole = options(
        tmp_path / "whole",
        sample_temperature=1.0,
        sample_top_k=50,
        sample_top_p=0.9,
        hidden_dropout=0.0,
    )
    parts = whole | {"experiment_dir": str(tmp_path / "parts")}
    run_distributed(1, train_each, whole, parts | {"stop_interval": 2})
    run_distributed(1, train_each, parts)
    expected, found = lines(whole), lines(parts)
    assert [line["samples"] for line in found] == [line["samples"] for line in expected]
    assert [line["run"] for line in found] == [0, 1]
    first = expected[0]["samples"]
    assert first[0]["prompt"] == first[2]["prompt"] and first[0]["tokens"] != first[2]["tokens"]


class FakeRank:
    """Fake of `Distributed` with one rank."""

    device, rank = torch.device("cpu"), 0

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def wait_for_device(self) -> None:
        pass


class FakeModel:
    """Fake model that returns given logits and counts its passes."""

    def __init__(self, value: float) -> None:
        self.value, self.passes = value, 0

    def output(self, micro_batch: Any) -> torch.Tensor:
        self.passes += 1
        # Samples use no attention library that might be missing: an error would end the training.
        assert getattr(micro_batch.cache, "backend", "math") == "math"
        return torch.full((micro_batch.tokens.shape[1], 257), self.value)


class FakeStopSignal:
    """Fake stop signal."""

    def __init__(self, received: int) -> None:
        self.received = received


@pytest.mark.parametrize("value, received", [(math.nan, 0), (0.0, 15), (0.0, 0)])
def test_neither_broken_logits_nor_a_signal_leave_half_a_line(
    value: float, received: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Logits that are not finite give a warning, not an error; a signal stops sampling at once."""
    config = tiny_config(**options(tmp_path))
    file, model = MetricsFile(tmp_path / "run" / "samples.jsonl"), FakeModel(value)
    fakes: tuple[Any, ...] = (FakeRank(), FakeStopSignal(received))
    samples = Samples(config, *fakes, ByteTokenizer(), load_prompts(config), Trackers([file]))
    with caplog.at_level(logging.INFO):
        with pytest.raises(StopRequested) if received else contextlib.nullcontext():
            samples.write(model, 3, logging.getLogger("test"))  # type: ignore[arg-type]
    written = value == 0.0 and not received
    assert len(lines(options(tmp_path))) == written
    assert ("logits are not finite" in caplog.text) is math.isnan(value)
    # One pass per prompt, and one per further token (8) of all prompts together.
    assert model.passes == (len(KEPT) + 8 if written else 1)


def test_a_dry_run_says_what_samples_keep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run shows the bytes that a cache takes for a text, with a window in one block of two."""
    from megatron_lite.planner.report import dry_run

    some = dict(window_size=7, attention_pattern=("window", "full"), dry_run=True)
    config = tiny_config(**(options(tmp_path) | LLAMA | some))
    assert dry_run(config, config, 1, (), (), prints=True) == 0
    length = config.batch.sequence_length
    cache = KeyValueCache(1, length)
    like = torch.zeros(1, config.model.head_groups or 0, 1, config.model.kv_channels or 0)
    kept = [
        pair
        for block in range(config.model.num_layers)
        for pair in cache.of(str(block), like, config.model.window(block))
    ]
    size = sum(keys.nbytes + values.nbytes for keys, values in kept)
    shown = f"keep up to {size:,} bytes of keys and values per text of {length} tokens"
    assert shown in capsys.readouterr().out


def test_a_sample_that_does_not_fit_is_found_before_training(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="a sample and its prompt must fit into sequence_length; write at most 23"
    ):
        tiny_config(**options(tmp_path, sample_tokens=24))


def test_a_prompt_on_the_command_line(tmp_path: Path) -> None:
    """Alone, or before those of a file; it may look like one."""
    values = options(tmp_path)
    for more, texts in (
        ({}, ["a b.txt", *filter(None, PROMPTS)]),
        ({"sample_prompts": None}, ["a b.txt"]),
    ):
        config = tiny_config(**values | {"sample_prompt": "a b.txt"} | more)
        assert [text for text, *_ in load_prompts(config)] == texts


@pytest.mark.parametrize(
    "prompts, change, fact",
    [
        (None, {}, "cannot be read"),
        (b"\n  \n", {}, "holds no prompt"),
        (b"\xff\xfe", {}, "not UTF-8"),
        (b"x" * 16, {}, "--sample_tokens=9 exceeds"),
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
