"""Mutation testing of the hot path: `python -m tests.support.mutants --count=50 --seed=1` (some
hours on two cores).

Each mutant is a copy of the checkout with one mistake drawn at random: a sign, a factor, a missing
wait, a rank or size of a group, an off-by-one. `scripts/prove_layouts.py` tries to catch it within
a minute; then the default tests do, those of the mutant's own room first. Prints a line for each
mutant: where it is, and what catches it.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.step_files import PACKAGE, step_calls

ROOT = PACKAGE.parent
# Beside what one plain rank runs.
MORE = (
    *("zero/replicas.py", "zero/layout.py", "zero/schedule.py", "distributed/cpu_collectives.py"),
    *(
        "optimizer/rules/muon.py",
        "optimizer/rules/momentum.py",
        "optimizer/averaging.py",
        "optimizer/loss_scale.py",
    ),
)
OPERATORS = {ast.Add: ("sign", "+", "-"), ast.Sub: ("sign", "-", "+")}
OPERATORS |= {
    ast.Mult: ("factor", "*", "/"),
    ast.Div: ("factor", "/", "*"),
    ast.FloorDiv: ("factor", "//", "*"),
}
COMPARISONS = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
GROUPS = {"rank": "0", "world_size": "1"}
NO_CODE = (ast.Assert, ast.Raise, ast.JoinedStr, ast.AnnAssign, ast.arguments)
TESTS = ("tests/zero", "tests/train", "tests/optimizer", "tests/kernels", "tests")
COMMAND_MINUTES = 1


class Mutant(NamedTuple):
    """A mistake: `text` in place of some characters of a file."""

    kind: str
    path: str  # in the package
    start: int
    end: int
    text: str
    in_triton: bool  # a kernel that no CPU runs outside of tests

    def __str__(self) -> str:
        source = (PACKAGE / self.path).read_text("utf-8")
        line = source.count("\n", 0, self.start)
        first, last = source.rfind("\n", 0, self.start) + 1, source.find("\n", self.end)
        after = source[first : self.start] + self.text + source[self.end : last]
        return f"{self.kind}: {self.path}:{line + 1}: {source[first:last].strip()}  ->  {after.strip()}"

    def plant(self, package: Path) -> None:
        """Write the mistake into a copy of the package."""
        source = (PACKAGE / self.path).read_text("utf-8")
        (package / self.path).write_text(
            source[: self.start] + self.text + source[self.end :], "utf-8"
        )


def mutants(path: str) -> Iterator[Mutant]:
    """Yield all mistakes that a file can have."""
    source = (PACKAGE / path).read_text("utf-8")
    assert source.isascii(), path  # so that columns count characters
    starts = [0, *(match.end() for match in re.finditer("\n", source))]

    def place(node: ast.AST) -> tuple[int, int]:
        start, end = (getattr(node, f"{side}lineno") for side in ("", "end_"))
        return starts[start - 1] + node.col_offset, starts[end - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def between(kind: str, left: ast.AST, right: ast.AST, old: str, new: str) -> Iterator[Mutant]:
        start, end = place(left)[1], place(right)[0]
        at = source.find(old, start, end)
        if at >= 0:
            yield Mutant(kind, path, at, at + len(old), new, in_triton)

    def visit(node: ast.AST) -> Iterator[Mutant]:
        nonlocal in_triton
        if isinstance(node, NO_CODE):
            return
        outside = in_triton
        in_triton = in_triton or "jit" in map(ast.unparse, getattr(node, "decorator_list", ()))
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            kind, old, new = OPERATORS[type(node.op)]
            yield from between(kind, node.left, node.right, old, new)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield Mutant("sign", path, *place(node), ast.unparse(node.operand), in_triton)
        elif isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value:
            yield Mutant("factor", path, *place(node), repr(2 * node.value), in_triton)
        elif isinstance(node, ast.Expr) and re.search(r"\bwait\w*\(\)$", ast.unparse(node)):
            yield Mutant("missing wait", path, *place(node), "pass", in_triton)
        elif (
            isinstance(node, ast.Attribute)
            and node.attr in GROUPS
            and isinstance(node.ctx, ast.Load)
        ):
            yield Mutant("wrong group", path, *place(node), GROUPS[node.attr], in_triton)
        elif isinstance(node, ast.Slice):
            for bound in filter(None, (node.lower, node.upper)):
                yield Mutant(
                    "off-by-one", path, *place(bound), f"({ast.unparse(bound)}) + 1", in_triton
                )
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
            yield from between(
                "off-by-one", node.left, node.comparators[0], *COMPARISONS[type(node.ops[0])]
            )
        for child in ast.iter_child_nodes(node):
            if child is not getattr(node, "returns", None) and child is not getattr(
                node, "annotation", None
            ):
                yield from visit(child)
        in_triton = outside

    in_triton = False
    yield from visit(ast.parse(source))


def copy_checkout(folder: Path) -> dict[str, str]:
    """Copy the checkout to a new folder; return the environment of programs that run there."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    return {
        **os.environ,
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def fails(test: str, folder: Path, plant: Callable[[Path], None]) -> bool:
    """Return whether a test fails in a copy of the checkout, in which `plant` has changed
    something."""
    variables = copy_checkout(folder)
    plant(folder)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    done = subprocess.run(command, cwd=folder, env=variables, timeout=300)
    return done.returncode == pytest.ExitCode.TESTS_FAILED


