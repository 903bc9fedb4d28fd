"""The export of a trained model is that model: transformers loads it and computes the same logits
and losses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from megatron_lite.data.host_batch import micro_batch
from megatron_lite.data.open_data import open_data
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.model.embedding_and_head import Head
from tests.support import harness
from tests.support.harness import run_distributed, same_weights, start_run
from tests.support.token_files import write_documents


@pytest.fixture(scope="module")
def transformers() -> Any:
    """Imported for the tests that compare with it: forked ranks import this file too, and need it
    not."""
    return pytest.importorskip("transformers")


LLAMA = {**harness.LLAMA, "kv_channels": 12}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": {**LLAMA, "window_size": 5, "tie_word_embeddings": True},
    "gpt2": {},
    "starcoder2": {"use_rotary_embeddings": True, "head_groups": 2, "window_size": 9},
}


def a_corpus(folder: Path) -> str:
    """Write a few documents with some structure to learn."""
    prefix = str(folder / "corpus")
    generator = np.random.default_rng(0)
    write_documents(prefix, (np.cumsum(generator.integers(0, 3, size=90)) % 64 for _ in range(60)))
    return prefix


def train_and_export(distributed: Distributed, options: dict[str, Any]) -> dict[str, Any]:
    """Train with the program's own loop and return our logits of the first validation batch."""
    from megatron_lite.train import train
    from tests.support.harness import tiny_config

    run = start_run(distributed, tiny_config(distributed.world_size, **options))
    train(run)
    (on_host,) = next(run.data.batches("validation", 0, 1))
    batch = micro_batch(on_host, distributed.device, None, None)
    hidden = None
    for stage in run.model.stages[:-1]:
        stage.gather()
        hidden = stage.evaluate(hidden, batch)
    last = run.model.stages[-1]
    last.gather()
    last.require_weights()
    (head,) = last.layers
    assert isinstance(head, Head)
    with torch.no_grad():
        logits = head.logits(hidden)
    run.trackers.close(0)
    return {"tokens": on_host.tokens.numpy(), "logits": logits.float().numpy()}


def train_and_export_several(distributed: Distributed, runs: list[dict[str, Any]]) -> None:
    for options in runs:
        train_and_export(distributed, options)


def options_for(folder: Path, architecture: str) -> dict[str, Any]:
    return {
        **ARCHITECTURES[architecture],
        "dataset_source": "list",
        "data_path": (a_corpus(folder),),
        "split": (8.0, 2.0, 0.0),
        "experiment_dir": str(folder / "run"),
        "export_interval": 12,
        "train_iters": 12,
        "validation_iters": 3,
        "lr": 3e-3,
        "zero_stage": 3,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    }


@pytest.mark.parametrize(
    "architecture",
    # By default the logits and losses of mistral are those of the tests of averages and of frozen
    # models.
    [
        pytest.param(name, marks=[] if name == "gpt2" else [pytest.mark.slow])
        for name in ARCHITECTURES
    ],
)
def test_transformers_computes_the_same_logits_and_validation_loss(
    transformers: Any, tmp_path: Path, architecture: str
) -> None:
    """Logits agree to 1e-5 and the mean validation loss to 1e-5 relative in fp32, after two ranks
    with ZeRO 3."""
    options = options_for(tmp_path, architecture)
    results = run_distributed(2, train_and_export, options)
    model = exported_model(transformers, tmp_path)
    assert type(model).__name__.lower().startswith(architecture)
    assert_same_logits(model, results)
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    ours = [record["loss"] for record in records if record["phase"] == "validation"][-1]
    assert ours < records[0]["loss"] - 0.3, "nothing was learned: equal losses would prove little"
    np.testing.assert_allclose(validation_loss(model, options), ours, rtol=1e-5)


def exported_model(transformers: Any, folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder / "run" / "export" / "12"
    ).eval()


def assert_same_logits(model: Any, results: list[dict[str, Any]]) -> None:
    """Compare a transformers model with the logits of every rank."""
    for result in results:
        with torch.no_grad():
            logits = model(torch.from_numpy(result["tokens"])[:, :-1]).logits
        np.testing.assert_allclose(logits.numpy(), result["logits"], atol=1e-5, rtol=1e-5)


def validation_loss(model: Any, options: dict[str, Any]) -> float:
    """Return the mean cross-entropy of a transformers model over the validation batches, read on
    one rank."""
    from tests.support.harness import tiny_config

    config = tiny_config(1, **{**options, "experiment_dir": None, "export_interval": None})
    losses = []
    for ((tokens, *_),) in open_data(config, 0, 1).batches(
        "validation", 0, options["validation_iters"]
    ):
        with torch.no_grad():
            logits = model(tokens[:, :-1]).logits
        losses.append(
            functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
        )
    return float(np.mean(losses))


