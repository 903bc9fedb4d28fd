"""What a run trains on by default: the mask and the tokenizer that a summary names, shares, and no
run by mistake."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from megatron_lite.checkpoint import manifest
from megatron_lite.cli import prepare_data
from megatron_lite.commands import generate
from tests.checkpoint.test_damage import seal
from tests.support.launch import TINY, run, succeed
from tests.support.metrics import read_metrics
from tests.support.token_files import write_counting

FLAGS = [
    *TINY,
    "--dataset_source=list",
    "--split=1,0,0",
    "--num_workers=0",
    "--vocab_size=257",
    "--log_interval=1",
]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the prefix of conversations with their mask and the byte tokenizer."""
    folder = tmp_path_factory.mktemp("chats")
    turns = [
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": "an answer"},
    ]
    (folder / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 20)
    words = [
        str(folder / "chats.jsonl"),
        "--chat_template=chatml",
        f"--output_prefix={folder / 'chats'}",
    ]
    assert prepare_data.main(words, "prepare_data") == 0
    return str(folder / "chats")


def losses(experiment: Path) -> list[float]:
    return [
        line["loss"]
        for line in read_metrics(experiment / "metrics.jsonl")
        if line["phase"] == "training"
    ]


def test_the_mask_and_the_tokenizer_of_the_summary(
    chats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are the defaults, and said; none leaves both out; exports, samples and generate have the
    tokenizer."""
    (tmp_path / "prompts.txt").write_text("hello\n")
    default, typed, none = (tmp_path / name for name in ("default", "typed", "none"))
    flags = [*FLAGS, f"--data_path={chats}", "--train_iters=2"]
    sampled = [
        "--sample_interval=2",
        f"--sample_prompts={tmp_path / 'prompts.txt'}",
        "--sample_tokens=2",
    ]
    said = succeed([*flags, f"--experiment_dir={default}", "--export_interval=2", *sampled]).output
    assert (
        f"--loss_mask={chats}_mask: a summary of the data names it; --loss_mask=none leaves it out"
        in said
    )
    assert f"--tokenizer_file={chats}.tokenizer.json: a summary of the data names it" in said
    succeed([*flags, f"--experiment_dir={typed}", f"--loss_mask={chats}_mask"])
    left_out = ["--loss_mask=none", "--tokenizer_file=none"]
    said = succeed([*flags, f"--experiment_dir={none}", *left_out, "--export_interval=2"]).output
    assert (
        "a summary of the data" not in said
        and not (none / "export" / "2" / "tokenizer.json").exists()
    )
    assert losses(default) == losses(typed) != losses(none)
    assert (default / "export" / "2" / "tokenizer.json").exists() and (
        default / "samples.jsonl"
    ).exists()
    assert generate.main([f"--model={default}", "--prompt=hello", "--max_new_tokens=2"]) == 0
    capsys.readouterr()
    # A run that began without goes on without.
    goes_on = succeed([*flags, f"--experiment_dir={none}", "--train_iters=4"]).output
    assert (
        f"--loss_mask={chats}_mask: a summary of the data names it; this run began without it and continues so"
        in goes_on
    )
    succeed([*flags, f"--experiment_dir={tmp_path / 'whole'}", *left_out, "--train_iters=4"])
    assert losses(none) == losses(tmp_path / "whole")


def test_a_pair_of_another_name_keeps_its_mask(chats: str, tmp_path: Path) -> None:
    """The summary lists the names at preparation; a pair that was renamed without its mask is
    refused."""
    for file in Path(chats).parent.glob("chats[._]*"):
        (tmp_path / file.name.replace("chats", "other")).write_bytes(file.read_bytes())
    flags = [*FLAGS, f"--data_path={tmp_path / 'other'}", "--train_iters=1"]
    assert (
        f"--loss_mask={tmp_path / 'other'}_mask: a summary of the data names it"
        in succeed(flags).output
    )
    (tmp_path / "other_mask.idx").unlink()
    for mask in ([], ["--loss_mask=no/mask"]):
        outcome = run([*flags, *mask])
        assert (
            outcome.codes == [3]
            and "this loss mask is missing: prepare_data --chat_template" in outcome.output
        )
        assert (
            "hf://" not in outcome.output and "no such file, folder or pair" not in outcome.output
        )


def test_masks_do_not_fit_rearranged_documents(chats: str, tmp_path: Path) -> None:
    """Refused with the remedy, which works as far as the tokenizer goes."""
    flags = [*FLAGS, f"--data_path={chats}", "--train_iters=1", "--fim_rate=0.5"]
    for more, code, said in (
        ([], 2, "--loss_mask=none"),
        (["--loss_mask=none"], 3, "which --fim_rate needs"),
        (
            ["--loss_mask=none", "--tokenizer_file=none"],
            2,
            "need a tokenizer; write --tokenizer_file",
        ),
    ):
        outcome = run([*flags, *more])
        assert outcome.codes == [code] and said in outcome.output, outcome.output


def test_a_run_needs_a_length(tmp_path: Path) -> None:
    """Without --train_iters nothing is made; 0 is a length."""
    flags = [flag for flag in TINY if not flag.startswith("--train_iters")]
    outcome = run([*flags, f"--experiment_dir={tmp_path / 'run'}"])
    assert outcome.codes == [2] and "--train_iters is missing" in outcome.output
    assert not (tmp_path / "run" / "runs").exists()
    assert "nothing to train: --train_iters=0" in succeed([*flags, "--train_iters=0"]).output


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("nosuch/dir", "write hf://datasets/nosuch/dir"),
        ("x.parquet", "(scripts/prepare_data.py writes"),
    ],
)
def test_a_path_that_is_not_there(path: str, hint: str) -> None:
    """Text and pairs alike; a name like a hub's gets its command."""
    outcome = run([*FLAGS, f"--data_path={path}", "--train_iters=1"])
    assert outcome.codes == [3] and f"{path}: no such file, folder or pair" in outcome.output
    assert hint in outcome.output


def test_shares(tmp_path: Path) -> None:
    """Tokens are the weights of a new run; one that an earlier version began keeps equal shares,
    and says so once."""
    sets = [
        write_counting(tmp_path / name, [size], "<u2", 0) for name, size in (("a", 60), ("b", 190))
    ]
    plain, old, typed = (tmp_path / name for name in ("plain", "old", "typed"))
    flags = [*FLAGS, "--train_iters=2"]
    succeed([*flags, "--data_path", *sets, f"--experiment_dir={plain}"])
    words = ["--data_path", "60", sets[0], "190", sets[1]]
    succeed([*flags, *words, f"--experiment_dir={typed}"])
    assert losses(plain) == losses(typed)
    equal = ["--data_path", "1", sets[0], "1", sets[1]]
    succeed([*flags, *equal, f"--experiment_dir={old}", "--stop_interval=1"])
    folder = old / "checkpoints" / "1"
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
    content["config"]["data_path"] = sets
    (folder / "manifest.json").write_bytes(seal(content))
    said = (
        "--data_path: this run keeps the equal shares that the earlier version which began it used"
    )
    assert said in succeed([*flags, "--data_path", *sets, f"--experiment_dir={old}"]).output
    more = succeed(
        [*flags, "--data_path", *sets, f"--experiment_dir={old}", "--train_iters=3"]
    ).output
    assert said not in more and manifest.read(old / "checkpoints" / "3").iteration == 3
    succeed([*flags, *equal, f"--experiment_dir={tmp_path / 'whole'}", "--train_iters=3"])
    assert losses(old) == losses(tmp_path / "whole")


def test_exports_end_as_the_documents_of_the_data(tmp_path: Path) -> None:
    """Whatever chose the end: a flag of prepare_data, or a tokenizer.json without the folder that
    is named now."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    for folder in ("plain", "other"):
        (tmp_path / folder).mkdir()
        library.save(str(tmp_path / folder / "tokenizer.json"))
    (tmp_path / "other" / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (tmp_path / "texts.jsonl").write_text((json.dumps({"text": "some words " * 9}) + "\n") * 9)
    words = [
        str(tmp_path / "texts.jsonl"),
        "--tokenizer",
        str(tmp_path / "plain" / "tokenizer.json"),
    ]
    chosen, default = str(tmp_path / "chosen"), str(tmp_path / "default")
    assert (
        prepare_data.main([*words, f"--output_prefix={chosen}", "--end_of_document=<|im_end|>"])
        == 0
    )
    assert prepare_data.main([*words, f"--output_prefix={default}"]) == 0
    typed = f"--tokenizer_file={tmp_path / 'other' / 'tokenizer.json'}"
    for name, prefix, more, end in (
        ("a", chosen, [], 257),
        ("b", default, [typed], 256),
        ("c", chosen, [typed], 257),
    ):
        flags = [
            *FLAGS,
            f"--experiment_dir={tmp_path / name}",
            f"--data_path={prefix}",
            "--vocab_size=258",
            *more,
        ]
        assert (
            "ends documents"
            not in succeed([*flags, "--train_iters=1", "--export_interval=1"]).output
        )
        export = tmp_path / name / "export" / "1"
        assert json.loads((export / "config.json").read_text())["eos_token_id"] == end
        assert AutoTokenizer.from_pretrained(export).eos_token_id == end
    for file in tmp_path.glob("default.tokenizer*.json"):  # as of a pair whose folder was lost
        file.unlink()
    said = succeed(
        [*FLAGS, f"--data_path={default}", "--vocab_size=258", typed, "--train_iters=1"]
    ).output
    assert "ends documents with token 257, the data with 256" in said