def caught(mutant: Mutant, folder: Path, seed: int) -> str:
    """Return what catches a mutant, empty if nothing does. folder: for the copy."""
    variables = copy_checkout(folder)
    mutant.plant(folder / PACKAGE.name)

    def first_line(beginnings: tuple[str, ...], *command: str) -> str:
        """Return the first line of the output that begins so, and do not wait for the others."""
        with subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            found = next((line for line in process.stdout if line.startswith(beginnings)), "")
            process.terminate()
        return found.strip()[:160]

    command = ("scripts/prove_layouts.py", f"--minutes={COMMAND_MINUTES}", f"--seed={seed}")
    if not mutant.in_triton and (line := first_line(("DIFFERENT", "ERROR", "Traceback"), *command)):
        return f"command: {line}"
    room = Path("tests", mutant.path)
    for tests in dict.fromkeys(
        [str(room.with_name(f"test_{room.name}")), str(room.parent), *TESTS]
    ):
        if not (folder / tests).exists():
            continue
        words = ("-m", "pytest", "-q", "-x", "-n2", "-p", "no:cacheprovider", tests)
        if line := first_line(("FAILED", "ERROR", "Traceback"), *words):
            return line
    return ""


def main() -> None:
    """Draw mutants, each kind as often as the others, and say what catches them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="only print the mutants")
    options = parser.parse_args()
    found: dict[str, list[Mutant]] = {}
    for mutant in (
        mutant for path in [*sorted({*step_calls()}), *MORE] for mutant in mutants(path)
    ):
        found.setdefault(mutant.kind, []).append(mutant)
    dice = random.Random(options.seed)
    kinds = sorted(found)
    survivors = list[Mutant]()
    for kind in kinds:
        dice.shuffle(found[kind])
    drawn = [found[kinds[number % len(kinds)]].pop() for number in range(options.count)]
    for number, mutant in enumerate(drawn, start=1):
        print(f"{number} {mutant}", flush=True)
        if options.list:
            continue
        with tempfile.TemporaryDirectory(prefix="mutant_") as folder:
            by = caught(mutant, Path(folder) / "checkout", number)
        print(f"    {by or 'NOT CAUGHT'}", flush=True)
        survivors += [] if by else [mutant]
    print(f"{len(drawn) - len(survivors)} of {len(drawn)} caught")


if __name__ == "__main__":
    main()
