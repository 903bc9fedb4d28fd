"""The command line of each program: ours, and the peers' from checkouts and packages.

All train the same shape on the same text, with AdamW (betas 0.9 and 0.95, weight decay 0.1), a
constant learning rate, gradients clipped to norm 1, and a log line per step. Each draws its own
initial weights and order of samples. docs/benchmarks.md lists the differences. The text is one
token stream from the project's own texts, in each program's format.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from megatron_lite.config import Config, unflatten
from megatron_lite.data.indexed_dataset import IndexedDatasetWriter
from megatron_lite.huggingface.config_file import hugging_face_config
from megatron_lite.huggingface.weight_map import by_tensor, pieces
from megatron_lite.kernels.matmul_library import library_for
from megatron_lite.validation import resolve
from scripts.benchmarks.commands import TORCHRUN
from scripts.benchmarks.pipeline import write_json
from scripts.benchmarks.programs.race import Command
from scripts.benchmarks.training.model import parameter_specs
from scripts.benchmarks.training.settings import MODELS, Sizes
from scripts.docs.tables import ROOT

HERE = Path(__file__).resolve().parent
LEARNING_RATE = 3e-4
OURS = "megatron_lite"
OURS_EXACT_GELU = f"{OURS} exact gelu"
# nanoGPT has the exact gelu (erf), which is faster than GPT-2's (tanh); the other programs can use
# GPT-2's.
COMPARED_WITH = dict.fromkeys(
    ("nanoGPT", "nanoGPT compiled", "nanoGPT helped", "nanoGPT helped compiled"), OURS_EXACT_GELU
)
# pickle.dumps({"vocab_size": ...}, 0), which nanoGPT reads; nothing here writes pickles.
_META = "(dS'vocab_size'\nI{}\ns."
DOCUMENT_TOKENS = 4096
NEVER = 10**6  # an interval, or a number of steps, that no run reaches


class Setting:
    """A run's options, the folder of its inputs, and the model.

    Programs may write to folders below the folder of inputs.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.ranks = int(options.ranks)
        family = MODELS[options.model][1]
        sizes = {name: getattr(options, name) for name in Sizes._fields}
        self.is_llama = bool(family["use_rotary_embeddings"])  # with RMS norm and SwiGLU
        self.model_flags: dict[str, Any] = {
            **family,
            **sizes,
            "max_position_embeddings": options.sequence_length,
        }
        exported = {"export_model_type": "llama"} if self.is_llama else {}
        self.config = resolve(
            unflatten({**self.model_flags, **exported, "train_iters": 1, "device": "cpu"}), 1
        )

    def train_with(self, library: str, config: Mapping[str, Any], **more: bool) -> list[str]:
        """Write the options of our script around Trainer or litgpt; return its command."""
        options = self.options
        values = {
            "library": library,
            "config": config,
            "data": str(self.folder / "train.bin"),
            "batch_size": options.micro_batch_size,
            "lr": LEARNING_RATE,
            "sequence_length": options.sequence_length,
            "dtype": options.dtype,
            "lora_rank": options.lora_rank,
        }
        name = "_".join([library, *(key for key, value in more.items() if value)])
        path = self.folder / name / "options.json"
        write_json(path, values | more)
        return self.launch(options.python, str(HERE / "library_trainers.py"), str(path))

    def hugging_face_config(self) -> dict[str, Any]:
        """Return the content of the model's config.json; transformers chooses the initial
        weights."""
        values = hugging_face_config(self.config, {"bos_token_id": 0, "eos_token_id": 0})
        del values["initializer_range"]
        return values

    def launch(self, python: str, *words: str) -> list[str]:
        """Return the command that runs a Python program, under torchrun if there are several
        ranks."""
        ranks = (*TORCHRUN, f"--nproc-per-node={self.ranks}") if self.ranks > 1 else ()
        return [python, *ranks, *words]

    def require(self, *packages: str) -> str | None:
        """Return why the peers' interpreter cannot run a program (a missing package), or None."""
        for package in packages:
            code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
            if subprocess.run([self.options.python, "-c", code]).returncode:
                return f"{package} is not installed"
        return None


# Returns a command, the reason why the program cannot run here, or None if it does not support the
# model or layout.
Maker = Callable[[Setting], Command | str | None]


