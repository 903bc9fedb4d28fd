"""docs/tutorial.md: its commands run in order, as written, on fewer iterations of less text."""

import re
from pathlib import Path

import pytest

from tests.support import documents

pytestmark = pytest.mark.guides
TUTORIAL = documents.read("tutorial")
ITERATIONS = 4
SMALLER = {
    "ITERATIONS=600": f"ITERATIONS={ITERATIONS}",
    "--max_bytes 1e7": "--max_bytes 2e5",
    "--num_layers=4": "--num_layers=2",
    "--sequence_length=256": "--sequence_length=128",
    "--hidden_size=128": "--hidden_size=64",
    "--ffn_hidden_size=384": "--ffn_hidden_size=64",
}


def test_the_commands_lead_to_a_model(tmp_path: Path) -> None:
    """Tokens, a plan, a run that stops and resumes, pictures, a sample, a loss, and a model for
    transformers."""
    documents.make_checkout(tmp_path)
    blocks = documents.blocks(TUTORIAL)
    assert len(blocks) == 8
    script = "\n".join(["set -eu", *blocks])
    assert all(script.count(written) == 1 for written in SMALLER)
    printed = documents.run(documents.smaller(script, SMALLER), tmp_path)
    run = tmp_path / "tutorial" / "run"
    assert "stop_interval" in printed
    assert "run this" in printed and f"training complete: {ITERATIONS} iterations" in printed
    assert (run / "report.html").exists() and (run / "loss.png").exists()
    assert "perplexity" in printed
    (python,) = documents.blocks(TUTORIAL, "python")
    python = python.replace("export/600", f"export/{ITERATIONS}").replace(
        "max_new_tokens=60", "max_new_tokens=5"
    )
    pytest.importorskip("transformers")
    (tmp_path / "read.py").write_text(
        f"import warnings\nwarnings.simplefilter('error', FutureWarning)\n{python}"
    )
    assert documents.run("python read.py 2>errors.txt", tmp_path).startswith("def read(self")


def test_the_numbers_of_the_strings() -> None:
    """Parameters and tokens that the page names are those of its strings."""
    from megatron_lite.cli.parse import parse
    from megatron_lite.model.gpt import build_gpt, parameters_of
    from megatron_lite.validation import resolve

    strings = dict(re.findall(r'^export (\w+_ARGS)="((?:.|\n)*?)"$', TUTORIAL, re.M))
    words = " ".join(strings.values()).replace("\\\n", " ").replace("$ITERATIONS", "600").split()
    config = resolve(parse(words).config, 2)
    parameters = sum(
        parameter.spec.numel for parameter in parameters_of(build_gpt(config.model, 256))
    )
    assert f"{parameters / 1e6:.1f} million parameters" in TUTORIAL
    assert f"{600 * 8 * 256 / 1e6:.1f} million tokens" in TUTORIAL
