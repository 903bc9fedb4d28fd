"""The commands that pip installs beside training: `megatron_lite <verb>`, one module a verb.
Importing it is quick."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from megatron_lite import __version__
from megatron_lite.config.values import shown, similar
from megatron_lite.errors import EXIT_DONE, SCRIPTS, UsageError
from megatron_lite.run.exit_status import name_missing_package, print_failure, print_page
from megatron_lite.run.host import prepare_libraries
from megatron_lite.run.launcher_watch import LauncherWatch

# Verb -> its module, which has `main(words, program)`.
VERBS: Mapping[str, str] = MappingProxyType(
    {"pretrain_gpt": "pretrain_gpt"}
    | {
        verb: f"megatron_lite.{'cli' if verb == 'prepare_data' else 'commands'}.{verb}"
        for verb in SCRIPTS
    }
)


def start(verb: str, words: Sequence[str], program: str | None = None) -> int:
    """Run a verb other than pretrain_gpt; return the exit code. program: as a user types it
    (default: the script)."""
    LauncherWatch()  # before anything that takes time
    prepare_libraries()  # before torch is imported
    try:
        return int(importlib.import_module(VERBS[verb]).main(words, program))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def command() -> int:
    """Run the verb that the command line begins with; return the exit code."""
    sys.excepthook = name_missing_package
    verb = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if verb in ("-h", "--help", "--version"):
        print_page(f"megatron_lite {__version__}" if verb == "--version" else _help())
        return EXIT_DONE
    name = verb.replace("-", "_")
    if name not in VERBS:
        near = similar(name, VERBS, 3, 0.6)
        advice = (
            f"did you mean {' or '.join(near)}?" if near else f"the commands are {', '.join(VERBS)}"
        )
        return print_failure(UsageError(f"unknown command {shown(verb)}; {advice}"))
    if name == "pretrain_gpt":
        del sys.argv[1]
        return int(importlib.import_module(name).command())
    return start(name, sys.argv[2:], f"megatron_lite {name}")


def _help() -> str:
    """Return the list of verbs, each with the first words of its module, which is read but not
    imported."""
    rows = [
        "usage: megatron_lite <command> [flags]; megatron_lite <command> --help explains one",
        "",
    ]
    for verb, module in VERBS.items():
        found = importlib.util.find_spec(module)
        source = Path(found.origin).read_text("utf-8") if found and found.origin else ""
        paragraph, _, _ = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")
        summary = " ".join(paragraph.split()).partition(":")[0]
        rows.append(f"  {verb:20}{summary.removesuffix('.')}")
    return "\n".join(rows)
