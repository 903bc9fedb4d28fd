"""The tokenizer of exports, compared with transformers beside the training: one warning, and
nothing is left behind."""

import json
import re
import shutil
import signal
from ast import literal_eval
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, normalizers

from megatron_lite.corpus.confined import confined
from megatron_lite.corpus.conversations import find_template
from megatron_lite.corpus.tokenizer_folder import LOADING, effective
from megatron_lite.data.tokenizing import JsonTokenizer, copy_tokenizer
from megatron_lite.huggingface.architectures import ARCHITECTURES
from tests.corpus.test_tokenizer_folders import (
    PLAIN,
    SPLIT,
    TEXTS,
    bytes_and_pairs,
    with_dropout,
    with_prefix,
)
from tests.support.launch import ROOT, TINY, Start, succeed, trains

transformers = pytest.importorskip("transformers")

CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast", "GPTNeoXTokenizerFast", "Qwen2Tokenizer", "LlamaTokenizer",
           "PreTrainedTokenizerFast")  # fmt: skip
THIN = {("GPT2Tokenizer", "llama"), ("Qwen2Tokenizer", "qwen2"), ("PreTrainedTokenizerFast", "qwen2"),
        ("LlamaTokenizer", "mistral")}  # fmt: skip
QWEN2 = "--add_qkv_biases=1 --normalization_type=rms_norm --use_rotary_embeddings=1 --gated=1 --activation_type=silu "
QWEN2 += "--add_linear_biases=0 --add_mlp_biases=0 --export_model_type=qwen2"
FLAGS = [
    *TINY,
    "--vocab_size=266",
    "--dataset_source=random",
    "--export_interval=1",
    "--train_iters=2",
]


def write(
    folder: Path, kind: str = "GPT2Tokenizer", build: Callable[[], Tokenizer] | None = None
) -> str:
    """Write a tokenizer that splits as no class of transformers, and the name of a class; return
    its path."""
    folder.mkdir(exist_ok=True)
    (build or (lambda: bytes_and_pairs(SPLIT)))().save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": kind, "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return str(folder / "tokenizer.json")


def exported(file: str, model_type: str, folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    return str(confined(LOADING, "exported", file, model_type, str(folder)))


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [
        pytest.param(kind, model_type, marks=[] if (kind, model_type) in THIN else pytest.mark.slow)
        for kind in CLASSES
        for model_type in ARCHITECTURES
    ],
)
def test_a_difference_is_seen(tmp_path: Path, kind: str, model_type: str) -> None:
    """If and only if AutoTokenizer gives other ids for texts that the comparison does not know.

    It names the smallest text that differs, with both ids; what the warning advises gives the ids
    of training.
    """
    file, export = write(tmp_path / "F", kind), tmp_path / "export"
    reason, own = exported(file, model_type, export), JsonTokenizer(file, special_tokens=True)
    expected = [own.encode(text) for text in TEXTS]
    loaded = transformers.AutoTokenizer.from_pretrained(export, local_files_only=True)
    assert ([loaded(text)["input_ids"] for text in TEXTS] == expected) == (reason == "")
    assert (reason == "") == (model_type != "qwen2")
    direct = transformers.PreTrainedTokenizerFast.from_pretrained(export)
    assert [direct(text)["input_ids"] for text in TEXTS] == expected
    if reason:
        found = re.fullmatch(
            r"('.*') is (\[.*\]) in transformers, (\[.*\]) by tokenizer.json", reason
        )
        assert found is not None
        text, theirs, ours = map(literal_eval, found.groups())
        assert (
            (loaded(text)["input_ids"], own.encode(text)) == (theirs, ours)
            and theirs != ours
            and len(text) == 2
        )


@pytest.mark.parametrize("build", [with_prefix, bytes_and_pairs, with_dropout])
def test_what_differs_for_qwen2(tmp_path: Path, build: Callable[[], Tokenizer]) -> None:
    """A normalizer, a prefix, the splitting; nothing if a tokenizer is as Qwen's, with dropout,
    too."""
    assert exported(write(tmp_path / "F", build=build), "qwen2", tmp_path / "export")
    like_qwen = bytes_and_pairs(transformers.models.qwen2.tokenization_qwen2.PRETOKENIZE_REGEX)
    like_qwen.normalizer = normalizers.NFC()
    assert not exported(
        write(tmp_path / "F", build=lambda: like_qwen), "qwen2", tmp_path / "export"
    )
    assert not exported(write(tmp_path / "F", build=build), "llama", tmp_path / "export")


