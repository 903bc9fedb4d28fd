"""Runs from pretrained weights: the same weights on every layout, and nothing else of the
checkpoint."""

import dataclasses
import io
import os
import resource
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_lite.checkpoint import blocks, files, manifest
from megatron_lite.checkpoint.manifest import MOMENTS
from megatron_lite.cli.model_source import with_source
from megatron_lite.config import unflatten
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import CheckpointError
from megatron_lite.huggingface import load_pretrained, weight_source
from megatron_lite.huggingface.load_pretrained import open_source
from megatron_lite.huggingface.weight_source import CheckpointSource
from megatron_lite.tiles import Tile
from megatron_lite.validation import resolve
from megatron_lite.zero.multi_stage import MultiStage
from tests.checkpoint.test_damage import as_version, flip, seal
from tests.support.families import write_folder
from tests.support.folder_checks import checked, expected, read_whole
from tests.support.harness import full_weights, layers_of, run_distributed, same_weights, start_run
from tests.support.launch import run
from tests.train.test_resume import curve, weights

# GPT-2 stores its matrices the other way round, StarCoder2 has them in several tensors.
FAMILIES = {"gpt2": "gpt2", "starcoder2": "starcoder2, window"}
RUN = dict(
    device="cpu",
    sequence_length=16,
    dataset_source="random",
    num_workers=0,
    batch_size=4,
    lr=1e-3,
    log_interval=1,
)
FLAGS = [f"--{name}={value}" for name, value in RUN.items()]


