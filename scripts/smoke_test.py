"""The smoke test behind smoke_test.sh: train, kill, resume, export, reload; prints one JSON line.

The test compares two runs of the same command. The first is never interrupted; the second is killed
with SIGKILL after its second checkpoint and restarted. Losses and exported weights must be
bit-identical, the loss must fall, and the export must load and predict text. Progress goes to
standard error.
"""

import argparse
import hashlib
import importlib.util
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without installation

from megatron_lite.run.exit_status import missing_package
from scripts.benchmarks.commands import private_environment
from scripts.docs.tables import ROOT

TIME_LIMIT_S = 170.0
SEQUENCE_LENGTH = 128
VOCAB_SIZE = 257  # the built-in byte tokenizer: 256 bytes and the end-of-document token
MODEL_FLAGS = (
    "--num_layers=3 --hidden_size=128 --num_attention_heads=4 --head_groups=2 --ffn_hidden_size=256"
    " --use_rotary_embeddings=1 --gated=1 --normalization_type=rms_norm --add_linear_biases=0"
)
TRAINING_FLAGS = (
    f"--batch_size=16 --sequence_length={SEQUENCE_LENGTH} --lr=3e-3 --log_interval=1 --validation_iters=4"
    f" --max_checkpoints=2 --num_workers=1 --deterministic=1 --vocab_size={VOCAB_SIZE} --split=90,10,0"
)


class Size(NamedTuple):
    """Length of the runs of a smoke test."""

    iterations: int
    checkpoint_interval: int
    warmup: int


FULL, QUICK = Size(iterations=60, checkpoint_interval=10, warmup=10), Size(30, 6, 2)


class SmokeError(Exception):
    """A failed check."""


def note(text: str) -> None:
    """Print progress."""
    print(f"smoke_test: {text}", file=sys.stderr, flush=True)


