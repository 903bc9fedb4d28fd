"""docs/tutorial.md: its commands run in order, as written, on fewer iterations of less text."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm_python

pytestmark = pytest.mark.guides
ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
ITERATIONS = 20


def test_the_commands_lead_to_a_model(tmp_path: Path) -> None:
    """Tokens, a plan, a run that stops and resumes, pictures, a sample, a loss, and a model for transformers."""
    for name in ("pretrain_gpt.py", "megatron_lite", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    blocks = re.findall(r"^```bash\n(.*?)\n```$", TUTORIAL, re.M | re.S)
    assert len(blocks) == 8
    script = "\n".join(["set -eu", *blocks])
    for written, shorter in (("ITERATIONS=600", f"ITERATIONS={ITERATIONS}"), ("--max_bytes 1e7", "--max_bytes 3e5")):
        assert script.count(written) == 1
        script = script.replace(written, shorter)
    environment = warm_python.environment()
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "tutorial" / "run"
    assert "stop_interval" in done.stdout
    assert "run this" in done.stdout and f"training complete: {ITERATIONS} iterations" in done.stdout
    assert (run / "report.html").exists() and (run / "loss.png").exists()
    assert "perplexity" in done.stdout
    (python,) = re.findall(r"^```python\n(.*?)\n```$", TUTORIAL, re.M | re.S)
    python = python.replace("export/600", f"export/{ITERATIONS}").replace("max_new_tokens=60", "max_new_tokens=5")
    pytest.importorskip("transformers")
    command = [sys.executable, "-W", "error::FutureWarning", "-c", python]
    loaded = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert loaded.returncode == 0 and loaded.stdout.startswith("def read(self"), loaded.stderr[-3000:]


def test_the_numbers_of_the_strings() -> None:
    """Parameters and tokens that the page names are those of its strings."""
    from megatron_lite.cli.parse import parse
    from megatron_lite.model.gpt import build_gpt, parameters_of
    from megatron_lite.validation import resolve

    strings = dict(re.findall(r'^export (\w+_ARGS)="((?:.|\n)*?)"$', TUTORIAL, re.M))
    words = " ".join(strings.values()).replace("\\\n", " ").replace("$ITERATIONS", "600").split()
    config = resolve(parse(words).config, 2)
    parameters = sum(parameter.spec.numel for parameter in parameters_of(build_gpt(config.model, 256)))
    assert f"{parameters / 1e6:.1f} million parameters" in TUTORIAL
    assert f"{600 * 8 * 256 / 1e6:.1f} million tokens" in TUTORIAL
