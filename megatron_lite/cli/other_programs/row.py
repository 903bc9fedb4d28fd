"""One row of a table of another program's flags, and the reasons that several tables share."""

from __future__ import annotations

import re
from typing import NamedTuple

from megatron_lite.config.foreign_values import refused_value
from megatron_lite.config.values import SPELLINGS, BadValueError, is_legal, number, parse_float


class Row(NamedTuple):
    """One or more flags of another program that have the same answer.

    `names`: separated by spaces. A dot keeps the part of a path without which the name says too little (`tracker.name`
    of `trainer.tracker.name`); `warmup:steps` is one case of the option `warmup`; `moe_*` is every unknown name that
    begins so.
    """

    names: str
    here: str = ""  # what to write instead; empty if there is nothing, or if the flag exists here under this name
    remark: str = ""  # the reason if there is nothing to write
    only: str = ""  # values that are accepted, because they describe what this program does anyway
    switch: bool = False  # takes 0 and 1; bare means 1

    def accepts(self, value: str) -> bool:
        """Whether `value`, as typed, is one of `only`: 1, 1.0 and true are the same, and so are .5 and 0.5."""
        return _plain(value) in {_plain(accepted) for accepted in self.only.split()}

    @property
    def answer(self) -> str:
        """The answer when the flag is typed without a value."""
        if not self.here:
            return self.remark
        return f"write {self.here} ({self.remark})" if self.remark else f"write {self.here}"

    def answer_to(self, value: str | None) -> str:
        """The answer when the flag is typed with this value, which a flag of the same meaning takes over."""
        if value and value.lower() == "false" and self.here.removeprefix("--") not in SPELLINGS:
            return f"for {value} leave it out; else {self.answer}"
        name, same = self.here.removeprefix("--"), TOKENIZED not in self.remark  # else the value names raw text
        if not value or name not in SPELLINGS or not same or not re.fullmatch(r"[\w./:~+-]{1,60}", value, re.ASCII):
            return self.answer
        if not is_legal(SPELLINGS[name], value) or refused_value(SPELLINGS[name].name, value):
            return self.answer
        return self._replace(here=f"{self.here}={value}").answer

    def refusal(self, name: str) -> str:
        """The answer to a value of the flag `name` that is not accepted."""
        accepted = " or ".join(f"--{name}={value}" for value in self.only.split())
        return f"{self.remark}; accepted: {accepted}, which changes nothing"


def switch(names: str, only: str, remark: str) -> Row:
    """Return the row of flags that take 0 or 1, only one of which is accepted."""
    return Row(names, remark=remark, only=only, switch=True)


def _plain(value: str) -> str:
    value = {"true": "1", "false": "0", "": "none", "[]": "none", "{}": "none"}.get(value.lower(), value.lower())
    try:
        return number(parse_float(value))
    except BadValueError:
        return value


PARALLEL = (
    "only data and tensor parallelism are supported so far: --zero_stage=3 shards the whole model over all ranks, "
    "--tensor_parallel=<N> splits each layer over N of them"
)
TORCHRUN = "torchrun sets it, by its options nproc-per-node and nnodes; --dry_run=1 --world_size=<N> plans for N ranks"
COMPILE = (
    "torch.compile is not used: it cannot compile the hand-fused autograd functions as a whole; "
    "--enable_triton_kernels=1 fuses operations on a GPU"
)
PROFILE = "--profile_cpu=1 or --profile_cuda=1"
EXPERTS = "mixture of experts is not supported yet; --ffn_hidden_size and --gated set the dense MLP"
RECOMPUTE = (
    "--recompute_layers=<N> for the first N blocks, or --mlp_recompute_level=activation or =full for all MLPs, or "
    "--mlp_recompute_level=none,full:<N> for the first N MLPs"
)
TOKENIZED = "scripts/prepare_data.py makes the files of --data_path from text"
TENSORBOARD = "TensorBoard gets every number of metrics.jsonl"
PRETRAINED = "--pretrained_checkpoint_path=<folder of a checkpoint>"
RUN_FOLDER = "--experiment_dir=<folder>"
WANDB = "turns Weights & Biases on; metrics.jsonl is always written"
DTYPE = "--training_dtype=bf16 trains in bf16"
SHARDING = "--zero_stage=1, 2 or 3 chooses what is sharded, and memory is reserved once"
FP8 = "8-bit training is not supported yet; write --training_dtype=bf16"
ADAPTERS = "adapters are not supported; --freeze=<patterns> freezes weights"
