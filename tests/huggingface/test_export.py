"""Exports: files and their content, masters gathered in windows, the model card, and loading by
lm-eval."""

import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_lite.checkpoint import files
from megatron_lite.cli.parse import parse
from megatron_lite.config import Config, ModelConfig, unflatten
from megatron_lite.data.tokenizing import train_tokenizer
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import StorageError
from megatron_lite.huggingface import export as huggingface
from megatron_lite.huggingface import export_folder
from megatron_lite.huggingface.architectures import check_exportable
from megatron_lite.huggingface.config_file import hugging_face_config, model_values
from megatron_lite.huggingface.export_folder import ExportFolder
from megatron_lite.huggingface.model_card import TrainingSummary, model_card
from megatron_lite.huggingface.model_folder import resolved_model
from megatron_lite.model.gpt import build_gpt, shapes_of
from megatron_lite.validation import resolve
from megatron_lite.zero.multi_stage import MultiStage
from tests.support.fakes import Layout, World, empty_model, make_specs
from tests.support.families import FAMILIES, SEQUENCE_LENGTH, make_config
from tests.support.folder_checks import our_config
from tests.support.harness import layers_of, run_distributed, tiny_config
from tests.support.launch import TINY, run
from tests.support.thread_ranks import ThreadRank


def random_weights(model: ModelConfig) -> dict[str, Tensor]:
    """Values of a size at which a mistake in any parameter shows in the logits."""
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for name, shape in shapes_of(build_gpt(model, SEQUENCE_LENGTH)).items():
        value = torch.randn(shape, generator=generator)
        weights[name] = (
            1 + 0.3 * value if "norm.weight" in name else value * (0.3 if len(shape) == 1 else 0.2)
        )
    return weights


def reused_memory(weights: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """As the real source does: each tensor lies in memory that the next one overwrites."""
    buffer = torch.empty(
        max(value.numel() for value in weights.values()), dtype=next(iter(weights.values())).dtype
    )
    for name, value in weights.items():
        view = buffer[: value.numel()].view(value.shape).copy_(value)
        yield name, view
        buffer.fill_(math.nan)


def export(
    directory: Path, config: Config, weights: dict[str, Tensor], world_size: int = 1
) -> None:
    """Export, and raise what any rank raised."""

    def rank_main(distributed: ThreadRank) -> None:
        shapes = shapes_of(build_gpt(config.model, SEQUENCE_LENGTH)).items()
        specs = make_specs([(name, shape, True) for name, shape in shapes])
        model = empty_model(specs, Layout(world_size), distributed.rank)
        huggingface.save_huggingface(directory, model, config, distributed, reused_memory(weights))  # type: ignore[arg-type]

    results = World(world_size).run(rank_main)
    for result in results:
        if isinstance(result, Exception):
            assert [type(other) for other in results] == [type(result)] * world_size, results
            raise result


def load(directory: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    # Before version 5, transformers converts everything to fp32 unless told to keep the dtype of
    # the config.
    options = {} if int(transformers.__version__.split(".")[0]) >= 5 else {"torch_dtype": "auto"}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True, **options
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
        info
    )
    return model.eval()


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_half_precision_weights_arrive_bit_for_bit(
    dtype: str, torch_dtype: torch.dtype, tmp_path: Path
) -> None:
    """transformers loads them in the training dtype, with the same bits."""
    config = our_config("llama", dtype)
    weights = {name: value.to(torch_dtype) for name, value in random_weights(config.model).items()}
    export(tmp_path / "7", config, weights)
    model = load(tmp_path / "7")
    assert model.dtype == torch_dtype
    assert torch.equal(model.model.embed_tokens.weight, weights["embedding.word.weight"])
    assert torch.equal(
        model.model.layers[1].mlp.up_proj.weight, weights["blocks.1.mlp.up.weight"].chunk(2)[1]
    )


def test_several_files_and_ranks(tmp_path: Path) -> None:
    """Cut into files by size, with an index that names them all; only rank 0 writes; transformers
    loads it."""
    config = our_config("llama", head_groups=1)
    config = dataclasses.replace(
        config, training=dataclasses.replace(config.training, export_shard_size="12KB")
    )
    weights = random_weights(config.model)
    export(tmp_path / "100", config, weights, world_size=3)
    names = sorted(path.name for path in (tmp_path / "100").glob("*.safetensors"))
    assert names == [
        f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)
    ]
    assert len(names) > 2
    index = json.loads((tmp_path / "100" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(names)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in weights.values())
    export(tmp_path / "1", our_config("llama", head_groups=1), weights)
    found, whole = (load(tmp_path / name).state_dict() for name in ("100", "1"))
    assert found.keys() == whole.keys() and all(
        torch.equal(value, whole[name]) for name, value in found.items()
    )


def test_files_follow_the_umask(tmp_path: Path) -> None:
    """Others can read an export if the umask lets them (safetensors itself would write 0600)."""
    previous = os.umask(0o022)
    try:
        config = our_config("llama")
        export(tmp_path / "1", config, random_weights(config.model))
    finally:
        os.umask(previous)
    entries = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "1").iterdir()}
    names = ("README.md", "config.json", "generation_config.json", "model.safetensors")
    assert entries == dict.fromkeys(names, 0o644)
    assert (tmp_path / "1").stat().st_mode & 0o777 == 0o755


