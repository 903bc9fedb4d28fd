"""Pretrain with litgpt; needs litgpt and none of our packages.

    python litgpt_pretrain.py --config=config.json --data=train.bin --batch_size=2 --sequence_length=256

config.json holds arguments of litgpt.Config; train.bin holds 16-bit tokens. Only the data module is ours, because
litgpt's read other formats; everything else is `litgpt pretrain`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from litgpt import Config
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data import DataModule
from litgpt.pretrain import setup
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class TokenFile(DataModule):
    """Samples of a token file, each with the token after it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._batch_size, self._length = path, 1, 1

    def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None) -> None:
        """Receive the sizes from litgpt."""
        assert max_seq_length is not None
        self._batch_size, self._length = batch_size, max_seq_length

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the shuffled samples."""
        tokens = np.fromfile(self._path, dtype="<u2").astype(np.int32)
        count = (len(tokens) - 1) // self._length
        index = np.arange(count)[:, None] * self._length + np.arange(self._length + 1)
        samples = TensorDataset(torch.from_numpy(tokens[index]))
        return DataLoader[Any](samples, self._batch_size, shuffle=True, drop_last=True, collate_fn=_stack)

    val_dataloader = train_dataloader


def _stack(samples: list[tuple[Tensor]]) -> Tensor:
    return torch.stack([sample for (sample,) in samples])


def main() -> None:
    """Train until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, kind in (("config", Path), ("data", Path), ("batch_size", int), ("sequence_length", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--tied", action="store_true")
    options = parser.parse_args()
    adamw = {"lr": options.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
    with tempfile.TemporaryDirectory() as folder:
        setup(
            model_name="",
            model_config=Config(**json.loads(options.config.read_text())),
            out_dir=Path(folder),
            precision="32-true",
            data=TokenFile(options.data),
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
    main()