def ours(setting: Setting, zero_stage: int = 1, exact_gelu: bool = False) -> Command | None:
    """Return our program's command."""
    options = setting.options
    if (zero_stage > 1 and setting.ranks == 1) or (
        exact_gelu and (setting.is_llama or options.nanogpt is None)
    ):
        return None
    data = {"dataset_source", "num_workers"}  # those of a run without data
    flags = {name: value for name, value in setting.model_flags.items() if name not in data}
    flags |= {
        "batch_size": options.micro_batch_size * setting.ranks,
        "zero_stage": zero_stage,
        "data_path": setting.folder / "ours",
        "split": "1,0,0",
        "train_iters": NEVER,
        "lr": LEARNING_RATE,
        "adam_beta2": 0.95,
        "clip_grad": 1.0,
        "log_interval": 1,
        "device": "cpu",
        "training_dtype": options.dtype,
        "lora_rank": options.lora_rank,
        "experiment_dir": setting.folder
        / f"ours_{zero_stage}{'_exact_gelu' if exact_gelu else ''}",
    }
    flags |= {"activation_type": "gelu_exact"} if exact_gelu else {}
    words = [
        f"--{name}={int(value) if isinstance(value, bool) else value}"
        for name, value in flags.items()
    ]
    program = [str(ROOT / "pretrain_gpt.py"), *words]
    return Command(
        setting.launch(sys.executable, *program),
        ROOT,
        r"^iteration +\d+/\d+ \| loss +([\d.]+|nan|inf)",
    )


def nanogpt(setting: Setting, compiled: bool = False, helped: bool = False) -> Command | str | None:
    """Return nanoGPT's train.py, run by `on_cpu` where it asks for a GPU: with several ranks, in
    bf16, and if helped.

    helped: with fused AdamW, and with the library for products that our program chooses.
    """
    options = setting.options
    if helped and setting.ranks > 1:  # fused in any case
        return None
    through = helped or setting.ranks > 1 or options.dtype == "bf16"
    if setting.is_llama:
        return None
    if options.nanogpt is None:
        return "no checkout: --nanogpt=FOLDER"
    values = {
        "device": "cuda"
        if through
        else "cpu",  # on a CPU, nanoGPT has neither bf16 nor a fused AdamW
        "dtype": "bfloat16" if options.dtype == "bf16" else "float32",
        "backend": "gloo",
        "compile": compiled,
        "dataset": setting.folder,
        "out_dir": setting.folder / "nanogpt",
        "eval_interval": NEVER,
        "eval_iters": 1,
        "n_layer": options.num_layers,
        "n_head": options.num_attention_heads,
        "n_embd": options.hidden_size,
        "bias": True,
        "block_size": options.sequence_length,
        "batch_size": options.micro_batch_size,
        "gradient_accumulation_steps": setting.ranks,  # divided by the ranks
        "learning_rate": LEARNING_RATE,
        "decay_lr": False,
        "max_iters": NEVER,
    }
    program = [
        str(options.nanogpt / "train.py"),
        *(f"--{name}={value}" for name, value in values.items()),
    ]
    if through:
        switch = ["--onednn"] if helped and library_for("auto") == "onednn" else []
        program = [str(HERE / "on_cpu.py"), *switch, *program]
    return Command(
        setting.launch(options.python, *program),
        options.nanogpt,
        r"^iter \d+: loss ([\d.]+|nan|inf)",
    )


def picotron(setting: Setting) -> Command | str | None:
    """Return picotron's train.py under torchrun, run by `on_cpu`. It does not clip gradients."""
    options, folder = setting.options, setting.folder / "picotron"
    if not setting.is_llama or options.dtype != "fp32":
        return None
    if options.picotron is None:
        return "no checkout: --picotron=FOLDER"
    if missing := setting.require("transformers", "wandb"):
        return missing
    write_json(folder / "model" / "config.json", setting.hugging_face_config())
    write_tokenizer(folder / "model", folder / "data", options.vocab_size, options.sequence_length)
    write_llama_weights(folder / "hf_model_safetensors", setting.config)
    config = {
        "distributed": {
            "tp_size": 1,
            "cp_size": 1,
            "pp_size": 1,
            "dp_size": setting.ranks,
            "pp_engine": "1f1b",
            "backend": "gloo",
            "use_cpu": True,
        },
        "model": {"name": str(folder / "model"), "use_fused_adam": True},
        "training": {
            "seed": 42,
            "learning_rate": LEARNING_RATE,
            "total_train_steps": NEVER,
            "max_tokens": None,
            "seq_length": options.sequence_length,
            "micro_batch_size": options.micro_batch_size,
            "gradient_accumulation_steps": 1,
        },
        "dataset": {"name": str(folder / "data"), "num_workers": 0, "num_proc": 1},
        "checkpoint": {
            "save_dir": str(folder / "checkpoints"),
            "save_frequency": NEVER,
            "load_path": "",
        },
        "logging": {"use_wandb": False},
        "environment": {
            # has no effect, because it is set after torch has started
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "FLASH_ATTEN": "0",
            "HF_TOKEN": "none",
        },
    }
    path = folder / "config.json"
    write_json(path, config)
    program = (str(HERE / "on_cpu.py"), str(options.picotron / "train.py"), f"--config={path}")
    words = [options.python, *TORCHRUN, f"--nproc-per-node={setting.ranks}", *program]
    variables = {"DTYPE": "float32", "PYTHONPATH": str(options.picotron)}
    return Command(words, folder, r"Step: \d+\s*\| Loss:\s*([\d.]+|nan|inf)", variables)