def test_special_tokens_that_the_training_did_not_know(tmp_path: Path) -> None:
    """A token that only the configuration states is in AutoTokenizer's vocabulary, not in that of
    training."""
    file = write(tmp_path / "F")
    (tmp_path / "F" / "tokenizer_config.json").write_text('{"extra_special_tokens": ["<extra>"]}')
    assert "'a<extra> b <extra>' is [" in exported(file, "llama", tmp_path / "export")


@pytest.mark.slow
def test_no_class_keeps_the_ids_for_qwen2(tmp_path: Path) -> None:
    """Therefore exports name the one that keeps them for all others, and the warning is all that
    can be done."""
    file, export = write(tmp_path / "F"), tmp_path / "export"
    export.mkdir()
    names = set(
        filter(None, transformers.models.auto.tokenization_auto.TOKENIZER_MAPPING_NAMES.values())
    )
    expected = [JsonTokenizer(file, special_tokens=True).encode(text) for text in TEXTS]
    copy_tokenizer(file, export)
    (export / "config.json").write_text('{"model_type": "qwen2"}')
    content, kept = json.loads((export / "tokenizer_config.json").read_text()), []
    for name in {*names, *(f"{name}Fast" for name in names), *CLASSES}:
        (export / "tokenizer_config.json").write_text(
            json.dumps(content | {"tokenizer_class": name})
        )
        loaded = transformers.AutoTokenizer.from_pretrained(export, local_files_only=True)
        kept += [name] * ([loaded(text)["input_ids"] for text in TEXTS] == expected)
    assert len(names) > 50 and kept == []


def test_a_run_warns_once(tmp_path: Path) -> None:
    """Of two exports as qwen2; none as another architecture. Our own tools read the ids of training
    from both.

    They read the chat template of a file beside it, too.
    """
    file = write(tmp_path / "F")
    (tmp_path / "F" / "chat_template.jinja").write_text(PLAIN)
    for name, flags in (("qwen2", QWEN2.split()), ("llama", ["--export_model_type=gpt2"])):
        experiment = tmp_path / name
        words = [*FLAGS, f"--tokenizer_file={file}", f"--experiment_dir={experiment}", *flags]
        said = succeed(words).output
        assert (
            said.count("PreTrainedTokenizerFast")
            == said.count("AutoTokenizer")
            == (name == "qwen2")
        ), said
        read = str(experiment / "export" / "2" / "tokenizer.json")
        assert [JsonTokenizer(read, True, said=effective(read)).encode(text) for text in TEXTS] == [
            JsonTokenizer(file, True).encode(text) for text in TEXTS
        ]
        assert find_template(read).text == PLAIN


def hanging(folder: Path) -> dict[str, str]:
    """Return an environment with a transformers that says which process imports it, and never
    answers."""
    (folder / "transformers").mkdir()
    (folder / "transformers" / "__init__.py").write_text(
        f"import os, time\nopen({str(folder / 'importing')!r}, 'a').write(f'{{os.getpid()}} ')\ntime.sleep(1000)\n"
    )
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


@pytest.mark.parametrize(
    "end", ["stopped", *(pytest.param(end, marks=pytest.mark.slow) for end in ("done", "error"))]
)
def test_nothing_is_left_behind(tmp_path: Path, end: str) -> None:
    """However a run ends while the comparison takes for ever: it trains, exports, and says nothing
    about it."""
    variables, file = hanging(tmp_path), write(tmp_path / "F")
    experiment, importing = tmp_path / "run", tmp_path / "importing"
    flags = [
        *FLAGS,
        f"--tokenizer_file={file}",
        f"--experiment_dir={experiment}",
        "--export_model_type=gpt2",
    ]
    if end != "done":
        flags += ["--train_iters=1000000", "--export_interval=100000", "--checkpoint_interval=100"]
    with Start(flags, how="processes", variables=variables) as start:
        if end == "done":
            outcome = start.wait()
            assert (experiment / "export" / "2" / "config.json").exists()
        else:
            assert start.wait_until(
                lambda: trains(experiment) and importing.exists() and importing.read_text(),
                "training",
            )
            if end == "stopped":
                start.signal(signal.SIGTERM, workers=True)
            else:
                shutil.rmtree(experiment)
            outcome = start.wait()
            assert outcome.codes == [75 if end == "stopped" else 8]
        start.assert_nothing_left()
        [importer] = importing.read_text().split()
        assert int(importer) != start.processes[0].pid
        assert "AutoTokenizer" not in outcome.output
