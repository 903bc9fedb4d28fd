"""How pip installs the project; settings of the tools stand in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
VERSION = re.search(
    r'^__version__ = "([^"]+)"', (ROOT / "megatron_lite" / "__init__.py").read_text("utf-8"), re.M
)
assert VERSION is not None, "megatron_lite/__init__.py states no __version__"

setup(
    name="megatron_lite",
    version=VERSION.group(1),
    description="A command-line pretrainer for language models: flat flags, ZeRO 1/2/3, a plain training loop.",
    long_description=(ROOT / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["megatron_lite", "megatron_lite.*"]),
    package_data={
        "megatron_lite": [
            "*.pyi",
            "py.typed",
            "**/*.css",
            "**/*.js",
            "**/*.json",
            "**/*.txt",
            "**/*.jinja",
        ]
    },
    py_modules=["pretrain_gpt"],
    entry_points={
        "console_scripts": [
            "megatron_lite = megatron_lite.commands:command",
            "pretrain_gpt = pretrain_gpt:command",
            "prepare_data = megatron_lite.cli.prepare_data:command",
        ]
    },
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.11,<2.15",
        "triton; platform_system == 'Linux'",
        "numpy",
        "safetensors",
        "tokenizers",
        "tqdm",
        "wandb",
    ],
    extras_require={
        "plot": ["matplotlib"],
        "data": ["pyarrow", "zstandard"],
        "fast": ["fastokens>=0.3.5,<0.4", "isal>=1.7"],
        "chat": ["transformers>=5", "jinja2>=3.1.6"],
        # The first versions whose connections a caller may open.
        "remote": [
            "fsspec",
            "s3fs",
            "gcsfs",
            "aiobotocore>=3.10",
            "aiohttp>=3.12",
            "huggingface_hub",
        ],
        "tensorboard": ["tensorboard"],
        "gguf": ["gguf>=0.19"],
        "flash4": ["flash-attn-4>=4.0.0b36"],  # has only pre-releases so far
        "docs": ["mkdocs-material"],
        "test": [
            "pytest",
            "pytest-xdist",
            "transformers",
            "peft",
            "jinja2",
            "hypothesis",
            "tensorboard",
            "build",
            "setuptools",
            "pyyaml",
            "moto[server]",
            "s3fs",
            "fastokens>=0.3.5,<0.4",
            "isal>=1.7",
            "aiobotocore>=3.10",
            "gguf>=0.19",
        ],
        "dev": ["ruff", "mypy"],
    },
)