@pytest.fixture(scope="module", params=["gpt2", pytest.param("starcoder2", marks=pytest.mark.slow)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two or three files."""
    path = tmp_path_factory.mktemp("pretrained") / request.param
    return write_folder(
        FAMILIES[request.param], path, max_shard_size="50KB", **_quiet(request.param)
    )


def _quiet(name: str) -> dict[str, Any]:
    return {} if name == "gpt2" else dict(residual_dropout=0.0, embedding_dropout=0.0)


@dataclass(frozen=True)
class Trained:
    """A short run from pretrained weights."""

    initial: dict[str, np.ndarray]
    averaged: dict[str, np.ndarray]  # at the beginning, if there are averages
    moments: dict[str, float]  # at the beginning: sum of the absolute values of each kind
    updates: int  # Adam's count at the beginning
    iteration: int
    losses: list[float]
    weights: dict[str, np.ndarray]


def train(distributed: Distributed, given: dict[str, Any], iterations: int = 2) -> Trained:
    """Build and train with the program's own step; to be run by `run_distributed`."""
    from megatron_lite.outputs.saving import save
    from megatron_lite.train import train_step

    values, _ = with_source({**RUN, "train_iters": iterations, **given})
    config = resolve(unflatten(values), distributed.world_size)
    started = start_run(distributed, config)
    model = started.model
    initial = full_weights(model)
    averaged = {}
    iteration = started.iteration
    if config.averaging.enabled:
        with model.averaged():
            averaged = full_weights(model)
    moments = {
        kind: sum(
            float(part.read(kind).abs().sum()) for _, part in model.parts() if kind in part.kinds()
        )
        for kind in MOMENTS
    }
    updates, losses = started.optimizer.state()["updates"], []
    for number, micro_batches in enumerate(
        started.data.batches("training", 0, iterations), start=1
    ):
        losses.append(float(train_step(started, micro_batches, number).loss))
    started.iteration = iterations
    save(started)
    return Trained(initial, averaged, moments, updates, iteration, losses, full_weights(model))


def ours(folder: Path) -> dict[str, np.ndarray]:
    """Return the expected parameters, by transformers."""
    source, shapes = checked(folder)
    return {name: value.numpy() for name, value in expected(folder, source, shapes).items()}


def test_every_layout_begins_and_trains_alike(folder: Path) -> None:
    """On 1 and 2 ranks, with ZeRO 1 and 3, the weights equal the folder's bit for bit; on 2 ranks
    they stay equal."""
    given = {"pretrained_checkpoint_path": str(folder)}
    wanted = ours(folder)
    runs = {
        (ranks, zero): run_distributed(ranks, train, {**given, "zero_stage": zero})
        for ranks, zero in ((1, 1), (1, 3), (2, 1), (2, 3))
    }
    for results in runs.values():
        for result in results:
            assert same_weights(result.initial, wanted)
            assert result.updates == result.iteration == 0 and not any(result.moments.values())
    first, second = runs[2, 1][0], runs[2, 3][0]
    assert first.losses == second.losses and same_weights(first.weights, second.weights)
    assert not same_weights(first.weights, first.initial)
    for name, value in runs[1, 1][0].weights.items():
        if not name.endswith("query_key_value.bias"):  # those of keys have no gradient but rounding
            np.testing.assert_allclose(first.weights[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        dict(training_dtype="bf16"),
        dict(training_dtype="bf16", split_master_weights=True),
        dict(
            freeze="embedding blocks.0",
            training_dtype="bf16",
            store_frozen_weights_in_optimization_precision=False,
        ),
        dict(lr_scales="head.norm:0.5"),
        dict(ema_type="ema"),
        dict(optimizer="muon", zero_stage=3),
        dict(make_vocab_size_divisible_by=64),
    ],
    ids=str,
)
def test_every_kind_of_shard_is_filled(options: dict[str, Any], folder: Path) -> None:
    """Weights are rounded once to the training dtype, masters are not; averages start from the
    loaded weights."""
    [result] = run_distributed(
        1, train, {**_typed(options), "pretrained_checkpoint_path": str(folder)}
    )
    wanted = ours(folder)
    if options.get("training_dtype") == "bf16":
        wanted = {
            name: torch.from_numpy(value).bfloat16().float().numpy()
            for name, value in wanted.items()
        }
    assert same_weights(result.initial, wanted)
    assert not options.get("ema_type") or same_weights(result.averaged, wanted)


def _typed(options: dict[str, Any]) -> dict[str, Any]:
    """Return them as the command line does."""
    lists = ("freeze", "lr_scales")
    return {
        name: tuple(value.split()) if name in lists else value for name, value in options.items()
    }


def test_norms_that_are_kept_around_zero(folder: Path) -> None:
    """--zero_centered_normalization=1: their weights less 1, which compute the same losses."""
    given = {"pretrained_checkpoint_path": str(folder)}
    [result] = run_distributed(1, train, {**given, "zero_centered_normalization": True, "lr": 0.0})
    [plain] = run_distributed(1, train, {**given, "lr": 0.0})
    for name, value in ours(folder).items():
        assert np.array_equal(
            result.initial[name], value - 1.0 if name.endswith("norm.weight") else value
        ), name
    assert result.losses == pytest.approx(plain.losses, rel=1e-6)


def test_masters_are_not_rounded(folder: Path, tmp_path: Path) -> None:
    """bf16 training, split masters or not: what a checkpoint holds before anything is learned is
    the file's fp32."""
    for number, split in enumerate((False, True)):
        directory = tmp_path / str(number)
        given = dict(
            training_dtype="bf16", split_master_weights=split, experiment_dir=str(directory), lr=0.0
        )
        run_distributed(1, train, {**given, "pretrained_checkpoint_path": str(folder)}, 1)
        source, shapes = checked(directory / "checkpoints")
        for name, value in ours(folder).items():
            target = torch.empty(shapes[name])
            source.read(name, Tile.run(0, target.numel()), target.view(-1))
            assert np.array_equal(target.numpy(), value), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a run of two ranks with ZeRO 3, whose weights were averaged."""
    directory = tmp_path_factory.mktemp("saved")
    folder = write_folder("gpt2", directory / "model")
    given = dict(
        zero_stage=3, experiment_dir=str(directory / "run"), ema_type="ema", layers_per_stage=2.0
    )
    run_distributed(2, train, {**given, "pretrained_checkpoint_path": str(folder)}, 3)
    return directory / "run" / "checkpoints"


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_checkpoint_of_another_layout(ranks: int, saved: Path) -> None:
    """The newest weights load bit for bit; iterations and averages start over, Adam too unless its
    state is loaded."""
    source, shapes = checked(saved, state=True)
    wanted = {name: torch.empty(shape) for name, shape in shapes.items()}
    for name, value in wanted.items():
        source.read(name, Tile.run(0, value.numel()), value.view(-1))
    values = {name: value.numpy() for name, value in wanted.items()}
    given = {"pretrained_checkpoint_path": str(saved), "ema_type": "ema"}
    plain = run_distributed(ranks, train, given)
    moved = run_distributed(ranks, train, {**given, "load_parts": ("model", "optimizer")})
    for result in (*plain, *moved):
        assert (
            result.iteration == 0
            and same_weights(result.initial, values)
            and same_weights(result.averaged, values)
        )
    assert {result.updates for result in plain} == {0} and not any(plain[0].moments.values())
    assert {result.updates for result in moved} == {3}
    assert isinstance(source, CheckpointSource)
    for kind in MOMENTS:
        total = 0.0
        for name, value in wanted.items():
            source.read_state(name, kind, Tile.run(0, value.numel()), value.view(-1))
            total += float(value.abs().sum())
        assert sum(result.moments[kind] for result in moved) == pytest.approx(total, rel=1e-5)


def test_moments_are_those_of_resuming(saved: Path, tmp_path: Path) -> None:
    """One more update from weights, moments and count equals the next update of the checkpoint's
    own run."""
    root = tmp_path / "resumed" / "checkpoints"
    shutil.copytree(saved, root)
    constant = dict(lr_decay_style="constant", weight_decay=0.0, ema_type="ema")
    values, _ = with_source(
        {**RUN, **constant, "train_iters": 4, "pretrained_checkpoint_path": str(saved)}
    )
    [resumed] = run_distributed(1, one_more_step, {**values, "experiment_dir": str(root.parent)}, 3)
    [moved] = run_distributed(1, one_more_step, {**values, "load_parts": ("model", "optimizer")}, 0)
    assert same_weights(resumed, moved)


def one_more_step(
    distributed: Distributed, values: dict[str, Any], done: int
) -> dict[str, np.ndarray]:
    """The weights after one update on the first samples."""
    from megatron_lite.train import train_step

    started = start_run(distributed, resolve(unflatten(values), distributed.world_size))
    assert started.iteration == done
    train_step(started, next(iter(started.data.batches("training", 0, 1))), 1)
    return full_weights(started.model)


def test_another_optimizer(saved: Path) -> None:
    """SGD refuses AdamW's moments; Muon takes those of the parameters that it leaves to AdamW."""
    with pytest.raises(RuntimeError, match="cannot use any moments"):
        run_distributed(
            1,
            train,
            {
                "pretrained_checkpoint_path": str(saved),
                "load_parts": ("model", "optimizer"),
                "optimizer": "sgd",
            },
        )
    given = {
        "pretrained_checkpoint_path": str(saved),
        "load_parts": ("model", "optimizer"),
        "optimizer": "muon",
    }
    [result] = run_distributed(1, train, given)
    assert result.updates == 3 and result.moments["exp_avg_sq"] > 0


def test_a_damaged_newest_checkpoint(saved: Path, tmp_path: Path) -> None:
    """The newest good one is loaded and the damaged one named; with none left, one line says so."""
    root = tmp_path / "checkpoints"
    shutil.copytree(saved, root)
    newest = root / "7"
    shutil.copytree(root / "3", newest)
    flags = [*FLAGS, "--train_iters=1", f"--pretrained_checkpoint_path={root}"]
    outcome = run(flags)
    assert outcome.codes == [0], outcome.output
    assert f"checkpoint {newest}: manifest.json: it is of iteration 3; skipped" in outcome.output
    assert f"weights of {root / '3'} (a checkpoint of iteration 3)" in outcome.output
    rank_file = root / "3" / "rank_001.safetensors"
    flip(rank_file, manifest.read(root / "3").places()[rank_file.name][0][0].offset, 1)
    shutil.rmtree(newest)
    outcome = run(flags)
    assert outcome.codes == [4] and len(outcome.error_lines()) == 1
    assert (
        "no usable checkpoint: rank_001.safetensors: its checksum does not match" in outcome.output
    )


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    folder = write_folder("gpt2", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.h.1.mlp.c_fc.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    outcome = run([*FLAGS, "--train_iters=1", f"--pretrained_checkpoint_path={folder}"], 2)
    assert outcome.codes == [4, 4] and len(outcome.error_lines()) == 1
    assert "some weights are not finite" in outcome.output


def test_an_optimizer_from_a_hugging_face_folder(folder: Path) -> None:
    flags = [
        *FLAGS,
        "--train_iters=1",
        f"--pretrained_checkpoint_path={folder}",
        "--load_parts=model,optimizer",
    ]
    outcome = run(flags)
    assert outcome.codes == [4] and len(outcome.error_lines()) == 1
    assert "holds no optimizer state; leave the flag out" in outcome.output


def test_resuming_needs_the_folder_no_more(tmp_path: Path) -> None:
    """Stopped after 2 of 5 iterations, resumed without the pretrained folder: bit for bit as if
    never stopped."""
    folder = write_folder("gpt2", tmp_path / "model", resid_pdrop=0.1, embd_pdrop=0.2)
    command = [
        *FLAGS,
        f"--pretrained_checkpoint_path={folder}",
        "--train_iters=5",
        "--checkpoint_interval=2",
    ]
    whole = run([*command, f"--experiment_dir={tmp_path / 'whole'}"])
    assert whole.codes == [0], whole.output
    again = [*command, f"--experiment_dir={tmp_path / 'again'}"]
    assert run([*again, "--stop_interval=2"]).codes == [0]
    shutil.rmtree(folder)
    outcome = run(again)
    assert outcome.codes == [0], outcome.output
    assert "at iteration 2" in outcome.output and "weights of" not in outcome.output
    assert weights(tmp_path / "whole") == weights(tmp_path / "again")
    assert curve(tmp_path / "whole") == curve(tmp_path / "again")
    contradicting = run([*again, "--num_layers=7"])
    assert (
        contradicting.codes == [4]
        and "--num_layers: 3 in the checkpoint, 7 now" in contradicting.output
    )


def test_only_the_architecture(folder: Path) -> None:
    """--load_parts=architecture: the initial weights are those of the same model without the
    folder."""
    values, _ = with_source(
        {**RUN, "pretrained_checkpoint_path": str(folder), "load_parts": ("architecture",)}
    )
    without = {name: value for name, value in values.items() if "pretrained" not in name}
    [one], [other] = run_distributed(1, train, values), run_distributed(1, train, without)
    assert same_weights(one.initial, other.initial) and one.losses == other.losses
    assert not same_weights(one.initial, ours(folder))


def test_no_rank_ever_holds_the_model(tmp_path: Path) -> None:
    """While the shards are filled the process grows by a few chunks, as the system counts, not by a
    matrix (30 MB)."""
    folder = write_folder("gpt2", tmp_path / "model", n_embd=384, n_layer=4, vocab_size=20000)
    for shard_bytes, model_bytes, grown_bytes in run_distributed(2, growth_in_loading, str(folder)):
        assert shard_bytes == pytest.approx(model_bytes / 2, rel=0.01) and model_bytes > 55e6
        # 15 MB: the system rounds, and counts what else is touched
        assert grown_bytes < 7 * CHUNK_BYTES


CHUNK_BYTES = 2**21


def growth_in_loading(distributed: Distributed, folder: str) -> tuple[int, int, int]:
    """Bytes of the weight shards and of the model, and what the peak resident size gains while they
    are filled."""
    files.CHUNK_BYTES = CHUNK_BYTES
    values, _ = with_source({**RUN, "pretrained_checkpoint_path": folder, "zero_stage": 3})
    config = resolve(unflatten(values), distributed.world_size)
    model = MultiStage(layers_of(config), config.multi_stage, config.batch, "fp32", distributed)
    shapes = {
        slot.spec.name: slot.spec.shape for _, part in model.parts() for slot in part.layout.slots
    }
    with load_pretrained.open_pretrained(config, shapes, distributed, print) as source:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        load_pretrained.load_weights(source, model, distributed)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    shard_bytes = sum(part.read("weights").nbytes for _, part in model.parts())
    return shard_bytes, 4 * model.num_parameters, 1024 * grown


def test_a_checkpoint_that_does_not_fit(saved: Path) -> None:
    """With --ignore_pretrained_config=1 shapes decide: every one that differs is named in one
    line."""
    source = open_source(saved)
    with pytest.raises(CheckpointError, match="does not fit the model") as caught:
        source.check({"embedding.word.weight": (61, 25), "head.output.weight": (61, 24)})
    assert "embedding.word.weight has shape [61, 24], the model's has [61, 25]" in str(caught.value)
    assert "head.output.weight is not in the checkpoint" in str(caught.value) and "\n" not in str(
        caught.value
    )


def test_norms_of_a_checkpoint_mean_what_they_meant(saved: Path) -> None:
    """Norm weights stored around 1 are never read as weights around 0."""
    given = {"pretrained_checkpoint_path": str(saved), "zero_centered_normalization": True}
    with pytest.raises(
        RuntimeError, match="--zero_centered_normalization: 0 in the checkpoint, 1 now"
    ):
        run_distributed(1, train, {**given, "ignore_pretrained_config": True})


# Name -> what is done to a checkpoint of two ranks, and words of the refusal.
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json: No such file"),
    "an edited manifest": (
        lambda f: _edit(f, b'"lr": 0.001', b'"lr": 0.002'),
        "it was damaged or edited",
    ),
    "a newer format": (
        lambda f: _edit(f, b'"version": 6', b'"version": 9'),
        "written in format version 9",
    ),
    "a missing file": (
        lambda f: (f / "rank_001.safetensors").unlink(),
        "rank_001.safetensors: No such file",
    ),
    "a file cut off": (
        lambda f: os.truncate(f / "rank_000.safetensors", 999),
        "999 bytes, the manifest says",
    ),
    "a changed byte": (
        lambda f: flip(f / "rank_000.safetensors", offset(f, "weights"), 0),
        "checksum does not match",
    ),
}


def _edit(folder: Path, before: bytes, after: bytes) -> None:
    data = (folder / "manifest.json").read_bytes()
    assert before in data
    (folder / "manifest.json").write_bytes(data.replace(before, after, 1))


def offset(folder: Path, kind: str) -> int:
    """Return the place of the first byte of this kind in the first file."""
    slices = manifest.read(folder).places()["rank_000.safetensors"]
    return next(piece.offset for piece, name in slices if name.startswith(f"{kind} of "))


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_checkpoints_end_in_one_line(name: str, saved: Path, tmp_path: Path) -> None:
    """Each is a CheckpointError of one line that begins with the folder."""
    folder = tmp_path / "3"
    shutil.copytree(saved / "3", folder)
    change, words = DAMAGES[name]
    change(folder)
    with pytest.raises(CheckpointError) as caught:
        checked(tmp_path)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path))