def trainer(setting: Setting, compiled: bool = False) -> Command | str:
    """Return Hugging Face's Trainer."""
    peft = ("peft",) if setting.options.lora_rank else ()
    if missing := setting.require("transformers", "accelerate", *peft):
        return missing
    words = setting.train_with("trainer", setting.hugging_face_config(), compiled=compiled)
    return Command(words, setting.folder, r"'loss': '?([\d.]+|nan|inf)")


def litgpt(setting: Setting) -> Command | str | None:
    """Return litgpt's pretraining, which compiles the model and uses rotary instead of learned
    positions.

    With several devices it uses FSDP, on GPUs only.
    """
    options = setting.options
    if setting.ranks > 1:
        return None
    if missing := setting.require("litgpt"):
        return missing
    config: dict[str, Any] = {
        "name": options.model,
        "block_size": options.sequence_length,
        "n_layer": options.num_layers,
        "n_embd": options.hidden_size,
        "n_head": options.num_attention_heads,
        "n_query_groups": options.head_groups,
        "vocab_size": options.vocab_size,
        "padded_vocab_size": options.vocab_size,
        "intermediate_size": options.ffn_hidden_size,
        "parallel_residual": False,
        "rotary_percentage": 1.0,
    }
    if setting.is_llama:
        config |= {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "bias": False}
    else:
        config |= {"attn_bias": True, "gelu_approximate": "tanh"}
    words = setting.train_with("litgpt", config, tied=not setting.is_llama)
    return Command(words, setting.folder, r"\| iter \d+ step \d+ \| loss train: ([\d.]+|nan|inf)")


# In table order; ours first, because every ratio is ours over theirs.
PROGRAMS: dict[str, Maker] = {
    OURS: ours,
    OURS_EXACT_GELU: functools.partial(ours, exact_gelu=True),
    f"{OURS} ZeRO-3": functools.partial(ours, zero_stage=3),
    "nanoGPT": nanogpt,
    "nanoGPT compiled": functools.partial(nanogpt, compiled=True),
    "nanoGPT helped": functools.partial(nanogpt, helped=True),
    "nanoGPT helped compiled": functools.partial(nanogpt, compiled=True, helped=True),
    "HF Trainer": trainer,
    "HF Trainer compiled": functools.partial(trainer, compiled=True),
    "litgpt": litgpt,
    "picotron": picotron,
}

WITH_ADAPTERS = (OURS, "HF Trainer")

# -- inputs
# ------------------------------------------------------------------------------------------------------------


def tokens_of_texts(vocab_size: int) -> NDArray[np.uint16]:
    """Return the project's documents and sources as tokens: bytes, or pairs of bytes for a large
    vocabulary."""
    files = sorted(
        [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("megatron_lite/**/*.py")]
    )
    written = b"\n".join(path.read_bytes() for path in files)
    text: NDArray[Any] = np.frombuffer(written, dtype=np.uint8).astype(np.uint16)
    if vocab_size >= 1 << 14:
        text = text[: len(text) // 2 * 2] & 127
        text = text[::2] * 128 + text[1::2]
    return np.remainder(text, vocab_size, dtype=np.uint16)


def write_inputs(folder: Path, vocab_size: int) -> None:
    """Write the programs' inputs: train.bin and val.bin of 16-bit tokens, meta.pkl, ours.bin and
    ours.idx."""
    tokens = tokens_of_texts(vocab_size)
    for name in ("train.bin", "val.bin"):
        (folder / name).write_bytes(tokens.astype("<u2").tobytes())
    (folder / "meta.pkl").write_text(_META.format(vocab_size))
    with IndexedDatasetWriter(str(folder / "ours"), "uint16") as writer:
        for first in range(0, len(tokens), DOCUMENT_TOKENS):
            writer.add_document(tokens[first : first + DOCUMENT_TOKENS])


def write_llama_weights(folder: Path, config: Config) -> None:
    """Write zero weights under Hugging Face's names; picotron reads their shapes and draws its own
    values."""
    zeros: dict[str, torch.Tensor] = {}
    for own_name, spec in parameter_specs(config).items():
        tensors = by_tensor(pieces(own_name, spec.shape, "llama", config.model))
        zeros |= {name: torch.zeros(parts[0].their_shape) for name, parts in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(zeros, folder / "model.safetensors")


def write_tokenizer(folder: Path, texts: Path, vocab_size: int, sequence_length: int) -> None:
    """Write a one-word-per-token tokenizer and train.jsonl in words, for programs that tokenize by
    themselves."""
    words = {f"t{token}": token for token in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    tokens = tokens_of_texts(vocab_size)
    length = 16 * sequence_length + 1  # equal for all lines, because a batch becomes one array
    texts.mkdir(parents=True, exist_ok=True)
    with (texts / "train.jsonl").open("w") as file:
        for first in range(0, len(tokens) - length + 1, length):
            text = " ".join(f"t{token}" for token in tokens[first : first + length])
            file.write(json.dumps({"text": text}) + "\n")