class Smoke:
    """One smoke test in a temporary folder; `report` becomes the JSON line."""

    def __init__(
        self, folder: Path, size: Size, installed: bool, device: str, flags: list[str]
    ) -> None:
        self.folder = folder
        self.size = size
        self.installed = installed
        self.device = device
        self.flags = [f"--device={device}", *flags]
        self.deadline = time.monotonic() + TIME_LIMIT_S
        self.log = folder / "log.txt"  # of all processes
        self.report: dict[str, Any] = {}

    def prepare(self) -> None:
        """Choose the device and the number of ranks; build a small corpus from the standard
        library's sources."""
        import torch

        cuda = torch.cuda.is_available() and self.device != "cpu"
        self.expect(
            cuda or self.device != "cuda",
            f"--device=cuda, but torch {torch.__version__} finds no CUDA device",
        )
        self.world_size = 1 if cuda else 2
        self.flags = [*(["--training_dtype=bf16"] if cuda else ["--zero_stage=3"]), *self.flags]
        self.report.update(
            device=torch.cuda.get_device_name() if cuda else "cpu",
            torch=torch.__version__,
            world_size=self.world_size,
        )
        corpus = self.folder / "corpus.jsonl"
        prefix = self.folder / "corpus"
        self.call(ROOT / "scripts" / "build_corpus.py", "--output", corpus, "--max_bytes", "1e6")
        words = (corpus, "--output_prefix", prefix, "--tokenizer", "byte")
        self.call(self.program("scripts/prepare_data.py"), *words)

    def program(self, path: str) -> Path:
        """Return a program of the checkout, or the command that pip installed for it."""
        return Path(sys.executable).parent / Path(path).stem if self.installed else ROOT / path

    def call(self, *command: str | Path) -> None:
        """Run a Python script to completion."""
        words, seconds = [sys.executable, *map(str, command)], self.seconds_left()
        with self.log.open("ab") as log:
            code = subprocess.call(words, cwd=self.folder, stdout=log, stderr=log, timeout=seconds)
        self.expect(code == 0, f"{Path(command[0]).name} ended with exit code {code}")

    def train(self, experiment: str, what: str, kill_after: int = 0) -> None:
        """Run all ranks without torchrun, so that this process can kill each of them.

        kill_after: kill the ranks with SIGKILL after this iteration.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        iterations, interval, warmup = self.size
        lengths = (
            f"--train_iters={iterations} --lr_warmup_iters={warmup} --checkpoint_interval={interval}"
            f" --validation_interval={iterations // 2} --export_interval={iterations}"
        )
        command = [
            sys.executable,
            str(self.program("pretrain_gpt.py")),
            *f"{MODEL_FLAGS} {TRAINING_FLAGS} {lengths}".split(),
            f"--data_path={self.folder / 'corpus'}",
            f"--tokenizer_file={self.folder / 'corpus.tokenizer.json'}",
            f"--experiment_dir={self.folder / experiment}",
            *self.flags,
        ]
        size = str(self.world_size)
        job = os.environ | {
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        ranks = []
        with self.log.open("ab") as log:
            for number in range(self.world_size):
                place = job | {"RANK": str(number), "LOCAL_RANK": str(number)}
                ranks.append(
                    subprocess.Popen(command, env=place, cwd=self.folder, stdout=log, stderr=log)
                )
        try:
            while max(self.losses(experiment), default=0) < kill_after:
                codes = [rank.poll() for rank in ranks]
                self.expect(
                    codes == [None] * len(ranks),
                    f"{what} ended before it was killed, exit codes {codes}",
                )
                self.expect(
                    self.seconds_left() > 1, f"iteration {kill_after} was not reached in time"
                )
                time.sleep(0.002)
            for rank in () if kill_after else ranks:
                rank.wait(self.seconds_left())
        finally:
            for rank in ranks:
                rank.kill()
            codes = [rank.wait() for rank in ranks]
        expected = -signal.SIGKILL if kill_after else 0
        self.expect(
            set(codes) == {expected}, f"{what} ended with exit codes {codes}, expected {expected}"
        )

    def losses(self, experiment: str, phase: str = "training") -> dict[int, float]:
        """Return the losses of a run by iteration."""
        return {
            record["iteration"]: record["loss"]
            for record in self.metrics(experiment)
            if record["phase"] == phase
        }

    def metrics(self, experiment: str) -> list[dict[str, Any]]:
        """Return the records of a run, the last one of each iteration and phase."""
        path = self.folder / experiment / "metrics.jsonl"
        records = map(json.loads, path.read_bytes().split(b"\n")[:-1]) if path.exists() else ()
        return list({(record["phase"], record["iteration"]): record for record in records}.values())

    def train_and_resume(self) -> None:
        """Train without interruption, train and kill, resume, and compare."""
        first, last = self.size.checkpoint_interval, self.size.iterations
        self.train("whole", "the uninterrupted run")
        # Past the second checkpoint, so some iterations are repeated.
        self.train("killed", "the killed run", kill_after=2 * first + 3)
        before = {record["run"] for record in self.metrics("killed")}
        self.report["killed_at_iteration"] = max(self.losses("killed"))
        self.train("killed", "the resumed run")
        training = [record for record in self.metrics("killed") if record["phase"] == "training"]
        resumed = [record["iteration"] for record in training if record["run"] not in before]
        self.expect(bool(resumed), "the resumed run wrote no metrics")
        self.report["resumed_after_iteration"] = min(resumed) - 1
        self.expect(
            first < min(resumed), f"the resumed run started over, at iteration {min(resumed)}"
        )
        whole, killed = self.losses("whole"), self.losses("killed")
        self.expect(len(whole) == last, f"{len(whole)} losses logged, expected {last}")
        different = [iteration for iteration in whole if whole[iteration] != killed.get(iteration)]
        self.expect(
            not different, f"the losses of the resumed run differ from iteration {different[:1]} on"
        )
        self.expect(
            weights_hash(self.export("whole")) == weights_hash(self.export("killed")),
            "the exported weights of the resumed run differ from those of the uninterrupted run",
        )
        self.report.update(
            resume_bit_identical=True,
            first_loss=whole[1],
            last_loss=whole[last],
            validation_loss=self.losses("whole", "validation")[last],
        )
        self.expect(
            whole[last] < whole[1] - 1, f"the loss only fell from {whole[1]} to {whole[last]}"
        )

    def export(self, experiment: str) -> Path:
        """Return the folder of a run's last export."""
        folder = self.folder / experiment / "export" / str(self.size.iterations)
        self.expect((folder / "config.json").is_file(), f"no export at {folder}")
        return folder

    def reload(self) -> None:
        """Load the export with transformers and check its loss; without transformers, check its
        weights."""
        export = self.export("killed")
        if importlib.util.find_spec("transformers") is None:
            self.report.update(reloaded_by="safetensors", parameters=finite_parameters(export))
            return
        loss, parameters = transformers_loss(export, self.folder / "corpus.jsonl")
        self.report.update(reloaded_by="transformers", parameters=parameters, reloaded_loss=loss)
        self.expect(
            loss < math.log(VOCAB_SIZE) - 1,
            f"the reloaded model has loss {loss}, no better than guessing",
        )

    def expect(self, fact: bool, otherwise: str) -> None:
        """Stop with `otherwise` unless `fact` holds."""
        if not fact:
            raise SmokeError(otherwise)

    def seconds_left(self) -> float:
        """Return the seconds until the time limit, at least 0.1, so that a wait ends by its own
        timeout."""
        return max(self.deadline - time.monotonic(), 0.1)


