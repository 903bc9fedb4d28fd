"""docs/models.md: its tables match the program."""

from __future__ import annotations

import functools
import re

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.config.values import SPELLINGS
from megatron_lite.huggingface.architectures import ARCHITECTURES, check_exportable
from megatron_lite.huggingface.config_file import model_values
from megatron_lite.validation import resolve
from tests.support import documents
from tests.support.public_configs import PUBLIC, public_config

pytestmark = pytest.mark.guides

rows = functools.partial(documents.table, documents.read("models"))


def test_presets() -> None:
    """Names, sizes and architectures."""
    expected = [[f"`{name}`", f"{PUBLIC[name][1]:,}", public_config(name)["model_type"]] for name in PUBLIC]
    assert rows("`--model`") == expected


def test_flags_of_architectures() -> None:
    """A model with the flags of a row goes out as its architecture; with biases where they are said to be free."""
    table = rows("`model_type`")
    assert {row[0] for row in table} == set(ARCHITECTURES)
    command = ["--dataset_source=random", "--sequence_length=128", "--train_iters=1", "--batch_size=1"]
    biases = {
        "any": [["--add_linear_biases=1"], ["--add_mlp_biases=1"], ["--add_linear_biases=1", "--add_qkv_biases=0"]],
        "none": [],
        "query, key, value": [["--add_qkv_biases=1"]],
        "attention": [["--add_linear_biases=1", "--add_mlp_biases=0"], ["--add_qkv_biases=1"]],
    }
    for name, flags, biased, window in table:
        typed = flags.strip("`").split()
        windows = [[], ["--window_size=32"]] if window == "any" else [[]]
        for more in [[], *biases[biased]]:
            for windowed in windows:
                given = [flag for flag in typed if flag.split("=")[0] not in {word.split("=")[0] for word in more}]
                given = [flag for flag in given if not (windowed and flag.startswith("--window_size"))]
                model = resolve(parse([*command, *given, *more, *windowed]).config, world_size=1).model
                assert check_exportable(model) == name, (name, more, windowed)


def test_keys_of_config_json() -> None:
    """Every key is one that is read, and every flag one that there is."""
    read = {key for architecture in ARCHITECTURES.values() for key in (*architecture.keys, *architecture.defaults)}
    read |= {"rope_theta", "rope_scaling", "rope_parameters", "layer_types"}
    for keys, flags in rows("of config.json"):
        assert set(re.findall(r"`(\w+)`", keys)) <= read
        assert set(re.findall(r"`--(\w+)`", flags)) <= set(SPELLINGS)
    assert model_values({"model_type": "mistral"})["window_size"] == 4096
    tied = [name for name in ARCHITECTURES if model_values({"model_type": name})["tie_word_embeddings"]]
    assert tied == ["gpt2", "gpt_bigcode", "starcoder2"]
