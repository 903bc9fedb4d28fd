"""The smoke test behind smoke_test.sh: train, kill, resume, export, reload; prints one JSON line.

Two runs of the same command are compared: one is left alone, one is killed with SIGKILL after its second checkpoint and
started again. Their losses and exported weights must agree bit for bit; the export must load and predict text. Progress
goes to standard error.
"""

import hashlib
import importlib.util
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TIME_LIMIT_S = 170.0
TRAIN_ITERS = 60
CHECKPOINT_INTERVAL = 10
KILL_AFTER = 2 * CHECKPOINT_INTERVAL + 3  # iterations, so that some are lost and done again
SEQUENCE_LENGTH = 128
VOCAB_SIZE = 257  # the built-in byte tokenizer: 256 bytes and the end of a document
MODEL_FLAGS = (
    "--num_layers=3 --hidden_size=128 --num_attention_heads=4 --head_groups=2 --ffn_hidden_size=256"
    " --use_rotary_embeddings=1 --gated=1 --normalization_type=rms_norm --add_linear_biases=0"
)
TRAINING_FLAGS = (
    f"--batch_size=16 --sequence_length={SEQUENCE_LENGTH} --train_iters={TRAIN_ITERS} --lr=3e-3 --lr_warmup_iters=10"
    f" --log_interval=1 --validation_interval=30 --validation_iters=4 --checkpoint_interval={CHECKPOINT_INTERVAL}"
    f" --max_checkpoints=2 --export_interval={TRAIN_ITERS} --num_workers=1 --deterministic=1"
)


class SmokeError(Exception):
    """A check that failed: what was expected and what was found."""


def note(text: str) -> None:
    """Progress, for people who watch."""
    print(f"smoke_test: {text}", file=sys.stderr, flush=True)


