"""What a new interpreter has imported after some code, for commands that answer at once."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "numpy", "transformers", "wandb", "matplotlib")


def heavy_imports(code: str) -> list[str]:
    """Return which of the packages that take long to import some code needs."""
    said = f"import sys; print([name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\n{said}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    imported: list[str] = ast.literal_eval(result.stdout.splitlines()[-1])
    return imported
