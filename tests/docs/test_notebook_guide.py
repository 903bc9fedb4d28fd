"""docs/notebook.md: its cells run in order, as written, on a small model and fewer iterations."""

import ast
import re
from pathlib import Path

import pytest

from megatron_lite.notebook.looking import Model
from megatron_lite.notebook.training import Result
from tests.support import documents

pytestmark = pytest.mark.guides
GUIDE = documents.read("notebook")
SIZES = (
    "--num_layers=2 --hidden_size=32 --num_attention_heads=2 --vocab_size=257 --sequence_length=64"
)
SMALLER = {
    "num_layers=4, hidden_size=128": "num_layers=2, hidden_size=32",
    "--train_iters=200": "--train_iters=20",
    "validation_interval=50": "validation_interval=10",
    "checkpoint_interval=50": "checkpoint_interval=10",
    "max_new_tokens=40": "max_new_tokens=4",
}


def test_the_cells_run(tmp_path: Path) -> None:
    """They print a row for each token but the first, five next tokens, a text, and two losses."""
    documents.make_checkout(tmp_path)
    (tmp_path / "docs").symlink_to(documents.ROOT / "docs")
    data = "--data_path='docs/*.md' --tokenizer_file=byte --batch_size=2 --train_iters=4"
    documents.run(
        f"python pretrain_gpt.py {SIZES} {data} --experiment_dir=experiments/mine", tmp_path
    )
    cells = documents.blocks(GUIDE, "python")
    assert len(cells) == 5
    program = documents.smaller("\nprint('-----')\n".join(cells), SMALLER)
    (tmp_path / "cells.py").write_text(program)
    losses, tokens, text, training, validations = documents.run(
        "python cells.py 2>errors.txt", tmp_path
    ).split("-----\n")
    assert len(losses.splitlines()) == len("The learning rate falls, and the loss follows.") - 1
    assert len(tokens.splitlines()) == 5 and all("%  '" in row for row in tokens.splitlines())
    assert text and "training complete: 20 iterations" in training
    found, loss = validations.splitlines()
    assert [number for number, _ in ast.literal_eval(found)] == [10, 20] and float(loss) > 0


def test_the_tables_name_what_there_is() -> None:
    """Every public attribute is a row."""
    for head, kind in (("of a `Model`", Model), ("of a `Result`", Result)):
        rows = {re.findall(r"`(\w+)", row[0])[0] for row in documents.table(GUIDE, head)}
        own = {*vars(kind), *kind.__dataclass_fields__}  # type: ignore[attr-defined]
        assert rows == {name for name in own if not name.startswith("_")}
