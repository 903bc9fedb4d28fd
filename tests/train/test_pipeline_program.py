"""Pipeline parallelism by the program itself, on gloo processes: everything that a run writes has
the bits of P = 1."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.inspection import inspect
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.monitor.tensor_log import read_tensor_log
from tests.checkpoint.test_engine import assert_same, read_all
from tests.support.harness import run_distributed, tiny_config, train_whole
from tests.support.token_files import save_byte_tokenizer

TIMES = ("time", "_ms", "_s", "per_sec", "tflops", "mfu", "remaining", "mib", "run")
ITERATIONS = 2


def options(folder: Path, ranks: int, pipeline: int) -> dict[str, Any]:
    return {
        **dict(
            num_layers=4,
            vocab_size=257,
            sequence_length=24,
            batch_size=8,
            micro_batch_size=1,
            zero_stage=2,
        ),
        **dict(
            train_iters=ITERATIONS,
            lr=1e-2,
            lr_warmup=2,
            init_method_std=0.5,
            tie_word_embeddings=True,
        ),
        **dict(
            breadth_first_micro_batches=4, pipeline_parallel=pipeline, pipeline_first=pipeline > 1
        ),
        **dict(
            experiment_dir=str(folder / "run"),
            checkpoint_interval=1,
            export_interval=1,
            max_checkpoints=None,
        ),
        **dict(validation_iters=1, validation_interval=1, ema_type="ema", update_rms_clip=0.5),
        **dict(
            watch=("grads", "params", "updates", "opt_state"),
            watch_interval=1,
            watch_histograms=True,
        ),
        **dict(
            watch_per_layer=True,
            check_replicas_interval=1,
            save_tensor_logs=True,
            show_tensor_logs=False,
        ),
        **dict(
            debug_layer_outputs=2,
            debug_layer_gradients=2,
            debug_all_param_gradients=2,
            debug_param_update=2,
        ),
        **dict(debug_global_tensors=True, log_communication=True),
        **dict(
            tokenizer_file=str(folder / "tokenizer.json"),
            sample_prompts=str(folder / "prompts.txt"),
        ),
        **dict(sample_interval=1, sample_tokens=4),
    }


def train_until(distributed: Distributed, folder: str, stop: int | None) -> None:
    values = options(Path(folder), distributed.world_size, distributed.pipeline.world_size)
    run = train_whole(
        distributed, tiny_config(distributed.world_size, **values, stop_interval=stop)
    )
    run.experiment.release()


@functools.cache
def written() -> dict[str, dict[str, Any]]:
    """Return what the runs leave: one of 2 ranks, and one of 2 ranks, then 4 (P = 2)."""
    found = {}
    for name, starts in (("one", [1]), ("pipeline", [1, 2])):
        with tempfile.TemporaryDirectory() as directory:
            folder = Path(directory)
            save_byte_tokenizer(str(folder / "tokenizer.json"))
            (folder / "prompts.txt").write_text("the\na longer one\n")
            for pipeline in starts:
                stop = ITERATIONS // len(starts) if len(starts) > 1 else None
                groups = dict(pipeline_parallel=pipeline, pipeline_first=True)
                run_distributed(2 * pipeline, train_until, directory, stop, **groups)  # type: ignore[arg-type]
            found[name] = contents(folder / "run")
    return found


def contents(root: Path) -> dict[str, Any]:
    def records(name: str) -> list[dict[str, Any]]:
        lines = map(json.loads, (root / name).read_text().splitlines())
        return [
            {key: line[key] for key in line if not any(word in key for word in TIMES)}
            for line in lines
        ]

    logs: dict[str, Any] = {}
    for path in sorted(root.glob("runs/*/artifacts/tensor_logs*")):
        phase = path.name.partition("_rank")[0]
        logs |= {f"{phase} {entry.name}": entry.statistics for entry in read_tensor_log(path)}
    last = root / "checkpoints" / str(ITERATIONS)
    seen = inspect(last, values=True)
    assert not seen.problems
    return {
        "metrics": records("metrics.jsonl"),
        "watch": records("watch.jsonl"),
        "samples": records("samples.jsonl"),
        "exports": {
            str(path.relative_to(root)): path.read_bytes().replace(b"--stop_interval=1\n", b"")
            for path in root.glob("export/*/*")
        },
        "tensor logs": logs,
        "checkpoint": read_all(last),
        "ranks": seen.ranks,
    }


def test_a_run_that_changes_its_pipeline_writes_the_bits_of_one_that_does_not() -> None:
    """Metrics, validations of weights and averages, statistics, tensor logs, samples and exports,
    over a resume with twice as many ranks; pipeline ranks are neighbours."""
    one, pipeline = written()["one"], written()["pipeline"]
    assert (
        len(one["metrics"]) == 3 * ITERATIONS
        and len(one["watch"]) == ITERATIONS
        and len(one["samples"]) == ITERATIONS
    )
    assert len(one["exports"]) >= 6 and len(one["tensor logs"]) > 150
    for kind in ("metrics", "watch", "samples", "exports", "tensor logs"):
        assert pipeline[kind] == one[kind], kind
    assert_same(pipeline["checkpoint"], one["checkpoint"])


def test_checkpoints_name_the_pipeline() -> None:
    one, pipeline = written()["one"], written()["pipeline"]
    assert (one["ranks"], pipeline["ranks"]) == ("2", "2x2x1")
