"""What guides on models, schedules and parallelism list, and flags of commands that no test runs,
are the program's."""

import functools
import re
import shlex
from typing import Any, cast

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.config import DistributedConfig
from megatron_lite.config.optimizer import DECAY_STYLES
from megatron_lite.config.values import SPELLINGS
from megatron_lite.errors import UsageError
from megatron_lite.huggingface.architectures import ARCHITECTURES, check_exportable
from megatron_lite.huggingface.config_file import model_values
from megatron_lite.monitor.banner import describe_ranks
from megatron_lite.planner.plan import SimulatedGroup
from megatron_lite.schedules.cycles import boundaries
from megatron_lite.validation import resolve
from scripts.docs import architectures
from tests.support import documents
from tests.support.documents import ROOT
from tests.support.harness import tiny_config
from tests.support.public_configs import PUBLIC, public_config

pytestmark = pytest.mark.guides

rows = functools.partial(documents.table, documents.read("models"))


def test_presets() -> None:
    """Names, sizes and architectures."""
    expected = [
        [f"`{name}`", f"{PUBLIC[name][1]:,}", public_config(name)["model_type"]] for name in PUBLIC
    ]
    assert sorted(rows("`--model`")) == sorted(expected)


def test_flags_of_architectures() -> None:
    """A model with the flags of a row can go out as its architecture; with biases and windows where
    they are said to be free."""
    table = rows("`model_type`")
    assert {row[0] for row in table} == set(ARCHITECTURES)
    command = [
        "--dataset_source=random",
        "--sequence_length=128",
        "--train_iters=1",
        "--batch_size=1",
    ]
    biases = {
        "any": [
            ["--add_linear_biases=1"],
            ["--add_mlp_biases=1"],
            ["--add_linear_biases=1", "--add_qkv_biases=0"],
        ],
        "none": [],
        "query, key, value": [["--add_qkv_biases=1"]],
        "attention": [["--add_linear_biases=1", "--add_mlp_biases=0"], ["--add_qkv_biases=1"]],
    }
    for name, flags, biased, window in table:
        typed = flags.strip("`").split()
        alone = ["--rotary_pattern=nope"] if ARCHITECTURES[name].never_rotates_others else []
        windows = [alone] if window == "none" else [alone, ["--window_size=32"]]
        if window == "any blocks":
            windows.append(["--window_size=32", "--attention_pattern=window,full"])
            if ARCHITECTURES[name].rotates_windows:
                windows[-1].append("--rotary_pattern=rotary,nope")
        for more in [[], *biases[biased]]:
            for windowed in windows:
                given = [
                    flag
                    for flag in typed
                    if flag.split("=")[0] not in {word.split("=")[0] for word in more}
                ]
                flags = [*command, *given, *more, *windowed]
                model = resolve(parse(flags).config, world_size=1).model
                assert check_exportable(model, name) == name, (name, more, windowed)
    assert architectures.main(["--check"]) == 0


def test_keys_of_config_json() -> None:
    """Every key is one that is read, and every flag one that there is."""
    read = {
        key
        for architecture in ARCHITECTURES.values()
        for key in (*architecture.keys, *architecture.defaults)
    }
    read |= {"rope_theta", "rope_scaling", "rope_parameters", "layer_types"}
    for keys, flags in rows("of config.json"):
        assert set(re.findall(r"`(\w+)`", keys)) <= read
        assert set(re.findall(r"`--(\w+)`", flags)) <= set(SPELLINGS)
    assert model_values({"model_type": "mistral"})["window_size"] == 4096
    tied = [
        name for name in ARCHITECTURES if model_values({"model_type": name})["tie_word_embeddings"]
    ]
    gemmas = [name for name in ARCHITECTURES if name.startswith("gemma")]
    assert set(tied) == {"gpt2", "gpt_bigcode", "starcoder2", "smollm3", "cohere2", *gemmas}


SCHEDULES = documents.read("schedules")


def test_every_style_has_its_formula() -> None:
    """Each choice of --lr_decay_style has a row in the table of decays."""
    for style in DECAY_STYLES:
        assert re.search(rf"^\| [^|]*`{style}`[^|]*\| [^|]+ \|", SCHEDULES, re.M), style


CYCLES = {
    "--lr_num_cycles=3": [333, 666, 1000],
    "--lr_cycle=300": [300, 600, 1000],
    "--lr_cycle=0.3": [300, 600, 1000],
    "--lr_cycle_lengths 300 200": [300, 500, 1000],
    "--lr_cycle_minima 300 500": [300, 500, 1000],
}


def test_ends_of_cycles() -> None:
    """The table of cycles, with T = 1000."""
    for words, ends in CYCLES.items():
        assert f"`{words}`" in SCHEDULES
        config = resolve(
            parse(["--dataset_source=random", "--train_iters=1000", *words.split()]).config, 1
        )
        count, boundary = boundaries(config.learning_rate)
        assert [boundary(index) for index in range(count + 1)] == [0, *ends], words


PARALLELISM = documents.read("parallelism")


def test_ranks_are_numbered_so() -> None:
    """The three rows of the page, by the groups of each rank."""
    lines = re.findall(r"^\| (?:ranks|---|data-p|tensor-p).*$", PARALLELISM, re.M)[:4]
    header, _, of_data, of_tensor = (line.strip("| ").split(" | ") for line in lines)
    options = DistributedConfig(tensor_parallel=2)
    groups = [SimulatedGroup(int(rank), 8, "cpu", options=options) for rank in header[1:]]
    assert [str(group.data.rank) for group in groups] == of_data[1:]
    assert [str(group.tensor.rank) for group in groups] == of_tensor[1:]
    assert f"`ranks: {describe_ranks(cast(Any, groups[0]))}`" in PARALLELISM


def test_what_must_divide() -> None:
    """What the page says is refused at 4 ranks."""
    sizes: list[dict[str, Any]] = [
        dict(num_attention_heads=6, hidden_size=36),
        dict(ffn_hidden_size=130),
        dict(num_attention_heads=12, hidden_size=36, head_groups=3),
        dict(sequence_length=18, sequence_tensor_parallel=True),
    ]
    for options in sizes:
        with pytest.raises(UsageError, match="tensor_parallel"):
            tiny_config(4, tensor_parallel=4, **options)


def test_a_vocabulary_of_any_size_and_shared_heads_are_taken() -> None:
    """The other rows: padding in memory, and heads that several ranks have."""
    tiny_config(4, tensor_parallel=4, vocab_size=61, num_attention_heads=8, head_groups=2)


# run, or resolved, elsewhere
UNKNOWN = ("$", "<", "...", "@", "--world_size", "pretrained", "--dry_run", "--load_")


def commands() -> list[tuple[str, str]]:
    """Document and command, for each command that says everything itself."""
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for block in documents.blocks(path.read_text("utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                if "pretrain_gpt.py --" in line and not any(word in line for word in UNKNOWN):
                    found.append((path.name, " ".join(line.split())))
    return found


def test_flags_are_legal() -> None:
    assert len(commands()) >= 10
    for document, command in commands():
        launcher, _, flags = command.partition("pretrain_gpt.py ")
        ranks = re.search(r"--nproc-per-node=(\d+)", launcher)
        config = parse(shlex.split(flags, comments=True)).config
        assert resolve(config, int(ranks[1]) if ranks else 1), document
