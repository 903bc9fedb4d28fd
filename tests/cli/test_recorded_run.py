"""@RUN/config.json repeats a run: the same configuration, from the flags that nothing implies."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.config import Config, flatten
from megatron_lite.config.source import PRESETS
from megatron_lite.errors import UsageError
from megatron_lite.validation import resolve
from tests.support.launch import TINY, succeed

SHORT = ["--dataset_source=random", "--train_iters=10", "--sequence_length=64"]
SMALL = "--vocab_size=100 --hidden_size=64 --num_layers=2 --num_attention_heads=4".split()
CASES = [
    *([f"--model={name}"] for name in PRESETS),
    [*SMALL, "--batch_size=12", "--micro_batch_size=3", "--lr=0.00012345678901234567"],
    [*SMALL, "--sequential_micro_batches=3", "--lr_decay_style=cosine", "--lr_warmup=10%"],
    [*SMALL, "--rotary_embedding_scale=-8", "--use_rotary_embeddings=1", "--hybrid_norm=1"],
    [*SMALL, "--mup=1", "--mup_base_hidden_size=32", "--optimizer=muon", "--split=1,2,0"],
    [*SMALL, "--num_experts=4", "--freeze=blocks.0.*,*.mlp.*", "--load_parts=optimizer"],
]


def record(folder: Path, config: Config, **more: Any) -> str:
    """Write a configuration as a run does; return the word that inserts it."""
    path = folder / "config.json"
    path.write_text(json.dumps(flatten(config) | more))
    return f"@{path}"


@pytest.mark.parametrize("world_size", [1, 4])
def test_the_same_configuration(tmp_path: Path, world_size: int) -> None:
    """Of every preset, and of options that follow from each other."""
    for flags in CASES:
        config = resolve(parse([*SHORT, *flags]).config, world_size)
        again = parse([record(tmp_path, config)])
        assert resolve(again.config, world_size) == config, flags
        assert len(again.given) < 40, again.given


def test_later_flags_win(tmp_path: Path) -> None:
    """What follows from them is derived anew, and they are no mistake; another length replaces the
    run's."""
    word = record(tmp_path, resolve(parse([*SHORT, *SMALL, "--batch_size=8"]).config, 1))
    found = parse([word, "--hidden_size=128", "--batch_size=16", "--train_tokens=5000"])
    config = resolve(found.config, 2)
    assert (config.model.ffn_hidden_size, config.batch.micro_batch_size) == (512, 8)
    assert "train_iters" not in found.given and not found.warnings


def test_what_belongs_to_a_folder_or_a_machine_stays_there(tmp_path: Path) -> None:
    """It is named; the same run in another folder has the same numbers."""
    here = tmp_path / "here"
    succeed([*TINY, f"--experiment_dir={here}", "--lr=0.00123"])
    again = tmp_path / "again"
    said = succeed([f"@{here}/config.json", f"--experiment_dir={again}", "--device=cpu"]).output
    assert "without what belongs to its folder or machine: " in said
    assert "--experiment_dir" in said.partition("machine: ")[2].partition("\n")[0]
    lines = [
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (here, again)
    ]
    assert [line["loss"] for line in lines[0]] == [line["loss"] for line in lines[1]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1}', "not the config.json of a run"),
        ("{" * 100_000, "Expecting|recursion"),
        ('{"train_iters": 1, "train_iters": 2}', "a repeated name"),
        ('{"train_iters": "x"}', "config: train_iters: must be of type int"),
        ('{"train_iters": 1, "from_the_future": 2}', "no option from_the_future"),
        ('{"train_iters": 1, "lr": 1e999}', "lr"),
    ],
)
def test_other_objects_are_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        parse([f"@{path}"])
