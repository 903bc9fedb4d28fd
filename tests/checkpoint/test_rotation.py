"""Readers of a live run: at whatever call it rotates, they get one whole checkpoint, and damage
stays damage."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.checkpoint.names import find_checkpoints
from megatron_lite.checkpoint.rotation import ATTEMPTS, again
from megatron_lite.cli.model_source import with_source
from megatron_lite.commands import convert_checkpoint, evaluate, generate, verify_checkpoint
from megatron_lite.config import unflatten
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import CheckpointError, RotatedError
from megatron_lite.generation.model import load_model
from megatron_lite.validation import resolve
from tests.checkpoint.test_damage import flip, seal
from tests.support.harness import full_weights, run_distributed, start_run, tiny_config, train_whole
from tests.support.launch import TINY, Start
from tests.support.live_run import LiveRun
from tests.support.token_files import save_byte_tokenizer

MODEL: dict[str, Any] = dict(
    vocab_size=257, sequence_length=16, max_position_embeddings=16, num_layers=2
)
MODEL |= dict(hidden_size=32, num_attention_heads=4)
RUN = MODEL | dict(
    train_iters=3, checkpoint_interval=1, lr=1e-2, lr_warmup=0, dataset_source="random"
)
Weights = dict[str, np.ndarray]


def save_some(distributed: Distributed, folder: str) -> None:
    """Two runs: three checkpoints, and twins of them with other weights."""
    for seed, name in ((1, "made"), (2, "twins")):
        options = {
            "experiment_dir": f"{folder}/{name}",
            "tokenizer_file": f"{folder}/tokenizer.json",
            "seed": seed,
        }
        train_whole(distributed, tiny_config(distributed.world_size, **RUN, **options))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two ranks; no two have the same weights."""
    folder = tmp_path_factory.mktemp("pool")
    save_byte_tokenizer(folder / "tokenizer.json")
    run_distributed(2, save_some, str(folder))
    return folder


@pytest.fixture(params=["rotated", pytest.param("replaced", marks=pytest.mark.slow)])
def checkpoints(request: pytest.FixtureRequest, made: Path) -> list[Path]:
    """What a live run saves one after the other: the next iterations, or the same one again."""
    return saved(request.param, made)


def saved(kind: str, made: Path) -> list[Path]:
    if kind == "rotated":
        return [made / "made" / "checkpoints" / name for name in "123"]
    return [made / name / "checkpoints" / "2" for name in ("made", "twins")]


def weights_of(folder: Path) -> Weights:
    model = load_model(folder, None, "fp32", torch.device("cpu"))
    found: list[Any] = [parameter for layer in model.layers for parameter in layer.parameters()]
    return {parameter.spec.name: parameter.data.numpy() for parameter in found}


def same(left: Weights, right: Weights) -> bool:
    return left.keys() == right.keys() and all(
        np.array_equal(value, right[name]) for name, value in left.items()
    )


def at_every_call(
    tmp_path: Path,
    checkpoints: Sequence[Path],
    read: Callable[[LiveRun], Any],
    every: int = 1,
    permanent: Path | None = None,
) -> Iterator[tuple[LiveRun, Any]]:
    """Yield a live run and what `read` returned, with a rotation before each call of the reader,
    one at a time."""
    for number in range(1, 1000, every):
        live = LiveRun(tmp_path / str(number), checkpoints, permanent)
        with live.rotating(lambda count, number=number: count == number) as calls:
            found = read(live)
        yield live, found
        if len(calls) < number:
            assert number > 1, "a reader reads something"
            return
    raise AssertionError("the reader does not end")


@pytest.mark.parametrize("kind", ["rotated", "replaced"])
def test_weights_are_those_of_one_checkpoint(kind: str, tmp_path: Path, made: Path) -> None:
    """Never some tensors of one and others of another, also where the second has the name and sizes
    of the first."""
    checkpoints = saved(kind, made)
    wanted, seen = [weights_of(folder) for folder in checkpoints], set[int]()
    for _, found in at_every_call(
        tmp_path, checkpoints, lambda live: again(lambda: weights_of(live.root))
    ):
        (which,) = (number for number, weights in enumerate(wanted) if same(found, weights))
        seen.add(which)
    assert seen == {0, 1}, "read before the rotation, and after it"


