"""Which tests `run_tests.sh --changed` runs, in a made tree."""

import subprocess
from pathlib import Path

import pytest

from tests.support.changed_tests import changed_files, needed_tests

TREE = {
    "README.md": "",
    "pyproject.toml": "",
    "pretrain_gpt.py": "import megatron_lite.setup_run",
    "scripts/show.py": "from megatron_lite.reports import report",
    "megatron_lite/__init__.py": "",
    "megatron_lite/errors.py": "",
    "megatron_lite/zero/__init__.py": "",
    "megatron_lite/zero/stage.py": "from megatron_lite.errors import UsageError",
    "megatron_lite/zero/notes.txt": "",
    "megatron_lite/pretrain.py": "import megatron_lite.setup_run",
    "megatron_lite/data/__init__.py": "",
    "megatron_lite/data/loader.py": "import megatron_lite.errors",
    "megatron_lite/planner/__init__.py": "",
    "megatron_lite/planner/plan.py": "def plan():\n    import megatron_lite.zero.stage",
    "megatron_lite/reports/__init__.py": "",
    "megatron_lite/reports/report.py": "",
    "megatron_lite/train.py": "from megatron_lite.data import loader\nimport megatron_lite.zero.stage",
    "megatron_lite/setup_run.py": "import megatron_lite.train, megatron_lite.planner.plan",
    "tests/conftest.py": "import megatron_lite.errors",
    "tests/support/harness.py": "import megatron_lite.zero.stage\n"
    "def start():\n    import megatron_lite.setup_run",
    "tests/data/conftest.py": "from megatron_lite.reports.report import x",
    "tests/data/test_loader.py": "from megatron_lite.data.loader import Loader",
    "tests/docs/test_guides.py": "",
    "tests/cli/test_sizes.py": """
import pytest
from megatron_lite.planner.plan import plan as planned

@pytest.fixture
def size(): return helper()

SIZES = [planned]

def helper(): return planned()

@pytest.mark.parametrize("number", SIZES)
def test_by_constant(number): pass

def test_by_fixture(size): pass

@pytest.mark.usefixtures("size")
def test_by_name(): pass

def test_within():
    from megatron_lite.planner.plan import plan

def test_another(): pass
""",
    "tests/planner/test_plan.py": "",
    "tests/scripts/test_show.py": 'run("scripts/show.py")',
    "tests/test_structure.py": "",
    "tests/train/test_resume.py": "from tests.support.launch import run",
    "tests/zero/test_stage.py": "from tests.support.harness import start",
}
# Functions of a file that use the planner.
USERS = [
    f"cli/test_sizes.py::test_{name}" for name in ("by_constant", "by_fixture", "by_name", "within")
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "changed, needed",
    [
        # The room itself, and the functions above that use it: a whole run does not need a tool that
        # sets it up.
        (
            "megatron_lite/planner/plan.py",
            [*USERS, "planner/test_plan.py"],
        ),
        ("megatron_lite/data/loader.py", ["data/test_loader.py", "train/test_resume.py"]),
        (
            "megatron_lite/zero/stage.py",
            [*USERS, "planner/test_plan.py", "train/test_resume.py", "zero/test_stage.py"],
        ),
        ("megatron_lite/setup_run.py", ["train/test_resume.py"]),
        ("pretrain_gpt.py", ["train/test_resume.py"]),
        ("scripts/show.py", ["scripts/test_show.py"]),
        # A conftest.py counts for its folder.
        ("megatron_lite/reports/report.py", ["data/test_loader.py", "scripts/test_show.py"]),
        # A file that is no module, or gone, counts as all beside it.
        (
            "megatron_lite/zero/notes.txt",
            [*USERS, "planner/test_plan.py", "train/test_resume.py", "zero/test_stage.py"],
        ),
        ("megatron_lite/data/removed.py", ["data/test_loader.py", "train/test_resume.py"]),
        ("README.md", ["docs/test_guides.py"]),
        ("tests/planner/test_plan.py", ["planner/test_plan.py"]),
        # Everything needs these.
        ("megatron_lite/errors.py", None),
        ("tests/conftest.py", None),
        ("pyproject.toml", None),
    ],
)
def test_what_a_change_needs(tree: Path, changed: str, needed: list[str] | None) -> None:
    found = needed_tests(tree, [changed])
    if needed is None:
        assert found is None
    else:
        assert found == sorted(["tests/test_structure.py", *(f"tests/{name}" for name in needed)])


def test_no_change_needs_the_rules_alone(tree: Path) -> None:
    assert needed_tests(tree, []) == ["tests/test_structure.py"]


def test_changes_are_those_of_the_branch_and_of_the_folder(tree: Path) -> None:
    """Committed, not committed, and not known to git; not what others changed on main since."""

    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *words], cwd=tree, check=True, capture_output=True)

    def commit(name: str) -> None:
        (tree / name).write_text("changed = True\n")
        git("add", "-A")
        git("commit", "-m", "Change")

    git("init", "-b", "main")
    git("add", "-A")
    git("commit", "-m", "Begin")
    git("switch", "-c", "work")
    commit("megatron_lite/errors.py")
    git("switch", "main")
    commit("megatron_lite/train.py")
    git("switch", "work")
    (tree / "README.md").write_text("changed")
    (tree / "new.txt").write_text("new")
    assert sorted(changed_files(tree, "main")) == [
        "README.md",
        "megatron_lite/errors.py",
        "new.txt",
    ]
