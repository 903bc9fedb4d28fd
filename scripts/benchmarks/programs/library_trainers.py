"""Train with the loop of a library, Hugging Face's Trainer or litgpt's; needs that library and none
of our packages.

    python library_trainers.py trainer --config=config.json --data=train.bin --batch_size=2 --sequence_length=256
    python library_trainers.py litgpt --config=config.json --data=train.bin --batch_size=2 --sequence_length=256

config.json is a Hugging Face configuration with its model_type, or holds arguments of
litgpt.Config; train.bin holds 16-bit tokens. Loop, log and optimizer are the library's, with its
defaults except for the options below.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Samples(Dataset[dict[str, Tensor]]):
    """Consecutive samples of the token file."""

    def __init__(self, path: Path, length: int) -> None:
        self._tokens, self._length = np.memmap(path, dtype="<u2", mode="r"), length

    def __len__(self) -> int:
        return len(self._tokens) // self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        piece = self._tokens[index * self._length : (index + 1) * self._length]
        tokens = torch.from_numpy(piece.astype(np.int64))
        return {"input_ids": tokens, "labels": tokens}


def trainer(options: argparse.Namespace, folder: str) -> None:
    """Train with Hugging Face's Trainer until killed."""
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(1234)
    values = json.loads(options.config.read_text())
    config = AutoConfig.for_model(values.pop("model_type"), **values)
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
        torch_compile=options.compile,
        bf16=options.dtype == "bf16",
    )
    model = AutoModelForCausalLM.from_config(config)
    Trainer(model, arguments, train_dataset=Samples(options.data, options.sequence_length)).train()


def litgpt(options: argparse.Namespace, folder: str) -> None:
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
            samples = TensorDataset(torch.from_numpy(tokens[index]))
            return DataLoader[Any](
                samples, self._batch_size, shuffle=True, drop_last=True, collate_fn=_stack
            )

        val_dataloader = train_dataloader

    adamw = {"lr": options.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
    setup(
        model_name="",
        model_config=Config(**json.loads(options.config.read_text())),
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


def _stack(samples: list[tuple[Tensor]]) -> Tensor:
    return torch.stack([sample for (sample,) in samples])


LIBRARIES: dict[str, Callable[[argparse.Namespace, str], None]] = {
    "trainer": trainer,
    "litgpt": litgpt,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=LIBRARIES)
    for name, kind in (
        ("config", Path),
        ("data", Path),
        ("batch_size", int),
        ("sequence_length", int),
    ):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="bf16 is automatic mixed precision",
    )
    parser.add_argument("--compile", action="store_true", help="Trainer: compile the model")
    parser.add_argument("--tied", action="store_true", help="litgpt: tie the embeddings")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        LIBRARIES[options.library](options, folder)
