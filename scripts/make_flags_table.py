"""Write docs/flags.md from the options in megatron_lite/config/ and the refusals in megatron_lite/refused.py.

python scripts/make_flags_table.py            writes the file
python scripts/make_flags_table.py --check    only compares it; exit code 1 if it is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # runs from a plain checkout

from megatron_lite.config import AREAS  # noqa: E402
from megatron_lite.usage import instead_table, option_table, refused_table  # noqa: E402

TARGET = REPOSITORY / "docs" / "flags.md"

# Defaults of the programs whose flag names are used here, where they differ.
ELSEWHERE = {
    "head_groups": "Fast-LLM: 1",
    "max_position_embeddings": "Fast-LLM: 2048",
    "batch_size": "Levanter: 512",
    "lr": "Levanter: 0.0006",
    "min_lr": "Levanter: 0.1 * lr",
    "lr_warmup_iters": "Levanter: 0.01 * train_iters",
    "lr_decay_style": "Levanter: cosine",
    "weight_decay": "Levanter: 0.1",
    "adam_beta2": "Levanter: 0.95",
    "seed": "Levanter: 0",
    "train_iters": "Levanter: 400000",
    "validation_iters": "Levanter: the whole validation set",
    "checkpoint_interval": "Levanter: every 15 minutes",
    "export_interval": "Levanter: 10000",
    "wandb_project_name": "Fast-LLM: fast_llm; Levanter: levanter",
}

INTRODUCTION = """\
# Flags

<!-- Written by scripts/make_flags_table.py from megatron_lite/config/ and megatron_lite/refused.py: do not edit. -->

`--a_b=v`, `--a_b v` and `--a-b=v` are the same flag; names are never abbreviated.

- A flag with values 0 and 1 also takes `true` and `false`; bare, it means 1.
- `none` stands for the default of every flag whose values say so. An empty value (`--wandb_entity_name=$UNSET`)
  means the same for texts and is an error for every other flag.
- Lists take commas, spaces, or the words that follow: `--split=969,30,1`, `--data_path 0.3 first 0.7 second`.
- Numbers are plain ASCII digits with an optional exponent where no integer is asked for; they must be finite.
- The last one of several equal flags counts, with a warning if their values differ.
- `@file` inserts the flags of a file: shell words, where quotes work and `#` begins a comment, but no variables.
  An `@file` in it is relative to its folder; every other path is relative to the current directory, as on the
  command line. `~` at the beginning of a path is the home directory.
"""

REFUSED = """\
## Flags of Fast-LLM that are not options here

Each is accepted with the values in the third column, because they describe what this program does in any case, and
refused with every other value. Nothing is accepted and ignored.
"""

INSTEAD = """\
## Flags of Megatron-LM and Levanter that are written differently here

Names that mean the same with the same values are in the column "also spelled" above. These are refused with a message:
"""


def flags_page() -> str:
    """The whole text of docs/flags.md."""
    parts = [INTRODUCTION]
    for area, owner in AREAS.items():
        parts += [f"## {owner.__doc__}\n", option_table(area, ELSEWHERE)]
    return "\n".join([*parts, REFUSED, refused_table(), INSTEAD, instead_table()])


def main(argv: Sequence[str]) -> int:
    """Write or compare docs/flags.md; returns the exit code."""
    if list(argv) not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    current = TARGET.read_text(encoding="utf-8") if TARGET.exists() else ""
    if argv:
        if current != flags_page():
            print(f"{TARGET} is out of date; run python scripts/make_flags_table.py", file=sys.stderr)
            return 1
        return 0
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(flags_page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
