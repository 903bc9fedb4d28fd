"""The real engine with frozen, split and averaged weights saves, loads and resumes bit for bit.

Checkpoints are compared by what their manifests say of each parameter, whatever layout wrote them;
the bytes are read here without the code that loads checkpoints. Every kind of run is trained once,
and serves several tests.
"""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_lite.checkpoint import manifest
from megatron_lite.checkpoint.writing import Save, write_now
from megatron_lite.distributed.process_group import Distributed
from tests.support.harness import bytes_by_kind, run_distributed, start_run, tiny_config
from tests.support.results import curve, digests, saved_values

Contents = dict[tuple[str, str], Tensor]  # (parameter, kind) -> values
MIDDLE, LAST = 2, 4  # iterations of the checkpoints

EMBEDDING = {"freeze": ("embedding",)}
BLOCKS = {"freeze": ("blocks",)}
# Trainable and frozen parameters in each of the block's stages, several learning rates among the
# former.
MIXED = {
    "freeze": ("embedding.position", "*.bias", "blocks.0.mlp"),
    "lr_scales": ("blocks.1.attention:0.5",),
}
MATRIX = {
    "freeze": ("embedding.position", "blocks.0.mlp.up"),
    "lr_scales": ("blocks.1.attention:0.5",),
}
BF16 = {"training_dtype": "bf16"}
LOW = {**BF16, "store_frozen_weights_in_optimization_precision": False}
SPLIT = {**BF16, "split_master_weights": True}
EMA: dict[str, Any] = {"ema_type": "ema", "ema_beta": 0.8}
SQRT: dict[str, Any] = {
    "ema_type": "ema_decay_sqrt",
    "ema_beta": 0.9,
    "ema_switch_iter": 2,
    "ema_decay_iters": 2,
}
VALIDATED: dict[str, Any] = {"validation_iters": 1, "validation_interval": 2}


def open_run(distributed: Distributed, options: dict[str, Any]) -> Any:
    """Build as the program does, from the newest checkpoint of --experiment_dir, if any."""
    schedule = {"train_iters": LAST, "lr_warmup": 1, "lr": 1e-2, "checkpoint_interval": MIDDLE}
    if options.get("train_iters") == 0:
        schedule = {"lr_warmup": 0}
    return start_run(distributed, tiny_config(distributed.world_size, **{**schedule, **options}))


def finished_run(distributed: Distributed, options: dict[str, Any]) -> Any:
    """Train to the end through the program's own loop; metrics.jsonl has the losses."""
    from megatron_lite.train import train

    run = open_run(distributed, options)
    train(run)
    run.trackers.close(0)
    distributed.barrier()
    run.experiment.release()
    return run


def train_on(distributed: Distributed, options: dict[str, Any]) -> None:
    finished_run(distributed, options)


def train_twice(distributed: Distributed, options: dict[str, Any], root: str) -> None:
    """Train in root/whole, and train again from the middle in root/resumed."""
    train_on(distributed, {**options, "experiment_dir": f"{root}/whole"})
    if distributed.rank == 0:
        copy_checkpoint(Path(root, "whole"), MIDDLE, Path(root, "resumed"))
    distributed.barrier()
    train_on(distributed, {**options, "experiment_dir": f"{root}/resumed"})


def save_again(
    distributed: Distributed, options: dict[str, Any], target: str
) -> dict[str, list[str]]:
    """Load and save into another directory; return the dtypes of the live weights by kind of
    part."""
    run = open_run(distributed, options)
    state = {"optimizer": run.optimizer.state(), "window": run.window.state()}
    write_now(Save(Path(target), run.iteration, run.model, state, run.config, distributed))
    dtypes: dict[str, list[str]] = {"trained": [], "frozen": []}
    for _, part in run.model.parts():
        known, dtype = dtypes["frozen" if part.frozen else "trained"], str(part.kinds()["weights"])
        if dtype not in known:
            known.append(dtype)
    return dtypes


def saved_again(
    source: Path, ranks: int, options: dict[str, Any], root: Path, iteration: int = LAST
) -> tuple[Contents, str, Any]:
    """Load a checkpoint of an experiment in `root` and save it in root/again.

    Return its content, the log, and the dtypes of the live weights.
    """
    copy_checkpoint(source, iteration, root)
    dtypes = run_distributed(
        ranks, save_again, {**options, "experiment_dir": str(root)}, str(root / "again")
    )[0]
    return read_all(root / "again" / str(iteration)), log_of(root), dtypes


