"""--keep_best and --early_stopping_patience: what is kept, when a run ends, and that restarts and
ranks decide alike.

The validation loss of the run falls to a minimum at iteration 10, is worse three times, and is
lower again at 20.
"""

import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from megatron_lite.checkpoint import manifest
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.train import train
from tests.support.harness import run_distributed, start_run, tiny_config
from tests.support.launch import Fault, Start, read_exit, run, succeed
from tests.support.metrics import read_metrics
from tests.support.results import assert_all_good, assert_same_run, checkpoints, saved_values
from tests.support.token_files import write_documents

BEST, END = 10, 16
MODEL = dict(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64, sequence_length=16)
RUN = (
    MODEL
    | dict(
        dataset_source="list", device="cpu", batch_size=4, lr=1e-2, lr_warmup=2, weight_decay=0.1
    )
    | dict(
        num_workers=0,
        train_iters=20,
        validation_iters=2,
        validation_interval=2,
        checkpoint_interval=3,
    )
    | dict(
        max_checkpoints=1, keep_best="validation_loss", early_stopping_patience=3, log_interval=4
    )
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A short document with noise to train on, and a longer one without, as validation data."""
    folder, generator = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    plain = np.arange(400) * 7 % 64
    noisy = np.where(generator.random(400) < 0.5, generator.integers(0, 64, 400), plain)
    write_documents(folder / "noisy", [noisy[:100]])
    write_documents(folder / "plain", [plain])
    return {"data_path": str(folder / "noisy"), "valid_data_path": str(folder / "plain")}


def flags(data: dict[str, Any], experiment: Path, *more: str) -> list[str]:
    return [f"--{name}={value}" for name, value in (RUN | data).items()] + [
        f"--experiment_dir={experiment}",
        *more,
    ]


def story(
    distributed: Distributed, root: Path, starts: Sequence[dict[str, Any]]
) -> list[tuple[str, int, list[int]]]:
    """Start runs one after the other; return how each ended, its iteration, and the checkpoints
    that are there."""
    endings = []
    for options in starts:
        config = tiny_config(
            distributed.world_size, **{**RUN, "experiment_dir": str(root), **options}
        )
        started = start_run(distributed, config)
        code, message = train(started)
        assert code == 0
        distributed.barrier()
        endings.append((message, started.iteration, checkpoints(root)))
        started.data.close()
        started.model.finish()
        started.trackers.close(0)
        started.experiment.release()
        distributed.barrier()
    return endings


def validations(experiment: Path) -> dict[int, float]:
    lines = read_metrics(experiment / "metrics.jsonl")
    return {line["iteration"]: line["loss"] for line in lines if line["phase"] == "validation"}


def decisions(experiment: Path) -> tuple[Any, ...]:
    """Return what a run decided: when it ended, its best iteration, and which checkpoints and
    exports are there."""
    folders = checkpoints(experiment)
    state = manifest.read(experiment / "checkpoints" / str(folders[-1])).state["best"]
    assert float.fromhex(state["value"]) == min(validations(experiment).values())
    exports = sorted(path.name for path in (experiment / "export").iterdir())
    return folders, state["iteration"], state["bad"], exports, read_exit(experiment)["exit_code"]


DECIDED = ([BEST, END], BEST, 3, ["best"], 0)


def validation_tokens(distributed: Distributed, root: Path, paths: dict[str, Any]) -> np.ndarray:
    """Return the (b, s + 1) tokens that a validation of the run reads."""
    started = start_run(distributed, tiny_config(**{**RUN, **paths, "experiment_dir": str(root)}))
    tokens = [
        batch.tokens.numpy() for batches in started.data.batches("validation") for batch in batches
    ]
    started.data.close()
    started.experiment.release()
    return np.concatenate(tokens)


@pytest.mark.parametrize(
    "ranks", [1, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 4))]
)
def test_the_best_is_kept_and_the_run_ends(
    ranks: int, data: dict[str, Any], tmp_path: Path
) -> None:
    """Three worse validations end the run; again it is complete; with more patience it goes on to a
    better one. The best checkpoint and its export are those of the lowest loss, which transformers
    measures, too.
    """
    paths = {name: (path,) for name, path in data.items()}
    starts = [paths, paths, {**paths, "early_stopping_patience": 5}]
    stopped, again, (complete, *last) = run_distributed(ranks, story, tmp_path, starts)[0]
    losses = validations(tmp_path)
    value = (
        f"best validation_loss: {losses[BEST]:.5f} at iteration {BEST}, 3 of 3 validations since"
    )
    message = f"stopped early at iteration {END} of 20; {value} (--early_stopping_patience)"
    assert stopped == (message, END, [BEST, END])
    message = (
        f"the run is complete: {message}; nothing to do, unless the patience grows or is left out"
    )
    assert again == (message, END, [BEST, END])
    assert min((losses[number], number) for number in losses if number <= END)[1] == BEST
    value = f"best validation_loss: {losses[20]:.5f} at iteration 20, 0 of 5 validations since"
    assert complete == f"training complete: 20 iterations; {value}" and last == [20, [20]]
    saved = saved_values(tmp_path / "checkpoints" / "20")
    embedding = next(
        values
        for name, kind, values in saved
        if (name, kind) == ("embedding.word.weight", "weights")
    )
    exported = load_file(tmp_path / "export" / "best" / "model.safetensors")[
        "transformer.wte.weight"
    ]
    assert np.array_equal(exported.ravel(), embedding.view("<f4"))
    tokens = torch.from_numpy(run_distributed(1, validation_tokens, tmp_path, paths)[0])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "export" / "best")(
            tokens[:, :-1]
        ).logits
    measured = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert measured.item() == pytest.approx(losses[20], rel=1e-6)


@pytest.fixture(scope="module")
def reference(
    data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """A run that nothing disturbs, and its changes of the disk, in order."""
    root = tmp_path_factory.mktemp("reference")
    succeed(
        flags(data, root / "run"), faults={0: Fault(0, None, str(root / "calls"), records=True)}
    )
    return root / "run", (root / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 41))]
)
def test_a_kill_changes_no_decision(
    reference: tuple[Path, list[str]], data: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    """SIGKILL at a change of the disk, by default when the best export is there but not yet its
    checkpoint; with odd seeds, checkpoints are written in the background. Bit for bit the run ends
    as if it had not been killed.
    """
    undisturbed, calls = reference
    published = [
        number
        for number, call in enumerate(calls, 1)
        if call.startswith("rename") and call.endswith("/best")
    ]
    call = random.Random(seed).randrange(1, len(calls)) if seed else published[-1] + 2
    command = flags(data, tmp_path / "run", f"--async_checkpoint={seed % 2}")
    killed = run(command, faults={0: Fault(call, None, str(tmp_path / "fired"))})
    # fewer changes in the background
    assert killed.codes in ([-signal.SIGKILL], [0]), killed.output
    succeed(command)
    assert decisions(tmp_path / "run") == decisions(undisturbed) == DECIDED
    assert_same_run(tmp_path / "run", undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_stops_and_other_numbers_of_ranks_change_no_decision(
    data: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    """SIGTERM or SIGKILL at random moments, every start on 1, 2 or 4 ranks."""
    chance, root = random.Random(seed), tmp_path / "run"
    metrics = root / "metrics.jsonl"
    for _ in range(5):
        with Start(flags(data, root), chance.choice((1, 2, 4))) as start:
            wanted = chance.randint(1, 5) + (
                len(metrics.read_bytes().splitlines()) if metrics.exists() else 0
            )
            start.wait_until(
                lambda wanted=wanted: (
                    metrics.exists() and len(metrics.read_bytes().splitlines()) >= wanted
                ),
                "new lines",
            )
            time.sleep(chance.uniform(0.0, 0.1))
            start.signal(chance.choice((signal.SIGTERM, signal.SIGKILL)))
            outcome = start.wait()
        assert set(outcome.codes) <= {0, 75, 6, 143, -signal.SIGKILL, -signal.SIGTERM}, (
            outcome.output
        )
        assert_all_good(root)
    succeed(flags(data, root), chance.choice((1, 2, 4)))
    assert decisions(root) == DECIDED
