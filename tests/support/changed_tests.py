"""Name the tests of what has changed: `python -m tests.support.changed_tests [COMMIT]` prints them,
one file in a line, and nothing where all are needed.

Imports go one way, so a change can only break what imports it. A test file needs whatever it
imports, the room in whose folder it is, the scripts that it names, and the conftest.py files beside
and above it, each with all that it imports in turn. Of what helpers import within a function,
nothing counts: it is for the whole runs that some of their users start, and the rooms of these
import it too. That is a bet on where mistakes show; CI runs all tests.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# They are about the tree, or cheap.
ALWAYS = ("tests/test_structure.py",)
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml")
OF_DOCUMENTS = ("tests/docs", "tests/scripts/test_scripts.py")
# Tests of whole runs need the loop with all that it imports, and what puts a run together without
# the tools that it uses: they have tests of their own.
LOOP = "megatron_lite/train.py"
TOOLS = tuple(f"megatron_lite/{room}/" for room in ("corpus", "generation", "planner", "reports"))
PUTS_TOGETHER = ("pretrain_gpt.py", "megatron_lite/pretrain.py", "megatron_lite/setup_run.py")
WHOLE_RUNS = ("tests/train/", "tests/faults/", "tests/outputs/")


def changed_files(root: Path, commit: str) -> list[str]:
    """Return the files that differ from where this branch left `commit`, and those that git does
    not know yet."""
    base = _git(root, "merge-base", commit, "HEAD")[0]
    return [
        *_git(root, "diff", "--name-only", "--no-renames", base),
        *_git(root, "ls-files", "--others", "--exclude-standard"),
    ]


def _git(root: Path, *words: str) -> list[str]:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def needed_tests(root: Path, changed: Iterable[str]) -> list[str] | None:
    """Return the test files to run after a change of these files, None for all of them."""
    folders = ("megatron_lite", "scripts", "tests")
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    paths.append(root / "pretrain_gpt.py")
    sources = {path.relative_to(root).as_posix(): path for path in paths}
    imports = {name: set(_imports(root, name, path)) for name, path in sources.items()}
    for name in PUTS_TOGETHER:
        imports[name] = {other for other in imports[name] if not other.startswith(TOOLS)}
    tests = [name for name in sources if _is_test(name)]
    for name in tests:
        imports[name] |= set(_of_place(sources, name))
    found = set()
    for name in changed:
        if name in PUTS_TOGETHER:
            found |= {test for test in tests if test.startswith(WHOLE_RUNS)}
        if name in DOCUMENTS or name.startswith("docs/"):
            found |= {test for test in tests if test.startswith(OF_DOCUMENTS)}
        elif name in sources:
            found |= _reaching(imports, {name})
        else:
            # Something that Python files beside it read, or a module that is gone.
            folder, _, _ = name.rpartition("/")
            beside = {other for other in sources if folder and other.startswith(f"{folder}/")}
            if not beside:
                return None
            found |= _reaching(imports, beside)
    if "tests/conftest.py" in found:
        return None
    return sorted({*found, *ALWAYS} & set(tests))


def _is_test(name: str) -> bool:
    return name.startswith("tests/") and name.rpartition("/")[2].startswith("test_")


def _imports(root: Path, name: str, path: Path) -> Iterator[str]:
    """Yield the files of the tree that a file imports, packages on the way included."""
    tree = ast.parse(path.read_text("utf-8"))
    helps = name.startswith("tests/") and not _is_test(name)
    for node in tree.body if helps else ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for dotted in names:
            parts = dotted.split(".")
            for end in range(1, len(parts) + 1):
                stem = "/".join(parts[:end])
                for file in (f"{stem}.py", f"{stem}/__init__.py"):
                    if (root / file).is_file():
                        yield file


def _of_place(sources: dict[str, Path], test: str) -> Iterator[str]:
    """Yield what a test needs because of its folder and of the scripts that it names."""
    folders = [folder.as_posix() for folder in Path(test).parents]
    yield from (f"{folder}/conftest.py" for folder in folders if f"{folder}/conftest.py" in sources)
    room = Path(test).parts[1]
    yield from (name for name in sources if name.startswith(f"megatron_lite/{room}/"))
    if test.startswith(WHOLE_RUNS):
        yield LOOP
    words = sources[test].read_text("utf-8")
    for name in sources:
        folder, _, file = name.rpartition("/")
        if folder == "scripts" and file in words:
            yield name


def _reaching(imports: dict[str, set[str]], changed: set[str]) -> set[str]:
    """Return the files that import one of `changed`, directly or not, and these."""
    found = set(changed)
    while more := {name for name, used in imports.items() if used & found} - found:
        found |= more
    return found


def main(arguments: Sequence[str]) -> int:
    commit = arguments[0] if arguments else "origin/main"
    needed = needed_tests(ROOT, changed_files(ROOT, commit))
    print("\n".join(["tests"] if needed is None else needed))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