def read_all(folder: Path) -> Contents:
    """Return every parameter and moment of a checkpoint."""
    content = manifest.read(folder)
    contents: Contents = {}
    for name, kind, values in saved_values(folder):
        parameter = content.parameters[name]
        flat = torch.frombuffer(bytearray(values), dtype=getattr(torch, parameter.dtype_of(kind)))
        contents[name, kind] = flat.view(parameter.shape)
    return contents


def last(experiment: Path) -> Contents:
    return read_all(experiment / "checkpoints" / str(LAST))


def assert_same(left: Contents, right: Contents) -> None:
    """Check that parameters, moments and dtypes are bit-identical."""
    assert left.keys() == right.keys()
    different = [
        key
        for key, values in left.items()
        if values.dtype != right[key].dtype
        or not torch.equal(values.view(torch.uint8), right[key].view(torch.uint8))
    ]
    assert not different


def frozen_names(contents: Contents) -> set[str]:
    return {name for name, _ in contents if (name, "exp_avg") not in contents}


def averaged_names(contents: Contents) -> set[str]:
    return {name for name, kind in contents if kind == "average"}


def copy_checkpoint(source: Path, iteration: int, experiment: Path) -> None:
    shutil.copytree(
        source / "checkpoints" / str(iteration), experiment / "checkpoints" / str(iteration)
    )


def log_of(experiment: Path) -> str:
    """Return the log of the newest start."""
    newest = max((experiment / "runs").iterdir(), key=lambda path: int(path.name))
    return (newest / "logs" / "logs_rank_000.txt").read_text("utf-8")


TENSOR: dict[str, Any] = {"tensor_parallel": 2, "sequence_tensor_parallel": True, "zero_stage": 3}
CASES: dict[str, dict[str, Any]] = {
    "frozen embedding, fp32, zero 1": {**EMBEDDING, "zero_stage": 1},
    "frozen embedding, low precision, zero 2": {**EMBEDDING, **LOW, "zero_stage": 2},
    "frozen blocks, bf16, zero 3": {**BLOCKS, **BF16, "zero_stage": 3},
    "split, zero 1": {**SPLIT, "zero_stage": 1},
    "split, mixed, low precision, zero 2": {**MIXED, **SPLIT, **LOW, "zero_stage": 2},
    "lion, split, mixed, low precision, zero 2": {
        **{"optimizer": "lion", **MIXED, **SPLIT, **LOW, "zero_stage": 2, "async_checkpoint": True}
    },
    "muon, two stages of blocks, zero 3": {
        "optimizer": "muon",
        "zero_stage": 3,
        "num_layers": 3,
        **MATRIX,
    },
    "muon, split": {"optimizer": "muon", **SPLIT},
    "sgd, zero 3": {"optimizer": "sgd", "zero_stage": 3, "training_dtype": "bf16"},
    "averages, fp32, zero 1": {**EMA, "zero_stage": 1},
    "averages, mixed, low precision, zero 3": {
        **SQRT,
        **MIXED,
        **LOW,
        "zero_stage": 3,
        "layers_per_stage": 2.0,
    },
    "averages, split, zero 2": {**SQRT, **SPLIT, "zero_stage": 2},
    "averages, tensor-parallel": {**EMA, **TENSOR, "async_checkpoint": True, "hidden_dropout": 0.1},
}
CASES = {
    name: {**options, **(VALIDATED if "averages" in name else {})}
    for name, options in CASES.items()
}
AVERAGES = "averages, mixed, low precision, zero 3"
LION = "lion, split, mixed, low precision, zero 2"
ALWAYS = (AVERAGES, "muon, two stages of blocks, zero 3", "averages, tensor-parallel")

