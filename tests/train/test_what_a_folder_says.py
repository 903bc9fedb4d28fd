"""What a model folder says goes through a run, an export and a conversion: ends of a text,
settings, licence."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.cli.prepare_data import main as prepare_data
from megatron_lite.commands import convert_checkpoint, generate
from tests.corpus.test_tokenizer_folders import SPLIT, TEXTS, bytes_and_pairs, tokens_of
from tests.support.families import load_model, make_model
from tests.support.launch import succeed

transformers = pytest.importorskip("transformers")

FAMILIES = [
    "llama",
    "mistral, window",
    "gpt2",
    "gpt_bigcode, multi-query",
    "starcoder2, window",
    "qwen2, yarn",
    "qwen3",
]
PROMPTS = ("Hello  world, 123", "größer", "x")
NEW = 12
CARD = "---\nlicense: apache-2.0\nbase_model:\n- some/model\ntags: [x]\n---\n# Some model\nlicense: not this\n"


def texts(folder: Path) -> list[list[int]]:
    """What transformers generates greedily, up to its own end."""
    model, tokenizer = load_model(folder), transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        whole = model.generate(
            **inputs, max_new_tokens=NEW, do_sample=False, repetition_penalty=1.0
        )
        found.append(whole[0, inputs["input_ids"].shape[1] :].tolist())
    return found


def ours(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[list[int]]:
    words = [f"--prompt={prompt}" for prompt in PROMPTS]
    options = ["--temperature=0", f"--max_new_tokens={NEW}", "--json_lines", "--sequence_length=40"]
    assert generate.main(["--model", str(folder), *words, *options]) == 0
    return [json.loads(line)["tokens"] for line in capsys.readouterr().out.splitlines()]


def write_folder(folder: Path, family: str) -> list[int]:
    """A model whose greedy texts end at different tokens of a list; return the list."""
    tokenizer = bytes_and_pairs(transformers.models.qwen2.tokenization_qwen2.PRETOKENIZE_REGEX)
    make_model(family, vocab_size=266, bos_token_id=264, eos_token_id=None).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    (folder / "tokenizer.model").write_bytes(b"\x00model")
    (folder / "README.md").write_text(CARD)
    ends = sorted({265, *(text[3 * number + 2] for number, text in enumerate(texts(folder)))})
    settings = {"bos_token_id": 264, "eos_token_id": ends, "pad_token_id": 263}
    content = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(content))
    settings |= {
        "do_sample": True,
        "temperature": 0.6,
        "repetition_penalty": 1.05,
        "transformers_version": "5.0",
    }
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return ends


def kept(folder: Path) -> list[Any]:
    content = json.loads((folder / "config.json").read_text())
    ids = [content[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")]
    card = (folder / "README.md").read_text().split("---\n")[1]
    has_license = (
        "license: apache-2.0\nbase_model:\n- some/model\n" in card
        and "choose-a-license" not in card
    )
    settings = json.loads((folder / "generation_config.json").read_text())
    return [ids, settings, has_license, (folder / "tokenizer.model").read_bytes()]


@pytest.mark.parametrize(
    "family",
    [name if name == "llama" else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def test_a_run_that_learns_nothing_changes_nothing(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same texts with the same ends from the folder, the export and the export of a resumed run
    without the folder, by transformers and by ours; the conversion to a checkpoint and back says
    the same."""
    folder = tmp_path / "model"
    ends = write_folder(folder, family)
    expected = texts(folder)
    assert len(ends) > 2 and min(map(len, expected)) < NEW, "ends that no text meets prove nothing"
    (tmp_path / "a.txt").write_text("Hello world 123 " * 99)
    prefix = tmp_path / "data" / "a"
    assert (
        prepare_data(
            [str(tmp_path / "a.txt"), f"--output_prefix={prefix}", f"--tokenizer={folder}"]
        )
        == 0
    )
    flags = [
        f"--data_path={prefix}",
        "--lr=0",
        "--export_interval=1",
        f"--experiment_dir={tmp_path / 'run'}",
    ]
    flags += [
        "--sequence_length=16",
        "--batch_size=1",
        "--device=cpu",
        "--training_dtype=fp32",
        "--split=1,0,0",
    ]
    flags += [f"--tokenizer_file={folder / 'tokenizer.json'}"]
    succeed([*flags, "--train_iters=1", f"--pretrained_checkpoint_path={folder}"])
    shutil.copytree(folder, tmp_path / "there")
    (folder / "generation_config.json").unlink()
    (folder / "README.md").unlink()
    succeed([*flags, "--train_iters=2", f"--pretrained_checkpoint_path={folder}"])
    for words in (("there", "checkpoint", "distributed"), ("checkpoint", "back", "huggingface")):
        source, target, kind = words
        assert convert_checkpoint.main([f"--from={tmp_path / source}", f"--to={tmp_path / target}",
                                        f"--format={kind}"]) == 0  # fmt: skip
    capsys.readouterr()
    said = kept(tmp_path / "there")
    stops = [[t for t in text if t not in ends] for text in expected]
    for export in (
        tmp_path / "run" / "export" / "1",
        tmp_path / "run" / "export" / "2",
        tmp_path / "back",
    ):
        assert kept(export) == said
        assert texts(export) == expected
        assert ours(export, capsys) == stops
    assert ours(tmp_path / "there", capsys) == stops


@pytest.mark.parametrize("old", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_export_gives_the_ids_of_its_data(old: bool, tmp_path: Path) -> None:
    """With a class that splits text anew: those of transformers, or, of a pair prepared by the file
    alone as earlier versions did, those of the file. Samples are written by the same tokenizer."""
    folder = tmp_path / "T"
    folder.mkdir()
    bytes_and_pairs(SPLIT).save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(said | ({"bos_token": None} if old else {}))
    )
    shutil.copy(folder / "tokenizer.json", tmp_path / "alone.json")
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 9)
    )
    (tmp_path / "prompts.txt").write_text("12345 don't\n")
    given = tmp_path / "alone.json" if old else folder
    prefix = tmp_path / "data" / "a"
    assert (
        prepare_data(
            [str(tmp_path / "a.jsonl"), f"--output_prefix={prefix}", f"--tokenizer={given}"]
        )
        == 0
    )
    flags = [
        f"--data_path={prefix}",
        "--export_interval=1",
        f"--experiment_dir={tmp_path / 'run'}",
        "--batch_size=1",
    ]
    flags += [
        "--num_layers=1",
        "--hidden_size=16",
        "--num_attention_heads=2",
        "--vocab_size=267",
        "--device=cpu",
    ]
    flags += [
        "--sequence_length=32",
        "--train_iters=1",
        "--split=1,0,0",
        "--export_model_type=gpt2",
    ]
    flags += [
        "--sample_interval=1",
        f"--sample_prompts={tmp_path / 'prompts.txt'}",
        "--sample_tokens=2",
    ]
    succeed([*flags, f"--tokenizer_file={folder / 'tokenizer.json'}"])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "export" / "1")
    plain = [
        theirs(text, split_special_tokens=True, add_special_tokens=False)["input_ids"]
        for text in TEXTS
    ]
    assert [ids[:-1] for ids in tokens_of(prefix)[:3]] == plain
    whole = transformers.AutoTokenizer.from_pretrained(folder)
    assert (whole(TEXTS[2])["input_ids"] == theirs(TEXTS[2])["input_ids"]) != old