class Smoke:
    """One smoke test in one temporary folder; `report` becomes the JSON line."""

    def __init__(self, folder: Path, extra_flags: list[str]) -> None:
        self.folder = folder
        self.extra_flags = extra_flags
        self.deadline = time.monotonic() + TIME_LIMIT_S
        self.report: dict[str, Any] = {}

    def prepare(self) -> None:
        """Choose device and ranks; make a small corpus out of the standard library's sources."""
        import torch

        wanted = device_flag(self.extra_flags)
        cuda = torch.cuda.is_available() and wanted != "cpu"
        self.expect(cuda or wanted != "cuda", f"--device=cuda, but torch {torch.__version__} finds no CUDA device")
        self.world_size = 1 if cuda else 2
        self.device_flags = ["--training_dtype=bf16"] if cuda else ["--zero_stage=3"]
        self.report.update(
            device=torch.cuda.get_device_name() if cuda else "cpu", torch=torch.__version__, world_size=self.world_size
        )
        corpus = self.folder / "corpus.jsonl"
        prefix = self.folder / "corpus"
        self.call(ROOT / "scripts" / "build_corpus.py", "--output", corpus, "--max_bytes", "1e6")
        self.call(ROOT / "scripts" / "prepare_data.py", corpus, "--output_prefix", prefix, "--tokenizer", "byte")

    def call(self, *command: str | Path) -> None:
        """Run one Python script to its end."""
        with self.log() as log:
            code = subprocess.call(
                [sys.executable, *map(str, command)],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                timeout=self.seconds_left(),
            )
        self.expect(code == 0, f"{Path(command[0]).name} ended with exit code {code}")

    def start(self, experiment: str) -> list[subprocess.Popen[bytes]]:
        """Start every rank of a training run, as torchrun would, but such that each process is ours to kill."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *MODEL_FLAGS.split(), *TRAINING_FLAGS.split()]
        command += [f"--vocab_size={VOCAB_SIZE}", f"--data_path={self.folder / 'corpus'}", "--split=90,10,0"]
        command += [f"--tokenizer_file={self.folder / 'corpus.tokenizer.json'}"]
        command += [f"--experiment_dir={self.folder / experiment}", *self.device_flags, *self.extra_flags]
        size = str(self.world_size)
        job = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with self.log() as log:
            return [
                subprocess.Popen(
                    command,
                    env=os.environ | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    cwd=self.folder,
                    stdout=log,
                    stderr=log,
                )
                for rank in range(self.world_size)
            ]

    def wait(self, processes: list[subprocess.Popen[bytes]], what: str) -> None:
        """Wait until every rank has ended well; end all of them otherwise."""
        try:
            codes = [process.wait(self.seconds_left()) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        self.expect(not any(codes), f"{what} ended with exit codes {codes}")

    def kill_while_training(self, experiment: str) -> None:
        """Start a run and kill every rank with SIGKILL a few iterations after its second checkpoint."""
        processes = self.start(experiment)
        metrics = self.folder / experiment / "metrics.jsonl"
        try:
            while not metrics.exists() or max(self.losses(experiment), default=0) < KILL_AFTER:
                codes = [process.poll() for process in processes]
                self.expect(codes == [None] * len(codes), f"the run to be killed ended first, with exit codes {codes}")
                self.expect(self.seconds_left() > 1, f"iteration {KILL_AFTER} was not reached in time")
                time.sleep(0.002)
        finally:
            for process in processes:
                process.kill()
            codes = [process.wait() for process in processes]
        self.expect(all(code == -9 for code in codes), f"the run ended before it could be killed: exit codes {codes}")

    def losses(self, experiment: str, phase: str = "training") -> dict[int, float]:
        """{iteration: loss} of a run; a later line replaces an earlier one."""
        return {record["iteration"]: record["loss"] for record in self.metrics(experiment) if record["phase"] == phase}

    def metrics(self, experiment: str) -> Iterator[dict[str, Any]]:
        """Every complete line of a run's metrics.jsonl."""
        for line in (self.folder / experiment / "metrics.jsonl").read_text("utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # the line that was being written when the run was killed
                continue

    def train_and_resume(self) -> None:
        """The uninterrupted run, the killed run, its resumption, and their comparison."""
        self.wait(self.start("whole"), "the uninterrupted run")
        self.kill_while_training("killed")
        before = {record["run"] for record in self.metrics("killed")}
        self.report["killed_at_iteration"] = max(self.losses("killed"))
        self.wait(self.start("killed"), "the resumed run")
        training = [record for record in self.metrics("killed") if record["phase"] == "training"]
        resumed = [record["iteration"] for record in training if record["run"] not in before]
        self.expect(bool(resumed), "the resumed run wrote no metrics")
        self.report["resumed_after_iteration"] = min(resumed) - 1
        self.expect(CHECKPOINT_INTERVAL < min(resumed), f"the resumed run started over, at iteration {min(resumed)}")
        whole, killed = self.losses("whole"), self.losses("killed")
        self.expect(len(whole) == TRAIN_ITERS, f"{len(whole)} losses logged, expected {TRAIN_ITERS}")
        different = [iteration for iteration in whole if whole[iteration] != killed.get(iteration)]
        self.expect(not different, f"losses of the resumed run differ from iteration {different[:1]} on")
        self.expect(
            weights_hash(self.export("whole")) == weights_hash(self.export("killed")),
            "the exported weights of the resumed run differ from those of the uninterrupted one",
        )
        self.report.update(
            resume_bit_identical=True,
            first_loss=whole[1],
            last_loss=whole[TRAIN_ITERS],
            validation_loss=self.losses("whole", "validation")[TRAIN_ITERS],
        )
        self.expect(whole[TRAIN_ITERS] < whole[1] - 1, f"the loss only went from {whole[1]} to {whole[TRAIN_ITERS]}")

    def export(self, experiment: str) -> Path:
        """The folder of a run's last export."""
        folder = self.folder / experiment / "export" / str(TRAIN_ITERS)
        self.expect((folder / "config.json").is_file(), f"no export at {folder}")
        return folder

    def reload(self) -> None:
        """Load the export with transformers, else check its files alone, and see that it has learnt something."""
        export = self.export("killed")
        if importlib.util.find_spec("transformers") is None:
            self.report.update(reloaded_by="safetensors", parameters=finite_parameters(export))
            return
        loss, parameters = transformers_loss(export, self.folder / "corpus.jsonl")
        self.report.update(reloaded_by="transformers", parameters=parameters, reloaded_loss=loss)
        self.expect(loss < math.log(VOCAB_SIZE) - 1, f"the reloaded model's loss is {loss}, no better than guessing")

    def expect(self, fact: bool, otherwise: str) -> None:
        """Stop with `otherwise` unless `fact` holds."""
        if not fact:
            raise SmokeError(otherwise)

    def seconds_left(self) -> float:
        """Until the time limit; at least a little, so that a wait ends by its own time-out."""
        return max(self.deadline - time.monotonic(), 0.1)

    @contextmanager
    def log(self) -> Iterator[Any]:
        """The file that takes the output of everything that is started."""
        with (self.folder / "log.txt").open("ab") as file:
            yield file


def private_environment(folder: Path) -> dict[str, str]:
    """Environment variables that keep every library offline and its files inside `folder`."""
    caches = ("HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")
    return {
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "HOME": str(folder),
        "TMPDIR": str(folder),
    } | {name: str(folder / "cache") for name in caches}


def device_flag(flags: list[str]) -> str:
    """The value of --device among flags of pretrain_gpt.py, the last one if repeated."""
    device = "auto"
    for index, flag in enumerate(flags):
        if flag.startswith("--device="):
            device = flag.partition("=")[2]
        elif flag == "--device" and index + 1 < len(flags):
            device = flags[index + 1]
    return device


def weights_hash(export: Path) -> str:
    """SHA-256 over all weight files of an export."""
    digest = hashlib.sha256()
    for path in sorted(export.glob("*.safetensors")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def finite_parameters(export: Path) -> int:
    """Number of exported parameters, all of which must be finite."""
    from safetensors.torch import load_file

    tensors = [tensor for path in export.glob("*.safetensors") for tensor in load_file(path).values()]
    if not tensors or not all(bool(tensor.isfinite().all()) for tensor in tensors):
        raise SmokeError(f"the weights in {export} are missing or not finite")
    return sum(tensor.numel() for tensor in tensors)


def transformers_loss(export: Path, corpus: Path) -> tuple[float, int]:
    """Loss in nats per token of the exported model on the first document, and its number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(export).float()
    with corpus.open(encoding="utf-8") as file:
        text = json.loads(file.readline())["text"]
    # A byte is its own token id; (8, s), no longer than what the model was trained on.
    tokens = torch.tensor(list(text.encode()[: 8 * SEQUENCE_LENGTH])).view(8, SEQUENCE_LENGTH)
    with torch.no_grad():
        loss = model(tokens, labels=tokens).loss
    return float(loss), sum(parameter.numel() for parameter in model.parameters())


def main() -> int:
    """Run all steps in a temporary folder; exit code 0 if every check held."""
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="megatron_lite_smoke_"))
    os.environ.update(private_environment(folder))  # for this process too, before it imports torch
    smoke = Smoke(folder, sys.argv[1:])
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
        reason = str(error) if isinstance(error, SmokeError) else f"{type(error).__name__}: {error}"
        result.update(ok=False, reason=reason)
        if (folder / "log.txt").exists():
            tail = (folder / "log.txt").read_text("utf-8", errors="replace").splitlines()[-40:]
            note("the last lines of its log:\n" + "\n".join(tail))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({**result, **smoke.report, "seconds": round(time.monotonic() - started, 1)}))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
