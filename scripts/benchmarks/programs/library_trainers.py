"""Train with the loop of a library, Hugging Face's Trainer or litgpt's; needs that library and none
of our packages.

    python library_trainers.py options.json

The options, which `contestants` writes, name the `library` and its `config`: a Hugging Face
configuration with its model_type, or arguments of litgpt.Config. `data` is a file of 16-bit tokens.
Loop, log and optimizer are the library's, with its defaults except for the options below.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset[dict[str, Tensor]]):
    """Consecutive samples of the token file."""

    def __init__(self, path: str, length: int) -> None:
        self._tokens, self._length = np.memmap(path, dtype="<u2", mode="r"), length

    def __len__(self) -> int:
        return len(self._tokens) // self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        piece = self._tokens[index * self._length : (index + 1) * self._length]
        tokens = torch.from_numpy(piece.astype(np.int64))
        return {"input_ids": tokens, "labels": tokens}


def trainer(options: SimpleNamespace, folder: str) -> None:
    """Train with Hugging Face's Trainer until killed."""
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(1234)
    config = AutoConfig.for_model(options.config.pop("model_type"), **options.config)
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=10**6,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        torch_compile=options.compiled,
        bf16=options.dtype == "bf16",
    )
    model = AutoModelForCausalLM.from_config(config)
    if options.lora_rank:
        from peft import LoraConfig, get_peft_model

        rank = options.lora_rank
        adapters = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear")
        model = get_peft_model(model, adapters)
    Trainer(model, arguments, train_dataset=Samples(options.data, options.sequence_length)).train()


def litgpt(options: SimpleNamespace, folder: str) -> None:
    """Run `litgpt pretrain` until killed. Only the data module is ours, because litgpt's read other
    formats."""
    from litgpt import Config
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.data import DataModule
    from litgpt.pretrain import setup

    class TokenFile(DataModule):
        """Samples of a token file, each with the token after it."""

        def connect(
            self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None
        ) -> None:
            """Receive the sizes from litgpt."""
            assert max_seq_length is not None
            self._batch_size, self._length = batch_size, max_seq_length

        def train_dataloader(self) -> DataLoader[Any]:
            """Return the shuffled samples."""
            tokens = np.fromfile(options.data, dtype="<u2").astype(np.int32)
            count = (len(tokens) - 1) // self._length
            index = np.arange(count)[:, None] * self._length + np.arange(self._length + 1)
            samples: Any = torch.from_numpy(tokens[index])
            return DataLoader[Any](samples, self._batch_size, shuffle=True, drop_last=True)

        val_dataloader = train_dataloader

    adamw = {"lr": options.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
    setup(
        model_name="",
        model_config=Config(**options.config),
        out_dir=Path(folder),
        precision="bf16-mixed" if options.dtype == "bf16" else "32-true",
        data=TokenFile(),
        train=TrainArgs(
            save_interval=None,
            log_interval=1,
            global_batch_size=options.batch_size,
            micro_batch_size=options.batch_size,
            lr_warmup_steps=0,
            max_tokens=10**12,
            max_norm=1.0,
            min_lr=options.lr,
            max_seq_length=options.sequence_length,
            tie_embeddings=options.tied,
        ),
        eval=EvalArgs(interval=10**9, max_iters=1),
        optimizer={"class_path": "torch.optim.AdamW", "init_args": adamw},
        devices=1,
        logger_name="csv",
    )


if __name__ == "__main__":
    options = SimpleNamespace(**json.loads(Path(sys.argv[1]).read_text()))
    train = {"trainer": trainer, "litgpt": litgpt}[options.library]
    with tempfile.TemporaryDirectory() as folder:
        train(options, folder)