def test_what_is_read_is_what_is_verified(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of weights reads their blocks alone and sees no damage elsewhere, a reader of
    averages likewise; one that also reads moments sees all. Shares of ranks cover everything. Older
    checkpoints are verified whole."""
    folder = tmp_path / "3"
    shutil.copytree(saved / "3", folder)
    content = in_blocks_of(folder, 64)
    whole = sum(file.size for file in content.files.values())
    sizes = {kind: 0 for kind in (*manifest.KINDS, "all")}
    for parameter in content.parameters.values():
        for kind, pieces in parameter.slices.items():
            sizes[kind] += sum(piece.num_bytes for piece in pieces)
            sizes["all"] += sum(piece.num_bytes for piece in pieces)
    counted = [0]

    class Counting(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            counted.append(super().readinto(buffer))
            return counted[-1]

    monkeypatch.setattr("megatron_lite.run.regular_files.io.FileIO", Counting)
    readers = {"weights": {}, "average": {"average": True}, "all": {"state": True}}

    def damage(reader: str, ranks: int = 1) -> list[str]:
        counted.clear()
        sources = [CheckpointSource(folder, **readers[reader]) for _ in range(ranks)]
        return [
            text for rank in range(ranks) if (text := sources[rank].damage(rank, ranks)) is not None
        ]

    for reader in readers:
        for ranks in (1, 3):
            assert (
                damage(reader, ranks) == []
                and 0 <= sum(counted) - sizes[reader] < 0.1 * sizes[reader]
            )
    for kind in ("weights", "exp_avg", "average"):
        place = offset(folder, kind) + 64
        flip(folder / "rank_000.safetensors", place, 3)
        for reader in readers:
            found = damage(reader, 2)
            assert len(found) == (reader in (kind, "all")) and all(
                f"({kind} of " in text for text in found
            )
        flip(folder / "rank_000.safetensors", place, 3)
    (folder / "manifest.json").write_bytes(seal(as_version(3, folder)))
    assert damage("weights") == [] and sum(counted) == whole
    flip(folder / "rank_000.safetensors", offset(folder, "exp_avg"), 3)
    assert len(damage("weights")) == 1


def in_blocks_of(folder: Path, num_bytes: int) -> manifest.Manifest:
    """Give the files of a checkpoint checksums of smaller blocks; return its manifest."""
    content = manifest.read(folder)
    for name in content.files:
        data = (folder / name).read_bytes()
        sums = [
            f"{zlib.crc32(data[at : at + num_bytes]):08x}" for at in range(0, len(data), num_bytes)
        ]
        content.files[name] = blocks.SavedFile(len(data), num_bytes, "".join(sums))
    (folder / "manifest.json").write_text(manifest.dump(content))
    return content


def test_options_of_another_version(saved: Path, tmp_path: Path) -> None:
    """A checkpoint older than an option has its default; one with an unknown option is refused."""
    content = manifest.read(saved / "3")
    old = {
        name: value
        for name, value in content.config.items()
        if name not in ("qk_layernorm", "rotary_base")
    }
    for name, config in (("old", old), ("new", {**old, "num_wings": 2})):
        shutil.copytree(saved / "3", tmp_path / name)
        text = manifest.dump(dataclasses.replace(content, config=config))
        (tmp_path / name / "manifest.json").write_text(text)
    assert open_source(tmp_path / "old").model == open_source(saved).model
    with pytest.raises(
        CheckpointError, match="does not know: num_wings; use the version that saved it"
    ):
        open_source(tmp_path / "new")


def test_averages_as_weights(saved: Path) -> None:
    """`weights="average"`: the running averages, which are neither the first nor the last
    weights."""
    averages, shapes = checked(saved, weights="average")
    newest, _ = checked(saved)
    values = [read_whole(source, shapes)["blocks.0.mlp.up.weight"] for source in (averages, newest)]
    assert not torch.equal(*values) and torch.allclose(*values, atol=1e-2)
    with pytest.raises(CheckpointError, match="one set of weights"):
        open_source(saved.parent.parent / "model", weights="average")


def test_scripts_fall_back_from_a_damaged_checkpoint(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest good one of several checkpoints is used, with a line about the damaged one; its
    files are then not read for their checksums again."""
    root = tmp_path / "checkpoints"
    shutil.copytree(saved, root)
    newest, older = root / "3", root / "2"
    shutil.copytree(newest, older)
    text = manifest.dump(dataclasses.replace(manifest.read(newest), iteration=2))
    (older / "manifest.json").write_text(text)
    flip(newest / "rank_000.safetensors", offset(newest, "weights"), 1)
    source = open_source(root, whole=True)
    assert source.folder == older
    (line,) = [record.getMessage() for record in caplog.records]
    assert (
        f"{newest}: rank_000.safetensors: its checksum does not match" in line
        and "; skipped" in line
    )
    monkeypatch.setattr(weight_source, "check_blocks", None)
    source.verify()
    assert open_source(root).folder == newest, "for its options alone, the files are not read"