def test_exporting_again_replaces_the_folder_and_keeps_foreign_ones(tmp_path: Path) -> None:
    """A second export of an iteration wins; a folder with other files is moved aside, not
    deleted."""
    config = our_config("llama")
    weights = random_weights(config.model)
    export(tmp_path / "1", config, weights)
    export(tmp_path / "1", config, {name: value + 1 for name, value in weights.items()})
    assert torch.equal(load(tmp_path / "1").model.norm.weight, weights["head.norm.weight"] + 1)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    (tmp_path / "1" / "notes.txt").write_text("mine")
    export(tmp_path / "1", config, weights)
    assert torch.equal(load(tmp_path / "1").model.norm.weight, weights["head.norm.weight"])
    (aside,) = (path for path in tmp_path.iterdir() if path.name != "1")
    assert aside.name.startswith("1.aside-")
    assert (aside / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("fails", ["new_file", "pwrite", "write_text", "publish", "sync_files"])
def test_a_full_disk_is_a_storage_error_on_every_rank(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it happens: every rank raises, no export appears, nothing temporary stays."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    owners = {"sync_files": export_folder, "pwrite": os}
    monkeypatch.setattr(owners.get(fails, files), fails, full)
    monkeypatch.setattr(huggingface, "AGREE_BYTES", 1000)  # noticed in between
    config = our_config("llama")
    with pytest.raises(StorageError, match=r"rank 0: .*No space left on device .*bytes free"):
        export(tmp_path / "1", config, random_weights(config.model), world_size=2)
    assert list(tmp_path.iterdir()) == []


def test_left_over_folders_are_swept(tmp_path: Path) -> None:
    """The next export deletes what a killed one left behind."""
    left = tmp_path / ".tmp-5-0123456789abcdef"
    left.mkdir()
    (left / "model-00001.safetensors").write_bytes(b"partial")
    config = our_config("llama")
    export(tmp_path / "6", config, random_weights(config.model))
    assert [path.name for path in tmp_path.iterdir()] == ["6"]


def test_a_left_out_weight_is_noticed(tmp_path: Path) -> None:
    """An incomplete source of weights never becomes an export."""
    config = our_config("llama")
    weights = random_weights(config.model)
    del weights["blocks.1.mlp_norm.weight"]
    with pytest.raises(AssertionError, match=r"blocks\.1\.mlp_norm\.weight"):
        export(tmp_path / "1", config, weights)
    assert list(tmp_path.iterdir()) == []


TEXT = "Hello  world 12345, it's 3.14159!\n\n\tdef f(x):\n        return x**2  # café naïve ÄÖÜ 🎉👩\u200d💻 日本語\n"


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_gives_the_ids_of_the_training(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of spaces, digits, accents, emoji and code: by AutoTokenizer, or by the line of the export's
    warning."""
    transformers, ours = pytest.importorskip("transformers"), tmp_path / "own.json"
    tokenizer = train_tokenizer(iter([TEXT * 4, "123 1234 don't  we"] * 4), 400, str(ours))
    model = resolved_model(model_values(make_config(family, vocab_size=400).to_dict()), "")
    sizes = {"sequence_length": 16, "batch_size": 1, "dataset_source": "random"}
    folder = ExportFolder([], resolve(dataclasses.replace(unflatten(sizes), model=model), 1), 1)
    folder.create(tmp_path / "export")
    folder.finish(ours)
    # transformers has warnings of its own, once a process
    said = [one.getMessage() for one in caplog.records if one.name == "megatron_lite"]
    loader = transformers.PreTrainedTokenizerFast if said else transformers.AutoTokenizer
    loaded = loader.from_pretrained(tmp_path / "export")
    assert (
        loaded(TEXT)["input_ids"] == tokenizer.encode(TEXT)
        and tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    )
    warned = ["PreTrainedTokenizerFast.from_pretrained" in message for message in said]
    assert warned == [True] * (check_exportable(model) == "qwen2")


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    """AutoTokenizer loads it from the export, and the config knows its end of document."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<|endoftext|>": 0, "to": 1, "be": 2, "or": 3, "not": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="not"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = our_config("llama")
    data = dataclasses.replace(config.data, tokenizer_file=str(tmp_path / "tokenizer.json"))
    export(
        tmp_path / "export" / "1",
        dataclasses.replace(config, data=data),
        random_weights(config.model),
    )
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "export" / "1")
    assert loaded("to be or not to be")["input_ids"] == [1, 2, 3, 4, 1, 2]
    model = load(tmp_path / "export" / "1")
    assert (
        model.config.eos_token_id
        == model.generation_config.eos_token_id
        == loaded.eos_token_id
        == 0
    )
    export(
        tmp_path / "export" / "1",
        dataclasses.replace(config, data=data),
        random_weights(config.model),
    )
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["1"]


def test_the_config_states_both_spellings() -> None:
    """transformers 5 reads dtype and rope_parameters, older ones torch_dtype and rope_theta;
    dropout is stated."""
    config = our_config("llama", "bf16", attention_dropout=0.1, hidden_dropout=0.2)
    content = hugging_face_config(config, {})
    assert content["dtype"] == content["torch_dtype"] == "bfloat16"
    assert content["rope_theta"] == content["rope_parameters"]["rope_theta"] == 100.0
    assert content["attention_dropout"] == 0.1
    assert content["bos_token_id"] is None and content["eos_token_id"] is None
    assert content["max_position_embeddings"] == 64
    longer = dataclasses.replace(
        config, batch=dataclasses.replace(config.batch, sequence_length=4096)
    )
    assert hugging_face_config(longer, {})["max_position_embeddings"] == 4096
    gpt2 = hugging_face_config(
        our_config("gpt2", hidden_dropout=0.2, embedding_dropout=0.3, attention_dropout=0.1), {}
    )
    assert (gpt2["resid_pdrop"], gpt2["embd_pdrop"], gpt2["attn_pdrop"]) == (0.2, 0.3, 0.1)
    starcoder2 = hugging_face_config(
        our_config("starcoder2, window", hidden_dropout=0.2, embedding_dropout=0.3),
        {"eos_token_id": 3},
    )
    assert (starcoder2["residual_dropout"], starcoder2["embedding_dropout"]) == (0.2, 0.3)
    assert starcoder2["eos_token_id"] == 3


LAYOUTS: dict[str, dict[str, Any]] = {
    "ZeRO 1": {"zero_stage": 1},
    "ZeRO 3, two blocks a stage": {"zero_stage": 3, "layers_per_stage": 2.0},
    "frozen": {"zero_stage": 2, "freeze": ("embedding", "*.bias")},
    "split": {"zero_stage": 1, "training_dtype": "bf16", "split_master_weights": True},
}


def gathered(
    distributed: Distributed, options: dict[str, Any], window: int
) -> dict[str, np.ndarray]:
    """Return all masters, gathered in windows of N elements, after comparing them with
    `full_weights`."""
    huggingface.WINDOW_NUMEL = window  # of this process alone
    config = tiny_config(distributed.world_size, **options)
    split = config.multi_stage.split_master_weights
    model = MultiStage(
        layers_of(config),
        config.multi_stage,
        config.batch,
        config.distributed.training_dtype,
        distributed,
    )
    model.initialize(3)
    found = {
        name: value.numpy().copy() for name, value in huggingface.master_weights(model, distributed)
    }
    for name, weight in model.full_weights():
        if distributed.rank == 0:
            rounded = found[name] if not split else found[name].astype(np.float32)
            assert np.allclose(
                rounded, weight.float().numpy(), rtol=2**-8 if split else 0, atol=0
            ), name
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_masters_are_whole_whatever_the_windows(ranks: int) -> None:
    """Windows that divide nothing, every layout: bit for bit the same fp32 numbers on rank 0,
    nothing on the others."""
    expected = run_distributed(1, gathered, LAYOUTS["ZeRO 1"], 2**24)[0]
    for options in LAYOUTS.values():
        first, *others = run_distributed(ranks, gathered, options, 1000)
        assert first.keys() == expected.keys()
        assert all(np.array_equal(first[name], value) for name, value in expected.items()), options
        assert all(value.size == 0 for other in others for value in other.values())


def config(*flags: str) -> Config:
    """Return a resolved configuration."""
    return resolve(parse([*TINY, *flags]).config, 1)


def test_what_a_card_says() -> None:
    """Model, data with shares, tokens, losses, options; the license is left open where nobody can
    overlook it.

    Batches and data are those that were counted, not those of the options.
    """
    sets = [
        ("a" * 16, "books", 99, 16, 6),
        ("b" * 16, "web", 99, 16, 10),
        ("b" * 16, "web", 60, 32, 4),
    ]
    counts = {"stages": [(0, 4, 16), (2, 8, 16), (3, 4, 32)], "sets": sets}
    blend = "--data_path 0.25 /secret/place/books 0.75 /secret/place/web"
    options = config(
        "--lr=0.02", "--dataset_source=list", *blend.split(), "--experiment_dir=/home/somebody/run"
    )
    card = model_card(
        options, "gpt2", 1_234_567, 234_567, TrainingSummary(4, {"validation loss": 2.5}, counts)
    )
    assert "# A gpt2 model with 1.23M parameters" in card and "| parameters | 1,234,567 |" in card
    assert "| parameters that compute a token | 234,567 |" in card
    assert "`books` (25.0%), `web` (75.0%) |" in card and "| iterations | 4 of 6 |" in card
    assert "| tokens | 384 |" in card and "2.5000 nats per token (perplexity 12.18)" in card
    assert "--lr=0.02" in card and "--zero_stage" not in card
    assert (
        "license: other\nlicense_name: choose-a-license" in card
        and "License: not chosen yet" in card
    )
    assert "/secret" not in card and "somebody" not in card


def test_names_of_data_sets_stay_text() -> None:
    """Markdown and HTML in a file name end up as question marks."""
    options = config("--dataset_source=list", "--data_path=/d/---`|<script>")
    counts = {"stages": [(0, 4, 16)], "sets": [("f" * 16, "---`|<script>", 9, 16, 4)]}
    card = model_card(options, "gpt2", 10, 10, TrainingSummary(1, {}, counts))
    assert "`---???script?`" in card and "<script" not in card


def test_weights_of_unknown_origin() -> None:
    """A converted folder has a card of its model alone."""
    card = model_card(config(), "llama", 10**9, 10**9, None)
    assert (
        "## Model" in card
        and "## Training" not in card
        and "compute a token" not in card
        and "1B parameters" in card
    )


def test_the_hubs_parser_reads_the_card_of_a_run(tmp_path: Path) -> None:
    """A run's export has a card with its losses; huggingface_hub finds the metadata."""
    hub = pytest.importorskip("huggingface_hub")
    flags = [
        "--export_interval=3",
        "--validation_iters=1",
        "--validation_interval=3",
        "--export_model_type=gpt2",
    ]
    outcome = run([*TINY, "--device=cpu", *flags, f"--experiment_dir={tmp_path}"])
    assert outcome.codes == [0], outcome.output
    path = tmp_path / "export" / "3" / "README.md"
    data = hub.ModelCard.load(path, ignore_metadata_errors=False).data
    assert (data.license, data.license_name, data.library_name) == (
        "other",
        "choose-a-license",
        "transformers",
    )
    text = path.read_text("utf-8")
    assert (
        "| iterations | 3 of 6 |" in text
        and "| validation loss |" in text
        and str(tmp_path) not in text
    )
    assert "random tokens, a test" in text


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
@pytest.mark.skipif(
    shutil.which("lm_eval") is None,
    reason="lm_eval is not installed (pip install lm_eval accelerate)",
)
def test_a_task_of_ones_own(tmp_path: Path) -> None:
    """A model with its tokenizer answers questions with choices; the accuracy of a made-up task is
    a number."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(
        vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    flags = [
        "--vocab_size=257",
        "--export_interval=6",
        f"--tokenizer_file={tmp_path}/tokenizer.json",
    ]
    outcome = run(
        [*TINY, "--max_position_embeddings=256", *flags, f"--experiment_dir={tmp_path}/run"]
    )
    assert outcome.codes == [0], outcome.output

    questions = [{"question": "A bird can", "choices": [" fly", " read"], "answer": 0}] * 3
    (tmp_path / "animals.jsonl").write_text(
        "".join(json.dumps(question) + "\n" for question in questions)
    )
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "animals.yaml").write_text(TASK.format(data=tmp_path / "animals.jsonl"))
    command = f"lm_eval --model hf --model_args pretrained={tmp_path}/run/export/6 --tasks animals --device cpu"
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hub"),
    }
    done = subprocess.run(
        [*command.split(), "--include_path", str(tmp_path / "tasks")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"\|animals\|.*\|acc +\|.*\| *[01]\|", done.stdout), done.stdout
