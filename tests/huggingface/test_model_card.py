"""The model card of an export: what it says, what it never says, and that the hub's own parser reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.config import Config
from megatron_lite.huggingface.model_card import TrainingSummary, model_card
from megatron_lite.validation import resolve
from tests.support.launch import TINY, run


def config(*flags: str) -> Config:
    """Return a resolved configuration."""
    return resolve(parse([*TINY, *flags]).config, 1)


def test_what_a_card_says() -> None:
    """Model, data with shares, tokens, losses, options; the license is left open where nobody can overlook it."""
    blend = "--data_path 0.25 /secret/place/books 0.75 /secret/place/web"
    options = config("--lr=0.02", "--dataset_source=list", *blend.split(), "--experiment_dir=/home/somebody/run")
    card = model_card(options, "gpt2", 1_234_567, TrainingSummary(4, {"validation loss": 2.5}))
    assert "# A gpt2 model with 1.23M parameters" in card and "| parameters | 1,234,567 |" in card
    assert "`books` (25.0%), `web` (75.0%)" in card and "| iterations | 4 of 6 |" in card
    assert "| tokens | 256 |" in card and "2.5000 nats per token (perplexity 12.18)" in card
    assert "--lr=0.02" in card and "--zero_stage" not in card
    assert "license: other\nlicense_name: choose-a-license" in card and "License: not chosen yet" in card
    assert "/secret" not in card and "somebody" not in card


def test_names_of_data_sets_stay_text() -> None:
    """Markdown and HTML in a file name end up as question marks."""
    options = config("--dataset_source=list", "--data_path=/d/---`|<script>")
    card = model_card(options, "gpt2", 10, TrainingSummary(1, {}))
    assert "`---???script?`" in card and "<script" not in card


def test_weights_of_unknown_origin() -> None:
    """A converted folder has a card of its model alone."""
    card = model_card(config(), "llama", 10**9, None)
    assert "## Model" in card and "## Training" not in card and "1B parameters" in card


def test_the_hubs_parser_reads_the_card_of_a_run(tmp_path: Path) -> None:
    """A run's export has a card with its losses; huggingface_hub finds the metadata."""
    hub = pytest.importorskip("huggingface_hub")
    flags = ["--export_interval=3", "--validation_iters=1", "--validation_interval=3", "--export_model_type=gpt2"]
    outcome = run([*TINY, "--device=cpu", *flags, f"--experiment_dir={tmp_path}"])
    assert outcome.codes == [0], outcome.output
    path = tmp_path / "export" / "3" / "README.md"
    data = hub.ModelCard.load(path, ignore_metadata_errors=False).data
    assert (data.license, data.license_name, data.library_name) == ("other", "choose-a-license", "transformers")
    text = path.read_text("utf-8")
    assert "| iterations | 3 of 6 |" in text and "| validation loss |" in text and str(tmp_path) not in text
    assert "random tokens, a test" in text
