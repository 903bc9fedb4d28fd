"""Name the tests of what has changed: `python -m tests.support.changed_tests [COMMIT]` prints them,
one file or function in a line, and the folder of all tests where all are needed.

Imports go one way, so a change can only break what imports it. A test file needs whatever it
imports, the room in whose folder it is, the scripts that it names, and the conftest.py files beside
and above it, each with all that it imports in turn. Where imports of its own alone lead to the
change, only the functions that use these imports are needed. Of what helpers import within a
function, nothing counts: it is for the whole runs that some of their users start, and the rooms of
these import it too. That is a bet on where mistakes show; CI runs all tests.
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
    """Return the test files and functions to run after a change of these files, None for all."""
    folders = ("megatron_lite", "scripts", "tests")
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    paths.append(root / "pretrain_gpt.py")
    sources = {path.relative_to(root).as_posix(): path for path in paths}
    imports = {name: set(_imports(root, name, path)) for name, path in sources.items()}
    for name in PUTS_TOGETHER:
        imports[name] = {other for other in imports[name] if not other.startswith(TOOLS)}
    tests = {name for name in sources if _is_test(name)}
    places = {name: set(_of_place(sources, name)) for name in tests}
    for name in tests:
        imports[name] |= places[name]
    begun, whole = set(), {*ALWAYS}
    for name in changed:
        if name in PUTS_TOGETHER:
            whole |= {test for test in tests if test.startswith(WHOLE_RUNS)}
        if name in DOCUMENTS or name.startswith("docs/"):
            whole |= {test for test in tests if test.startswith(OF_DOCUMENTS)}
        elif name in sources:
            begun.add(name)
        else:
            # Something that Python files beside it read, or a module that is gone.
            folder, _, _ = name.rpartition("/")
            beside = {other for other in sources if folder and other.startswith(f"{folder}/")}
            if not beside:
                return None
            begun |= beside
    found = _reaching(imports, begun)
    if "tests/conftest.py" in found:
        return None
    whole |= {name for name in found & tests if name in begun or places[name] & found}
    needed = whole & tests
    for name in found & tests - whole:
        functions = _functions_using(root, sources[name], found)
        needed |= {f"{name}::{function}" for function in functions} or {name}
    return sorted(needed)


def _is_test(name: str) -> bool:
    return name.startswith("tests/") and name.rpartition("/")[2].startswith("test_")


def _imports(root: Path, name: str, path: Path) -> Iterator[str]:
    """Yield the files of the tree that a file imports, packages on the way included."""
    tree = ast.parse(path.read_text("utf-8"))
    helps = name.startswith("tests/") and not _is_test(name)
    for node in tree.body if helps else ast.walk(tree):
        for _, files in _bound(root, node):
            yield from files


def _bound(root: Path, node: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Yield each name that an import binds, with the files of the tree behind it."""
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return
    of = f"{node.module}." if isinstance(node, ast.ImportFrom) and node.module else ""
    for alias in node.names:
        parts = f"{of}{alias.name}".split(".")
        stems = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
        files = [file for stem in stems for file in (f"{stem}.py", f"{stem}/__init__.py")]
        name = alias.asname or alias.name.partition(".")[0]
        yield name, [file for file in files if (root / file).is_file()]


def _functions_using(root: Path, path: Path, found: set[str]) -> list[str]:
    """Return the test functions that use what a file imports from `found`: by name, or through
    other functions, fixtures and constants of the file; none where more than functions does."""
    used: set[str] = set()
    tests: list[str] = []
    parts = ast.parse(path.read_text("utf-8")).body
    while more := [part for part in parts if _uses(root, part, used, found)]:
        parts = [part for part in parts if part not in more]
        for part in more:
            if isinstance(part, ast.FunctionDef | ast.ClassDef):
                if any(
                    isinstance(node, ast.keyword) and node.arg == "autouse"
                    for decorator in part.decorator_list
                    for node in ast.walk(decorator)
                ):
                    return []
                used.add(part.name)
                tests += [part.name] * part.name.lower().startswith("test")
            elif isinstance(part, ast.Import | ast.ImportFrom):
                used |= {name for name, files in _bound(root, part) if found & {*files}}
            elif isinstance(part, ast.Assign | ast.AnnAssign):
                stored = {
                    node.id
                    for node in ast.walk(part)
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
                }
                if "pytestmark" in stored:
                    return []
                used |= stored
            else:
                return []
    return tests


def _uses(root: Path, part: ast.stmt, used: set[str], found: set[str]) -> bool:
    """Whether a statement has one of these names, as a word, an argument or a string, or an import
    from `found`."""
    for node in ast.walk(part):
        if isinstance(node, ast.Name) and node.id in used:
            return True
        if isinstance(node, ast.arg) and node.arg in used:
            return True
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in used:
            return True
        if any(found & {*files} for _, files in _bound(root, node)):
            return True
    return False


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
