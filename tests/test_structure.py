"""The rules of the house, read from the source: which way imports go, what is never used, what
every module has."""

import ast
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.code_tokens import code_tokens
from tests.support.light_imports import heavy_imports
from tests.support.save_calls import save_calls
from tests.support.step_files import changes_of, step_calls, tokens_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "megatron_lite"
MODULES = sorted(PACKAGE.rglob("*.py"))
PROGRAMS = [ROOT / "pretrain_gpt.py", *sorted((ROOT / "scripts").rglob("*.py"))]
# Sizes are counted in tokens of code: a line that packs three facts is no shorter to read. A
# feature that needs more raises a limit, and its commit says why.
MAXIMUM_PACKAGE_TOKENS = 351_365
MAXIMUM_FILE_TOKENS = 3_500
MAXIMUM_TOKENS_WITHOUT_DOCSTRING = 150
# What a reader of one training step passes.
MAXIMUM_STEP_FILES = 32
MAXIMUM_STEP_TOKENS = 44_224
MAXIMUM_STEP_CHANGES = 400

# The rooms of the package from the top floor to the bottom, as drawn in CONTRIBUTING.md. A module
# imports its own room and those on lower floors.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("commands", "notebook", "pretrain"),
    ("setup_run", "train"),
    ("outputs",),
    ("cli", "generation", "planner"),
    ("corpus", "huggingface", "reports"),
    ("checkpoint", "data", "monitor"),
    ("optimizer",),
    ("zero", "model"),
    ("kernels", "run"),
    ("distributed", "parameter", "validation"),
    ("schedules",),
    ("config", "seeds", "tiles"),
    ("errors",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# What a room must not import although it lies below: `zero` knows modules and parameters, not the
# model (same floor).
NEVER: tuple[tuple[str, str], ...] = (
    ("monitor", "optimizer"),
    ("data", "zero"),
    ("cli", "model"),
    ("cli", "kernels"),
)

# Calls of a save from a lower room into a higher one, which a reader must look up.
MAXIMUM_SAVE_CLIMBS = 0

# Files that `train` imports, itself and their rooms included.
MAXIMUM_LOOP_FILES = 141

# What the training loop does without, the rooms that only use it.
TOOLS = ("cli", "commands", "corpus", "generation", "planner", "reports", "setup_run")

# Where the process environment may be read; every other module gets values as arguments.
READS_ENVIRONMENT = {
    "distributed/startup.py",
    "distributed/triton_mode.py",
    "run/launch.py",
    "run/run_process.py",
    "run/launcher_watch.py",
    "run/host.py",
    "run/remote_storage.py",
    "run/secrets.py",
    "monitor/trackers/wandb_tracker.py",
}

FORBIDDEN_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
}
# Functions that load or send pickles, or run text as code or in a shell, by the end of their dotted
# name.
FORBIDDEN_CALLS = {
    ("eval",): "runs text as code",
    ("exec",): "runs text as code",
    ("os", "system"): "runs a shell",
    ("os", "popen"): "runs a shell",
    ("torch", "load"): "loads pickles",
    ("torch", "save"): "writes pickles",
    ("np", "load"): "loads pickles if asked to",
    ("numpy", "load"): "loads pickles if asked to",
    ("yaml", "load"): "builds any object",
    ("yaml", "unsafe_load"): "builds any object",
    ("all_gather_object",): "sends pickles",
    ("gather_object",): "sends pickles",
    ("broadcast_object_list",): "sends pickles",
    ("scatter_object_list",): "sends pickles",
    ("send_object_list",): "sends pickles",
    ("recv_object_list",): "sends pickles",
}
FORBIDDEN_ARGUMENTS = {"shell", "allow_pickle", "trust_remote_code"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def identify(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


SOURCES = [*MODULES, *PROGRAMS]


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path, tree: ast.AST | None = None) -> Iterator[str]:
    """Dotted names of all imports of a file or a part of it, inside functions too, relative ones
    resolved."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree or parse(path)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join((*base, *([node.module] if node.module else [])))
            yield from (f"{origin}.{name.name}" for name in node.names)


def dotted_name(node: ast.expr) -> tuple[str, ...]:
    """("torch", "load") for the expression torch.load; the parts before a call or index are left
    out."""
    if isinstance(node, ast.Attribute):
        return (*dotted_name(node.value), node.attr)
    return (node.id,) if isinstance(node, ast.Name) else ("?",)


def public_functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """Functions and methods without a leading underscore, of modules and of public classes."""
    for node in tree.body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            yield node.name, node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for member in node.body:
                if isinstance(member, Function) and not member.name.startswith("_"):
                    yield f"{node.name}.{member.name}", member


def is_kernel(function: Function) -> bool:
    """Triton compiles these; its arguments are pointers and constants without Python types."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_imports_go_one_way() -> None:
    """No module imports a room that stands beside or above its own, not even inside a function."""
    problems = []
    for module in MODULES:
        room = room_of(module)
        if room in ("__init__", "__main__"):
            continue
        assert room in FLOOR_OF, (
            f"{room} is new: give it a floor in FLOORS and in the drawing of CONTRIBUTING.md"
        )
        parts = [
            name.split(".")
            for name in imported_modules(module)
            if name.split(".")[0] == "megatron_lite"
        ]
        imported = {part[1] for part in parts if len(part) > 1 and part[1] != "__version__"} - {
            room
        }
        up = {other for other in imported if FLOOR_OF[other] <= FLOOR_OF[room]}
        problems += [f"{identify(module)} imports {sorted(up)}, not below {room}"] if up else []
        never = {other for other in imported if (room, other) in NEVER}
        problems += [f"{identify(module)} must not import {sorted(never)}"] if never else []
    assert not problems


def test_the_training_loop_needs_no_tools() -> None:
    """What `train` imports when it runs; imports for types alone do not count."""
    left, seen = ["megatron_lite.train"], set[str]()
    while left:
        name = left.pop()
        path = ROOT.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name not in seen and path.is_file():
            seen.add(name)
            types = [
                node
                for node in parse(path).body
                if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            ]
            for_types = {name for block in types for name in imported_modules(path, block)}
            found = set(imported_modules(path)) - for_types
            left += [
                part
                for name in found
                for part in itertools.accumulate(name.split("."), "{}.{}".format)
            ]
    assert not {name for name in seen if name.split(".")[1:2] and name.split(".")[1] in TOOLS}
    assert len(seen) <= MAXIMUM_LOOP_FILES, sorted(seen)


def test_no_circles() -> None:
    """Peel off modules whose imports are all peeled; what remains imports itself. Imports for types
    count."""
    names = {
        module: ".".join(module.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for module in MODULES
    }
    modules = set(names.values())
    rest = {
        names[module]: {
            name if name in modules else name.rpartition(".")[0]
            for name in imported_modules(module)
        }
        - {names[module]}
        for module in MODULES
    }
    while peeled := {name for name, imports in rest.items() if not imports & rest.keys()}:
        rest = {name: imports for name, imports in rest.items() if name not in peeled}
    assert not rest, "\n".join(
        f"{name} imports {sorted(imports & rest.keys())}" for name, imports in rest.items()
    )


def test_the_drawing_in_contributing_is_the_rule() -> None:
    """The floors that a reader sees are the ones that the test above enforces."""
    drawing = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("## The rooms")[1].split("```")[1]
    assert tuple(tuple(line.split()) for line in drawing.strip().splitlines()) == FLOORS


def test_every_document_stands_in_the_site() -> None:
    """Each page of docs/ has one entry under `nav` of mkdocs.yml, and each entry a page."""
    pages = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M)
    outside = ["index.md", "CONTRIBUTING.md", "CHANGELOG.md"]
    assert sorted(pages) == sorted([*outside, *(path.name for path in ROOT.glob("docs/*.md"))])


def test_every_room_says_what_is_in_it() -> None:
    """The docstring of each room's __init__.py is one sentence."""
    for init in PACKAGE.glob("*/__init__.py"):
        sentence, _, _ = (ast.get_docstring(parse(init)) or "").partition("\n\n")
        assert sentence.endswith("."), f"{identify(init)}: one sentence"


def test_few_modules_lie_flat() -> None:
    """A new module belongs into a room."""
    flat = {path.stem for path in PACKAGE.glob("*.py")}
    assert flat == {
        "__init__",
        "__main__",
        "pretrain",
        "train",
        "setup_run",
        "parameter",
        "tiles",
        "errors",
        "seeds",
    }


def test_docstrings_begin_with_the_thing_or_a_verb() -> None:
    """No docstring begins with a relative clause or a fragment ("What is due ...", "Of the blocks,
    ...")."""
    problems = []
    for source in SOURCES:
        for node in ast.walk(parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                first = (ast.get_docstring(node) or "").partition(" ")[0]
                if first in ("What", "Who", "Of", "Those", "Whose", "Whom"):
                    problems.append(
                        f"{identify(source)}:{getattr(node, 'lineno', 1)} begins with {first!r}"
                    )
    assert not problems


def test_formatting_has_no_exceptions() -> None:
    """`ruff format` has the last word, everywhere."""
    assert not [
        identify(source) for source in SOURCES if "fmt: " + "skip" in source.read_text("utf-8")
    ]


def test_command_line_needs_no_torch() -> None:
    """Options, arguments and their validation work without importing torch, so that --help answers
    at once."""
    modules = "megatron_lite.config, megatron_lite.cli.parse, megatron_lite.validation"
    assert not heavy_imports(f"import {modules}")


def test_nothing_dangerous() -> None:
    """No pickle is loaded, written or sent; no text is run as code or in a shell."""
    assert not [problem for source in SOURCES for problem in dangers(source)]


def dangers(source: Path) -> Iterator[str]:
    """Forbidden imports, calls and arguments of a file, each with its place."""
    for name in {name.split(".")[0] for name in imported_modules(source)} & FORBIDDEN_MODULES:
        yield f"{identify(source)} imports {name}"
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Call):
            name = dotted_name(node.func)
            for forbidden, reason in FORBIDDEN_CALLS.items():
                builtin = len(forbidden) == 1 and forbidden[0] in ("eval", "exec")
                if name == forbidden if builtin else name[-len(forbidden) :] == forbidden:
                    yield f"{identify(source)}:{node.lineno}: {'.'.join(name)} {reason}"
            for keyword in node.keywords:
                off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in FORBIDDEN_ARGUMENTS and not off:
                    yield f"{identify(source)}:{node.lineno}: {keyword.arg}"


def test_environment_is_read_in_few_places() -> None:
    """Environment variables are read where the design says, so that a run is described by its
    command line."""
    readers = [
        f"{identify(module)}:{node.lineno} reads or writes the environment"
        for module in MODULES
        if module.relative_to(PACKAGE).as_posix() not in READS_ENVIRONMENT
        for node in ast.walk(parse(module))
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv", "environb", "putenv")
    ]
    assert not readers


def test_no_mutable_globals() -> None:
    """State is passed, not shared: no `global`, and names that hold lists, dicts or sets are
    constants."""
    problems = []
    for source in SOURCES:
        tree = parse(source)
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Global)]
        problems += [f"{identify(source)}:{node.lineno}: `global` is used" for node in nodes]
        for node in tree.body:
            value = getattr(node, "value", None)
            if isinstance(value, ast.List | ast.Dict | ast.Set) and isinstance(
                node, ast.Assign | ast.AnnAssign
            ):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
                if names != [name for name in names if name.isupper() or name == "__all__"]:
                    problems.append(
                        f"{identify(source)}:{node.lineno}: {names} can be changed by anyone"
                    )
    assert not problems