def test_an_averaged_export_has_the_averaged_loss(transformers: Any, tmp_path: Path) -> None:
    """transformers computes `averaged_loss` from --export_weights=average, to 1e-5 relative: ZeRO
    3, a tied head, a frozen block. The loss of the weights is another one."""
    options = {**options_for(tmp_path, "mistral"), "hidden_dropout": 0.0, "attention_dropout": 0.0}
    options |= {"freeze": ("blocks.0",)}
    options |= {
        "ema_type": "ema_decay_sqrt",
        "ema_switch_iter": 5,
        "ema_decay_iters": 8,
        "export_weights": "average",
    }
    run_distributed(2, train_and_export, options)
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    (validation,) = (record for record in records if record["phase"] == "validation")
    model = exported_model(transformers, tmp_path)
    found = validation_loss(model, {**options, "export_weights": "raw"})
    np.testing.assert_allclose(found, validation["averaged_loss"], rtol=1e-5)
    assert abs(found - validation["loss"]) > 1e-3


def test_exports_are_the_same_bits_for_every_zero_stage(tmp_path: Path) -> None:
    """Two ranks, bf16: the files of ZeRO 1, 2 and 3 hold identical weights."""
    from safetensors.numpy import load_file

    runs = []
    for zero_stage in (1, 2, 3):
        folder = tmp_path / str(zero_stage)
        folder.mkdir()
        options = {"zero_stage": zero_stage, "hidden_dropout": 0.0, "attention_dropout": 0.0}
        options |= {"train_iters": 3, "lr_warmup": 1, "export_interval": 3, "validation_iters": 1}
        runs.append({**options_for(folder, "llama"), **options})
    run_distributed(2, train_and_export_several, runs)
    first, *others = (
        load_file(tmp_path / name / "run/export/3/model.safetensors") for name in ("1", "2", "3")
    )
    assert all(same_weights(first, other) for other in others)


FREEZING: dict[str, dict[str, Any]] = {
    "bf16": {"training_dtype": "bf16"},
    "frozen in low precision": {
        "training_dtype": "bf16",
        "store_frozen_weights_in_optimization_precision": False,
    },
    "frozen, split": {"training_dtype": "bf16", "split_master_weights": True},
}


@pytest.mark.parametrize(
    "how",
    [pytest.param(how, marks=[pytest.mark.slow] if i else []) for i, how in enumerate(FREEZING)],
)
def test_exports_of_frozen_models_are_whole(transformers: Any, tmp_path: Path, how: str) -> None:
    """Two ranks, embedding and one block frozen: an export has every parameter, the frozen ones at
    the values of an export before training, the others at new ones, all in the training dtype."""
    from safetensors.torch import load_file

    options = {
        **options_for(tmp_path, "llama"),
        **FREEZING[how],
        "zero_stage": 2,
        "freeze": ("embedding", "blocks.1"),
    }
    start = {**options, "experiment_dir": str(tmp_path / "start"), "train_iters": 0, "lr_warmup": 0}
    run_distributed(2, train_and_export_several, [start, options])
    before = load_file(tmp_path / "start" / "export" / "0" / "model.safetensors")
    after = load_file(tmp_path / "run" / "export" / "12" / "model.safetensors")
    assert before.keys() == after.keys() and {value.dtype for value in after.values()} == {
        torch.bfloat16
    }
    frozen = {name for name in after if name.startswith(("model.embed_tokens.", "model.layers.1."))}
    assert len(frozen) == 10
    unchanged = {name for name in after if torch.equal(before[name], after[name])}
    assert unchanged == frozen
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "run" / "export" / "12", dtype="bfloat16"
    )
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in after.items())


@pytest.mark.parametrize("zero_stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_frozen_model_computes_what_its_export_computes(
    transformers: Any, tmp_path: Path, zero_stage: int
) -> None:
    """Logits agree to 1e-5 in fp32 with a frozen embedding tied to the head and frozen norms in
    every stage."""
    options = {
        **options_for(tmp_path, "mistral"),
        "zero_stage": zero_stage,
        "freeze": ("embedding", "*_norm.weight"),
    }
    results = run_distributed(2, train_and_export, options)
    assert_same_logits(exported_model(transformers, tmp_path), results)


def test_a_distributed_export_resumes(tmp_path: Path) -> None:
    """--export_format=distributed leaves a whole checkpoint, moments included, that training can
    start from."""
    options = {
        **options_for(tmp_path, "gpt2"),
        "export_format": "distributed",
        "export_interval": 6,
    }
    run_distributed(2, train_and_export, options)
    (tmp_path / "run" / "export" / "6").rename(tmp_path / "six")
    (tmp_path / "again" / "checkpoints").mkdir(parents=True)
    (tmp_path / "six").rename(tmp_path / "again" / "checkpoints" / "6")
    run_distributed(2, train_and_export, {**options, "experiment_dir": str(tmp_path / "again")})
    first, second = (
        {
            (record["phase"], record["iteration"]): record["loss"]
            for record in map(
                json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines()
            )
        }
        for name in ("run", "again")
    )
    assert len(second) == 7 and all(first[key] == loss for key, loss in second.items())
