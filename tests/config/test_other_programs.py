"""The table of other programs' flags and values: how its lines are read, and what is refused in it."""

from __future__ import annotations

import re

import pytest

from megatron_lite.config.other_programs import Row, read_table

TABLE = """\
# A comment.
[texts]
run: --experiment_dir=<folder>

[some program]
save out_dir -> {run} | checkpoints go
    to <folder>/checkpoints
max_steps -> --train_iters
warmup:steps | a remark = with -> signs | in it
dtype = float32 float | always
flash = 1 (switch) | {run}
[values]
device=tpu device=gpu:<number> | no {value}
"""


def test_every_kind_of_row() -> None:
    table = read_table(TABLE)
    assert table.programs["some program"] == (
        Row(("save", "out_dir"), "--experiment_dir=<folder>", "checkpoints go to <folder>/checkpoints"),
        Row(("max_steps",), "--train_iters"),
        Row(("warmup:steps",), remark="a remark = with -> signs | in it"),
        Row(("dtype",), remark="always", only=("float32", "float")),
        Row(("flash",), remark="--experiment_dir=<folder>", only=("1",), switch=True),
    )
    assert dict(table.values) == {"device=tpu": "no tpu", "device=gpu:<number>": "no gpu:<number>"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("save", "write <names> -> <flags>"),
        ("dtype = float32", "write <names> -> <flags>"),
        ("save -> {nothing}", "[texts] has no nothing"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(line: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(line)}: ") as caught:
        read_table(f"{TABLE}[other]\n{line}\n")
    assert said in str(caught.value)
    with pytest.raises(ValueError, match="^save -> --lr: write .program. above it"):
        read_table("save -> --lr\n")