def test_modules_are_short_and_explained() -> None:
    """Every module says what it is, and is short enough to be read in one go."""
    problems = []
    for source in SOURCES:
        tree = parse(source)
        if (source.name != "__init__.py" or tree.body) and not ast.get_docstring(tree):
            problems.append(f"{identify(source)} has no docstring")
        tokens = code_tokens(source.read_text("utf-8"))
        if tokens > MAXIMUM_FILE_TOKENS:
            problems.append(f"{identify(source)} has {tokens} tokens of code")
    assert not problems


def test_the_package_does_not_grow() -> None:
    """Whoever adds a feature raises the limit by what the feature is worth."""
    assert (
        sum(code_tokens(module.read_text("utf-8")) for module in MODULES) <= MAXIMUM_PACKAGE_TOKENS
    )


def test_a_line_binds_few_names() -> None:
    """No line packs three assignments, unless their values are taken apart together."""
    problems = []
    for source in SOURCES:
        for node in ast.walk(parse(source)):
            if (
                isinstance(node, ast.Assign)
                and len(node.targets) == 1
                and isinstance(node.value, ast.Tuple)
            ):
                targets = getattr(node.targets[0], "elts", [])
                if len(targets) > 2 and all(
                    isinstance(part, ast.Name | ast.Attribute) for part in targets
                ):
                    problems.append(f"{identify(source)}:{node.lineno} binds {len(targets)} names")
    assert not problems