def printed(code: int, capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert "skipped" not in captured.err
    return captured.out


def test_generate(
    tmp_path: Path, checkpoints: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokenizer and weights are found, and the text is that of one of the checkpoints."""
    options = ["--prompt=ab", "--max_new_tokens=8", "--temperature=0", "--model"]

    def read(live: LiveRun) -> str:
        return printed(generate.main([*options, str(live.root)]), capsys)

    texts = [printed(generate.main([*options, str(folder)]), capsys) for folder in checkpoints[:2]]
    for _, found in at_every_call(tmp_path, checkpoints, read, every=5):
        assert found in texts


def test_evaluate(
    tmp_path: Path, checkpoints: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss is that of one of the checkpoints."""
    (text := tmp_path / "text.txt").write_text("the cats sat on the mats")

    def loss(folder: Path) -> float:
        line = printed(
            evaluate.main(["--text", str(text), "--json", "--model", str(folder)]), capsys
        )
        value: float = json.loads(line)["loss"]
        return value

    losses = {loss(folder) for folder in checkpoints[:2]}
    assert len(losses) == 2
    for _, found in at_every_call(tmp_path, checkpoints, lambda live: loss(live.root), every=5):
        assert found in losses


def test_convert(
    tmp_path: Path, checkpoints: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole of one checkpoint, moments too; nothing half-written stays."""

    def read(live: LiveRun) -> Path:
        target = live.root / "converted"
        code = convert_checkpoint.main(
            [f"--from={live.root}", f"--to={target}", "--format=distributed"]
        )
        printed(code, capsys)
        return target

    wanted = [weights_of(folder) for folder in checkpoints]
    for live, found in at_every_call(tmp_path, checkpoints, read, every=7):
        assert any(same(weights_of(found), weights) for weights in wanted)
        assert {path.name for path in live.root.iterdir()} == {
            "checkpoints",
            "converted",
            "metrics.jsonl",
        }


def test_verify(
    tmp_path: Path, checkpoints: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Only checkpoints that are still there are in the table, and all are good."""

    def read(live: LiveRun) -> str:
        return printed(verify_checkpoint.main([str(live.root)]), capsys)

    for _, table in at_every_call(tmp_path, checkpoints, read):
        assert "yes" in table and "NO" not in table


def start(
    distributed: Distributed, given: dict[str, Any], between: Callable[[], None] = lambda: None
) -> Weights:
    """Read the command line and build the run; return its weights."""
    values, _ = with_source(
        {"device": "cpu", "num_workers": 0, "batch_size": 4, "train_iters": 5, **given}
    )
    between()
    run = start_run(distributed, resolve(unflatten(values), distributed.world_size))
    found = full_weights(run.model)
    run.data.close()
    run.model.finish()
    run.trackers.close(0)
    return found


def started(
    distributed: Distributed,
    folder: str,
    checkpoints: list[Path],
    flag: str,
    given: dict[str, Any],
    every: int,
) -> list[Weights]:
    """The weights of starts from a live run that rotates at a call of the last rank."""
    rank, found = distributed.rank, list[Weights]()
    last = rank == distributed.world_size - 1
    for number in range(1, 1000, every):
        root = Path(folder, str(number))
        live = LiveRun(root, checkpoints) if last else None
        distributed.barrier()
        options = given | {flag: str(root)}
        if live is None:
            found.append(start(distributed, options))
            ended = False
        else:
            with live.rotating(lambda count, number=number: count == number) as calls:
                found.append(start(distributed, options))
            ended = len(calls) < number
        if distributed.agree_max(int(ended)):
            return found
    raise AssertionError("the start does not end")


@pytest.mark.parametrize("flag", ["pretrained_checkpoint_path", "load_checkpoint_path"])
@pytest.mark.parametrize(
    ("ranks", "every"),
    [
        (2, 12),
        pytest.param(1, 1, marks=pytest.mark.slow),
        pytest.param(2, 1, marks=pytest.mark.slow),
    ],
)
def test_starts(flag: str, ranks: int, every: int, tmp_path: Path, checkpoints: list[Path]) -> None:
    """Each rank has the weights of the same checkpoint, from the command line to the last shard."""
    given: dict[str, Any] = (
        dict(RUN) if flag == "load_checkpoint_path" else {"dataset_source": "random", "lr": 1e-2}
    )
    given |= {
        "sequence_length": 16,
        "seed": 1,
        "checkpoint_interval": None,
        "allow_data_change": True,
    }
    wanted = [weights_of(folder) for folder in checkpoints]
    results = run_distributed(ranks, started, str(tmp_path), checkpoints, flag, given, every)
    for found in zip(*results, strict=True):
        assert any(all(same(one, weights) for one in found) for weights in wanted)


def test_an_older_one_is_no_substitute(
    tmp_path: Path, made: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A permanent checkpoint beside the rotated ones is older than the newest, which is looked for
    again."""
    _, *checkpoints = saved("rotated", made)
    wanted = [weights_of(folder) for folder in checkpoints]
    older = made / "twins" / "checkpoints" / "1"
    for _, found in at_every_call(
        tmp_path, checkpoints, lambda live: again(lambda: weights_of(live.root)), permanent=older
    ):
        assert any(same(found, weights) for weights in wanted)
    assert "skipped" not in caplog.text


def edit(folder: Path, **changes: Any) -> None:
    """Change the manifest of a checkpoint, with a right checksum."""
    path = folder / "manifest.json"
    values = json.loads(path.read_bytes())
    path.write_bytes(seal({**values, **changes}))


def test_damage_stays_damage(tmp_path: Path, made: Path) -> None:
    """Of a folder that nobody touches, in every file, at the first attempt."""
    attempts = 0

    def read(folder: Path) -> Weights:
        nonlocal attempts
        attempts += 1
        return weights_of(folder)

    for name in ("rank_000.safetensors", "rank_001.safetensors", "manifest.json"):
        for change in (
            Path.unlink,
            lambda path: flip(path, 1500, 0),
            lambda path: os.truncate(path, 1500),
        ):
            folder = shutil.copytree(
                made / "made" / "checkpoints" / "3", tmp_path / f"{attempts}" / "3"
            )
            change(folder / name)
            with pytest.raises(CheckpointError, match=name) as caught:
                again(lambda folder=folder: read(folder.parent))
            assert type(caught.value) is CheckpointError
    assert attempts == 9


def test_a_reader_gives_up(tmp_path: Path, made: Path) -> None:
    """After some attempts, with exit code 4, if each meets a rotation; the message names the folder
    and the reason."""
    checkpoints = [made / name / "checkpoints" / "2" for name in ("made", "twins")] * ATTEMPTS
    live, opened = LiveRun(tmp_path, checkpoints), 0

    def at(_: int) -> bool:
        nonlocal opened
        opened += calls[-1].startswith("open") and calls[-1].endswith("rank_001.safetensors")
        return calls[-1].endswith("rank_001.safetensors")

    with (
        live.rotating(at) as calls,
        pytest.raises(RotatedError, match="2: its run deleted or replaced it") as caught,
    ):
        again(lambda: weights_of(live.root))
    assert opened == live.rotations == ATTEMPTS and caught.value.exit_code == 4


def test_a_list_may_name_what_is_gone(tmp_path: Path, made: Path) -> None:
    """Between the list and a look at each: a run whose only checkpoint was rotated just then has
    not lost it."""
    for _, found in at_every_call(
        tmp_path, saved("rotated", made), lambda live: find_checkpoints(live.folder)
    ):
        assert found


def test_architecture_and_weights_are_of_one_model(tmp_path: Path, made: Path) -> None:
    """Where another model comes between the command line and the weights, the start ends and names
    the difference; --ignore_pretrained_config=1 takes the flags.
    """
    first, second = (tmp_path / name / "2" for name in ("first", "second"))
    for folder in (first, second):
        shutil.copytree(made / "made" / "checkpoints" / "2", folder)
    config = json.loads((second / "manifest.json").read_bytes())["config"]
    edit(second, config={**config, "layer_norm_eps": 0.5})
    for ignore in (False, True):
        live = LiveRun(tmp_path / str(ignore), [first, second])
        given = {"pretrained_checkpoint_path": str(live.root), "ignore_pretrained_config": ignore}
        if ignore:
            run_distributed(1, replaced_after_the_command_line, live, given)
        else:
            with pytest.raises(
                RuntimeError, match="--layer_norm_eps: 0.5 in the checkpoint, 1e-05 now"
            ):
                run_distributed(1, replaced_after_the_command_line, live, given)


def replaced_after_the_command_line(
    distributed: Distributed, live: LiveRun, given: dict[str, Any]
) -> None:
    given = {"dataset_source": "random", "sequence_length": 16, **given}
    start(distributed, given, live.rotate)


@pytest.mark.slow
@pytest.mark.faults
def test_a_run_that_saves_at_every_iteration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """12 times each, whenever it rotates."""
    flags = [
        "--train_iters=100000",
        "--checkpoint_interval=1",
        "--max_checkpoints=1",
        f"--experiment_dir={tmp_path}",
    ]
    save_byte_tokenizer(tmp_path / "tokenizer.json")
    text = tmp_path / "text.txt"
    text.write_text("the cats sat on the mats")
    options = [f"--model={tmp_path}", f"--tokenizer_file={tmp_path / 'tokenizer.json'}"]
    with Start([*TINY, "--vocab_size=257", *flags], ranks=2) as live:
        live.wait_until(
            lambda: bool(find_checkpoints(tmp_path / "checkpoints")), "the first checkpoint"
        )
        for number in range(12):
            printed(generate.main([*options, "--prompt=ab", "--max_new_tokens=2"]), capsys)
            printed(evaluate.main([*options, "--text", str(text)]), capsys)
            printed(verify_checkpoint.main([str(tmp_path)]), capsys)
            target = tmp_path / "converted" / str(number)
            given = [f"--from={tmp_path}", f"--to={target}", "--format=huggingface"]
            printed(convert_checkpoint.main(given), capsys)
            pretrained = {"pretrained_checkpoint_path": str(tmp_path), "dataset_source": "random"}
            run_distributed(2, start, pretrained | {"sequence_length": 16})
        assert live.running()
