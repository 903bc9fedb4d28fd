"""A command-line pretrainer for language models: flat flags, a ZeRO 1/2/3 partitioner, a plain
training loop; and `train` and `load` for notebooks, described in docs/notebook.md."""

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"
__all__ = ("Model", "Result", "load", "train")  # with types in __init__.pyi
_HOMES = ("notebook.looking", "notebook.training", "notebook.looking", "notebook.training")


class _Package(ModuleType):
    """The package, in which `train` is the function, also once the module of that name has been
    imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if name != "train":
            super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: commands import this package, and must stay
    quick."""
    if name in __all__:
        home = _HOMES[__all__.index(name)]
        return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]


sys.modules[__name__].__class__ = _Package