def test_a_training_step_passes_few_files() -> None:
    """A reader who follows a plain step from the data to the update opens few files, and goes from
    one to another seldom; `step_files` lists them."""
    calls = step_calls()
    files = tokens_of(calls)
    assert len(files) <= MAXIMUM_STEP_FILES and sum(files.values()) <= MAXIMUM_STEP_TOKENS, files
    assert changes_of(calls) <= MAXIMUM_STEP_CHANGES


def test_a_save_seldom_calls_upwards() -> None:
    """A reader who follows a save goes down the floors; `save_calls` lists the exceptions."""
    calls = save_calls(FLOOR_OF)
    assert calls.total() <= MAXIMUM_SAVE_CLIMBS, calls


def test_public_functions_are_typed_and_explained() -> None:
    """Public functions carry types on every argument and result, and a docstring unless they are
    very short."""
    problems = []
    for source in SOURCES:
        for name, function in public_functions(parse(source)):
            if not is_kernel(function):
                where = f"{identify(source)}:{function.lineno}: {name}"
                problems += [f"{where} {problem}" for problem in lacking(function)]
    assert not problems


def lacking(function: Function) -> Iterator[str]:
    """What a public function lacks."""
    arguments = function.args
    every = [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]
    untyped = [
        a.arg
        for a in every
        if a is not None and a.annotation is None and a.arg not in ("self", "cls")
    ]
    if untyped:
        yield f"has no types for {untyped}"
    if function.returns is None:
        yield "has no result type"
    if not ast.get_docstring(function):
        tokens = code_tokens(ast.unparse(function))
        if tokens > MAXIMUM_TOKENS_WITHOUT_DOCSTRING:
            yield f"has {tokens} tokens and no docstring"


def test_every_folder_is_a_package() -> None:
    """Every folder with modules has an __init__.py, or an installation would leave it out."""
    missing = {
        identify(path.parent) for path in MODULES if not (path.parent / "__init__.py").is_file()
    }
    assert not missing
