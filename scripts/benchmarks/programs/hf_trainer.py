"""Train with Hugging Face's Trainer; needs transformers and none of our packages.

    python hf_trainer.py --config=config.json --data=train.bin --batch_size=2 --sequence_length=256 [--compile]

config.json is a Hugging Face configuration with its model_type; train.bin holds 16-bit tokens. The loop, the log and
the optimizer are Trainer's, with its defaults except for the options below.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments


class Samples(Dataset[dict[str, torch.Tensor]]):
    """Consecutive samples of the token file."""

    def __init__(self, path: Path, length: int) -> None:
        self._tokens, self._length = np.memmap(path, dtype="<u2", mode="r"), length

    def __len__(self) -> int:
        return len(self._tokens) // self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self._tokens[index * self._length : (index + 1) * self._length]
        tokens = torch.from_numpy(piece.astype(np.int64))
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Train until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, kind in (("config", Path), ("data", Path), ("batch_size", int), ("sequence_length", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--deepspeed", type=Path, help="a DeepSpeed configuration")
    options = parser.parse_args()
    torch.manual_seed(1234)
    values = json.loads(options.config.read_text())
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with tempfile.TemporaryDirectory() as folder:
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
            optim="adamw_torch" if options.deepspeed else "adamw_torch_fused",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            torch_compile=options.compile,
            deepspeed=options.deepspeed and str(options.deepspeed),
        )
        model = AutoModelForCausalLM.from_config(config)
        Trainer(model, arguments, train_dataset=Samples(options.data, options.sequence_length)).train()


if __name__ == "__main__":
    main()
