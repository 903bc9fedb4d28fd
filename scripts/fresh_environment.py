"""Build an sdist and a wheel, and install the wheel into a fresh environment that does not see this
checkout.

    python scripts/fresh_environment.py FOLDER

Both archives go to FOLDER/dist, the environment to FOLDER/environment. The wheel is built from the
sdist, so it lacks any file that the sdist lacks. Other packages come from the running interpreter
through a .pth file; nothing is downloaded. Requires the packages build and setuptools.
"""

import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def source_files() -> Iterator[Path]:
    """Yield the relative paths of files that git tracks or would track; in an unpacked sdist, all
    files."""
    if not (ROOT / ".git").exists():
        paths = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
        yield from (path for path in paths if "__pycache__" not in path.parts)
        return
    # Another user may own the checkout, as in containers.
    command = ["git", "-c", "safe.directory=*", "-C", str(ROOT), "ls-files", "-z"]
    command += ["--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    yield from (Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file())


def build(folder: Path) -> Path:
    """Build both archives into `folder`/dist from a copy of the sources; return the wheel."""
    source = folder / "source"
    for path in source_files():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(folder / "dist"),
        str(source),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"fresh_environment.py: python -m build failed:\n{result.stdout}{result.stderr}")
    shutil.rmtree(source)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def create(environment: Path) -> None:
    """Create an environment that borrows the packages of the running interpreter."""
    venv.create(environment, with_pip=False)
    (packages,) = environment.glob("lib/python*/site-packages")
    borrowed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "borrowed.pth").write_text("\n".join(borrowed) + "\n", "utf-8")


def install(wheel: Path, environment: Path) -> None:
    """Install the wheel without its dependencies."""
    python = environment / "bin" / "python"
    # A copy of the project among the borrowed packages must not count as installed.
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
    ]
    subprocess.run(
        [*command, "--force-reinstall", "--disable-pip-version-check", str(wheel)], check=True
    )


def main() -> int:
    """Build and install into the folder of the command line; return the exit code."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = build(folder)
    create(folder / "environment")
    install(wheel, folder / "environment")
    print(f"installed into {folder / 'environment'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