Trained = Callable[[str], Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return a function: a case -> the folder of what `train_twice` writes, on two ranks."""

    @functools.cache
    def of(case: str) -> Path:
        root = tmp_path_factory.mktemp("case")
        options = {**CASES[case], "batch_size": 6, "export_interval": LAST}
        run_distributed(
            2, train_twice, options, str(root), tensor_parallel=options.get("tensor_parallel", 1)
        )
        return root

    return of


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in ALWAYS else [pytest.mark.slow]) for case in CASES],
)
def test_continued_training_is_bit_identical(case: str, trained: Trained, tmp_path: Path) -> None:
    """Resuming at iteration 2 gives iteration 4, the export and all losses of an uninterrupted run,
    those of averages, too; frozen weights never change and are stored in the requested dtype,
    without moments. Another layout loads and saves the same."""
    whole, resumed = trained(case) / "whole", trained(case) / "resumed"
    log = log_of(resumed)
    before = curve(whole)
    after = curve(resumed)
    assert "resumed from" in log and "start at zero" not in log and "begins now" not in log
    assert len(after) >= 2 and all(before[place] == line for place, line in after.items())
    contents = [read_all(whole / "checkpoints" / str(iteration)) for iteration in (MIDDLE, LAST)]
    assert_same(last(resumed), contents[1])
    assert digests(resumed / "export") == digests(whole / "export") != {}
    frozen, names = frozen_names(contents[1]), {name for name, _ in contents[1]}
    assert bool(frozen) == ("freeze" in CASES[case]) and len(frozen) < len(names)
    low = "low precision" in case
    for name in names:
        early, late = (content[name, "weights"] for content in contents)
        assert torch.equal(early, late) == (name in frozen), name
        assert late.dtype == (torch.bfloat16 if low and name in frozen else torch.float32)
    averaged = averaged_names(contents[1])
    assert averaged == (names - frozen if "averages" in case else set())
    assert not any(
        torch.equal(contents[1][name, "average"], contents[1][name, "weights"]) for name in averaged
    )
    for (phase, _), line in before.items():
        assert ("averaged_loss" in line) == (phase == "validation") and line["loss"] != line.get(
            "averaged_loss"
        )
    assert any(phase == "validation" for phase, _ in before) == ("averages" in case)
    layout = {"batch_size": 6, "zero_stage": 1, "layers_per_stage": 2.0}
    layout |= {"tensor_parallel": 1, "sequence_tensor_parallel": False}
    assert_same(saved_again(whole, 3, {**CASES[case], **layout}, tmp_path)[0], contents[1])


OTHERS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {"zero_stage": 1}),
    (2, {"zero_stage": 3, "layers_per_stage": 2.0}),
    (3, {"zero_stage": 2, "make_vocab_size_divisible_by": 100}),
)


@pytest.mark.slow  # by default on one other layout: the test above
@pytest.mark.parametrize("case", [AVERAGES, "frozen embedding, fp32, zero 1"])
def test_any_layout_reads_the_engines_checkpoints(
    case: str, trained: Trained, tmp_path: Path
) -> None:
    """Loading and saving with other world sizes, ZeRO stages, layers per stage and padding changes
    no bit."""
    for world_size, layout in OTHERS:
        options = {**CASES[case], "batch_size": 6, **layout}
        found, *_ = saved_again(
            trained(case) / "whole", world_size, options, tmp_path / str(world_size)
        )
        assert_same(found, last(trained(case) / "whole"))


def test_padding_of_the_vocabulary_may_change(tmp_path: Path) -> None:
    """A checkpoint saved with padding resumes without it like a run that keeps it, and one line
    reports the change."""
    padded = {"make_vocab_size_divisible_by": 100, "tie_word_embeddings": False, "zero_stage": 3}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run_distributed(2, train_on, {**padded, "experiment_dir": str(whole)})
    copy_checkpoint(whole, MIDDLE, resumed)
    plain = {**padded, "make_vocab_size_divisible_by": 1, "experiment_dir": str(resumed)}
    run_distributed(2, train_on, plain)
    assert len(curve(resumed)) == LAST - MIDDLE
    for place, line in curve(resumed).items():
        losses = [float.fromhex(some["loss"]) for some in (line, curve(whole)[place])]
        np.testing.assert_allclose(*losses, rtol=1e-6)
    assert "make_vocab_size_divisible_by: 100 in the checkpoint, 1 now" in log_of(resumed)
    saved = manifest.read(whole / "checkpoints" / str(LAST)).parameters
    assert saved["embedding.word.weight"].shape == saved["head.output.weight"].shape == (64, 32)


def test_masters_are_the_same_bits_split_or_not(trained: Trained, tmp_path: Path) -> None:
    """--split_master_weights changes the storage of fp32 masters, not their values: either run
    loads the other's."""
    source, options = trained(LION) / "whole", {**CASES[LION], "batch_size": 6}
    expected = last(source)
    joined, *_ = saved_again(
        source, 3, {**options, "split_master_weights": False}, tmp_path / "joined"
    )
    (tmp_path / "joined" / "again").rename(tmp_path / "checkpoints")
    split, *_ = saved_again(tmp_path, 2, options, tmp_path / "split")
    assert_same(joined, expected)
    assert_same(split, expected)
    trained_names = {name for name, _ in expected} - frozen_names(expected)
    low_halves = [expected[name, "weights"].view(torch.int32) & 0xFFFF for name in trained_names]
    assert sum(int(half.count_nonzero()) for half in low_halves) > 1000, (
        "masters that are bf16 prove nothing"
    )


def test_frozen_then_trained(trained: Trained, tmp_path: Path) -> None:
    """Moments of thawed parameters start at zero and their averages at the weights, which two lines
    count; the others keep theirs. Frozen again, the parameters are those of before."""
    source, run = trained(AVERAGES) / "whole", tmp_path / "run"
    before = last(source)
    thawed = {**CASES[AVERAGES], "freeze": (), "zero_stage": 1, "batch_size": 6}
    frozen = frozen_names(before)
    after, log, dtypes = saved_again(source, 3, thawed, run)
    assert dtypes == {"trained": ["torch.float32"], "frozen": []}
    assert frozen and frozen_names(after) == set()
    for (name, kind), values in after.items():
        if (name, kind) in before:
            assert torch.equal(values, before[name, kind].float())
        elif kind == "average":
            assert torch.equal(values, after[name, "weights"])
        else:
            assert kind != "weights" and name in frozen and not values.any()
    count = f"{len(frozen)} of {len({name for name, _ in after})} parameter tensors have no"
    assert (
        log.count(f"{count} exp_avg and exp_avg_sq")
        == log.count(f"{count} average there (they were frozen")
        == 1
    )
    assert (
        f"freeze: {' '.join(MIXED['freeze'])} in the checkpoint, none now" in log
        and "begins now" not in log
    )
    (run / "again").rename(tmp_path / "checkpoints")
    assert_same(
        saved_again(tmp_path, 2, {**CASES[AVERAGES], "batch_size": 6}, tmp_path / "frozen")[0],
        before,
    )
    run_distributed(2, train_on, {**thawed, "experiment_dir": str(run), "train_iters": 6})
    losses = [
        float.fromhex(line["loss"])
        for (phase, _), line in curve(run).items()
        if phase == "training"
    ]
    assert len(losses) == 2 and np.isfinite(losses).all()
    later = read_all(run / "checkpoints" / "6")
    assert all(later[name, "exp_avg_sq"].any() for name in frozen)
    assert not any(torch.equal(later[name, "weights"], after[name, "weights"]) for name in frozen)


def test_trained_then_frozen(tmp_path: Path) -> None:
    """Weights come from the fp32 master, rounded only if low precision was requested; their moments
    are gone."""
    options = {**BF16, "experiment_dir": str(tmp_path / "run"), "zero_stage": 1}
    run_distributed(2, train_on, options)
    before = last(tmp_path / "run")
    for low, more in ((False, {}), (True, {"split_master_weights": True})):
        changed = {**options, **MIXED, **(LOW if low else {}), **more, "batch_size": 6}
        after, log, dtypes = saved_again(tmp_path / "run", 3, changed, tmp_path / str(low))
        assert dtypes == {
            "trained": ["torch.float32"],
            "frozen": ["torch.bfloat16" if low else "torch.float32"],
        }
        frozen = frozen_names(after)
        expected = {
            (name, kind): values.bfloat16() if low and name in frozen else values
            for (name, kind), values in before.items()
            if kind == "weights" or name not in frozen
        }
        assert frozen
        assert_same(after, expected)
        assert (
            log.count("parameter tensors are frozen and were rounded: float32 to bfloat16") == low
        )


def weights_for_inference(
    distributed: Distributed, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return full weights and memory of a model that only evaluates."""
    from tests.support.harness import full_weights

    run = open_run(distributed, {**options, "train_iters": 0})
    assert not run.model.training
    return full_weights(run.model), bytes_by_kind(run.model)


@pytest.mark.parametrize("case", [pytest.param(LION, marks=pytest.mark.slow), AVERAGES])
def test_inference_reads_the_weights_alone(case: str, trained: Trained, tmp_path: Path) -> None:
    """A model without moments computes with the weights of the checkpoint, in the training
    dtype."""
    copy_checkpoint(trained(case) / "whole", LAST, tmp_path)
    options = {**CASES[case], "experiment_dir": str(tmp_path), "batch_size": 6}
    saved = last(tmp_path)
    for weights, memory in run_distributed(3, weights_for_inference, options):
        assert memory["optimizer moments"] == memory["gradient shards"] == 0
        for name, values in weights.items():
            assert np.array_equal(values, saved[name, "weights"].bfloat16().float().numpy()), name


# -- averages
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_validation_never_changes_the_weights(ranks: int, tmp_path: Path) -> None:
    """In fp32, evaluating and exporting averages after every iteration or never gives the same
    weights, moments and averages. Before the first update, averages equal the weights."""
    busy = {"validation_iters": 1, "validation_interval": 1, "validation_at_start": True}
    busy |= {"export_interval": 1, "export_weights": "average"}
    for name, more in (("never", {}), ("always", busy)):
        run_distributed(
            ranks,
            train_on,
            {**EMA, **more, "batch_size": 4, "experiment_dir": str(tmp_path / name)},
        )
    assert_same(last(tmp_path / "never"), last(tmp_path / "always"))
    never, always = curve(tmp_path / "never"), curve(tmp_path / "always")
    assert len(never) == LAST and len(always) == 2 * LAST + 1
    assert all(always[place] == line for place, line in never.items())
    assert always["validation", 0]["loss"] == always["validation", 0]["averaged_loss"]


def test_averaging_switched_on_off_and_over(tmp_path: Path) -> None:
    """Averaging that starts later begins with the loaded weights; another type starts over; without
    it averages are dropped. Each is reported once."""
    run = tmp_path / "run"
    run_distributed(1, train_on, {**MIXED, "experiment_dir": str(run)})
    plain = last(run)
    begun, log, _ = saved_again(run, 1, {**MIXED, **EMA}, tmp_path / "on")
    run_distributed(1, train_on, {**MIXED, **EMA, "experiment_dir": str(run), "train_iters": 6})
    trained = read_all(run / "checkpoints" / "6")
    assert all(
        not torch.equal(trained[name, "average"], trained[name, "weights"])
        for name in averaged_names(trained)
    )
    over, log_over, _ = saved_again(run, 1, {**MIXED, **SQRT}, tmp_path / "over", 6)
    dropped, log_off, _ = saved_again(run, 1, MIXED, tmp_path / "off", 6)
    for contents, said, kind in ((begun, log, "ema"), (over, log_over, "ema_decay_sqrt")):
        averaged = averaged_names(contents)
        assert averaged and all(
            torch.equal(contents[name, "average"], contents[name, "weights"]) for name in averaged
        )
        assert said.count(f"averaging (--ema_type={kind}) begins now, from these weights") == 1
        assert {key for key in contents if key[1] != "average"} == plain.keys()
    assert (
        log_off.count("it holds averaged weights, which a run without --ema_type neither uses nor")
        == 1
    )
    assert dropped.keys() == plain.keys()


def evaluated_alone(distributed: Distributed, options: dict[str, Any]) -> int:
    """Train; then validate and export without training; return the bytes of the averages."""
    train_on(distributed, options)
    if distributed.rank == 0:
        Path(options["experiment_dir"], "export", str(LAST)).rename(
            Path(options["experiment_dir"], "first")
        )
    run = finished_run(distributed, {**options, "train_iters": 0})
    assert not run.model.training
    return int(bytes_by_kind(run.model)["averages"])


@pytest.mark.parametrize(
    "more",
    [pytest.param({}, marks=pytest.mark.slow), {**SPLIT, "zero_stage": 2}],
    ids=["fp32", "split"],
)
def test_a_run_that_trains_nothing_evaluates_and_exports_the_averages(
    more: dict[str, Any], tmp_path: Path
) -> None:
    """--train_iters=0 with a checkpoint gives both losses of the run that wrote it, and exports its
    averages."""
    load_file = pytest.importorskip("safetensors.torch").load_file
    options = {**SQRT, **VALIDATED, **more, "export_interval": LAST, "export_weights": "average"}
    options |= {"experiment_dir": str(tmp_path), "freeze": ("blocks.0",)}
    assert min(run_distributed(2, evaluated_alone, options)) > 0
    records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    validations = [
        record
        for record in records
        if (record["phase"], record["iteration"]) == ("validation", LAST)
    ]
    trained, alone = ((record["loss"], record["averaged_loss"]) for record in validations)
    assert trained == alone
    folders = (tmp_path / "first", tmp_path / "export" / str(LAST))
    one, other = (load_file(folder / "model.safetensors") for folder in folders)
    assert one.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in one.items()
    )
    saved = last(tmp_path)
    dtype = torch.bfloat16 if more else torch.float32
    averaged, frozen = "blocks.1.mlp.down.bias", "blocks.0.mlp.down.bias"
    assert torch.equal(one["transformer.h.1.mlp.c_proj.bias"], saved[averaged, "average"].to(dtype))
    assert torch.equal(one["transformer.h.0.mlp.c_proj.bias"], saved[frozen, "weights"].to(dtype))
    assert not torch.equal(saved[averaged, "average"], saved[averaged, "weights"])