def weights_hash(export: Path) -> str:
    """Return the SHA-256 of all weight files of an export."""
    digest = hashlib.sha256()
    for path in sorted(export.glob("*.safetensors")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def finite_parameters(export: Path) -> int:
    """Return the number of exported parameters; all must be finite."""
    from safetensors.torch import load_file

    tensors = [
        tensor for path in export.glob("*.safetensors") for tensor in load_file(path).values()
    ]
    if not tensors or not all(bool(tensor.isfinite().all()) for tensor in tensors):
        raise SmokeError(f"the weights in {export} are missing or not finite")
    return sum(tensor.numel() for tensor in tensors)


def transformers_loss(export: Path, corpus: Path) -> tuple[float, int]:
    """Return the exported model's loss on the first document, in nats per token, and its number of
    parameters."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(export).float()
    with corpus.open(encoding="utf-8") as file:
        text = json.loads(file.readline())["text"]
    # A byte is its own token id; (8, s) with the training length.
    tokens = torch.tensor(list(text.encode()[: 8 * SEQUENCE_LENGTH])).view(8, SEQUENCE_LENGTH)
    with torch.no_grad():
        loss = model(tokens, labels=tokens).loss
    return float(loss), sum(parameter.numel() for parameter in model.parameters())


def main() -> int:
    """Run all steps in a temporary folder; return 0 if every check passed."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="smoke_test.sh",
        usage="%(prog)s [--quick] [--installed] [--device=DEVICE] [flags of pretrain_gpt.py]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="fewer iterations")
    parser.add_argument("--installed", action="store_true", help="run the installed commands")
    parser.add_argument(
        "--device", default="auto", help="as in pretrain_gpt.py, which also gets all other flags"
    )
    options, flags = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(prefix="megatron_lite_smoke_"))
    pythonpath = "" if options.installed else str(ROOT)
    environment = private_environment(folder, pythonpath, OMP_NUM_THREADS="1", HOME=str(folder))
    os.environ.update(environment)  # before this process imports torch
    smoke = Smoke(
        folder, QUICK if options.quick else FULL, options.installed, options.device, flags
    )
    steps: dict[str, Callable[[], None]] = {
        "prepare": smoke.prepare,
        "train, kill, resume, export": smoke.train_and_resume,
        "reload": smoke.reload,
    }
    result: dict[str, Any] = {"ok": True}
    try:
        for name, step in steps.items():
            note(name)
            result["failed"] = name
            step()
        del result["failed"]
    except Exception as error:
        said = error if isinstance(error, SmokeError) else missing_package(error)
        result.update(ok=False, reason=str(said or f"{type(error).__name__}: {error}"))
        if smoke.log.exists():
            tail = smoke.log.read_text("utf-8", errors="replace").splitlines()[-40:]
            note("the last lines of the log:\n" + "\n".join(tail))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({**result, **smoke.report, "seconds": round(time.monotonic() - started, 1)}))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
