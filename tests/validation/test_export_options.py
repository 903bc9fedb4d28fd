"""Exports: dtypes, layouts, sizes and callbacks; and the same weights through the converter.

Exported files do not depend on the number of ranks, the ZeRO stage or the stages. The checkpoint of
the same iteration is a second way to the same numbers: the converter reads it without the engine.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_lite.commands import convert_checkpoint
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.huggingface.load_pretrained import open_source
from megatron_lite.parameter import DTYPES
from tests.support import harness
from tests.support.harness import run_distributed, tiny_config, train_whole
from tests.support.launch import TINY, read_exit, run

LLAMA: dict[str, Any] = {**harness.LLAMA, "kv_channels": 12}
CANARY = "s3cr3t-canary-of-the-callback"


def train_here(distributed: Distributed, options: dict[str, Any]) -> None:
    """Train, save and export through the program's own loop."""
    train_whole(distributed, tiny_config(distributed.world_size, **options))


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files but the model card, which describes the training."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "ZeRO 1": (2, {"zero_stage": 1}),
    "ZeRO 3, other stages, frozen": (
        2,
        {"zero_stage": 3, "layers_per_stage": 2.0, "freeze": ("blocks.1",)},
    ),
}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "dtype", ["fp32", pytest.param("bf16", marks=SLOW), pytest.param("fp16", marks=SLOW)]
)
def test_every_layout_writes_the_same_bytes(tmp_path: Path, dtype: str) -> None:
    """Folders of untrained bf16 weights are identical: in the training dtype, and in fp32 and fp16
    from the masters; the fp32 ones equal those that an fp32 run exports."""
    start = {
        **LLAMA,
        "train_iters": 0,
        "export_interval": 1,
        "export_dtype": dtype,
        "export_shard_size": "20KB",
    }
    found = []
    for name, (ranks, layout) in LAYOUTS.items():
        options = {
            **start,
            **layout,
            "training_dtype": "bf16",
            "experiment_dir": str(tmp_path / name),
        }
        run_distributed(ranks, train_here, options)
        found.append(contents(tmp_path / name / "export" / "0"))
    assert found[0] == found[1] == found[2]
    assert len([name for name in found[0] if name.endswith(".safetensors")]) > 1
    run_distributed(1, train_here, {**start, "experiment_dir": str(tmp_path / "plain")})
    assert contents(tmp_path / "plain" / "export" / "0") == found[0]


@pytest.mark.parametrize(
    ("weights", "dtypes"),
    [("raw", ("bf16", "fp32")), pytest.param("average", ("bf16", "fp32", "fp16"), marks=SLOW)],
)
def test_the_converter_makes_the_same_folder_out_of_the_checkpoint(
    tmp_path: Path, weights: str, dtypes: tuple[str, ...]
) -> None:
    """Two ranks, ZeRO 3, bf16 training with averages and a frozen block: for every dtype the
    converted folder is the exported one, byte for byte; torch rounds fp32 to the other dtypes."""
    options = {
        **LLAMA,
        "training_dtype": "bf16",
        "zero_stage": 3,
        "train_iters": 3,
        "export_interval": 3,
    }
    options |= {
        "ema_type": "ema",
        "ema_beta": 0.5,
        "freeze": ("blocks.0",),
        "export_weights": weights,
    }
    states: dict[str, dict[str, Tensor]] = {}
    for dtype in dtypes:
        root = tmp_path / dtype
        run_distributed(
            2, train_here, {**options, "export_dtype": dtype, "experiment_dir": str(root)}
        )
        flags = [
            f"--from={root / 'checkpoints'}",
            f"--to={root / 'converted'}",
            "--format=huggingface",
            "--verify",
        ]
        flags += [f"--weights={weights}"] + ([] if dtype == "bf16" else [f"--dtype={dtype}"])
        assert convert_checkpoint.main(flags) == 0
        assert contents(root / "converted") == contents(root / "export" / "3"), dtype
        states[dtype] = load_file(root / "converted" / "model.safetensors")
    for dtype, state in states.items():
        assert all(
            torch.equal(value.to(DTYPES[dtype]), state[name])
            for name, value in states["fp32"].items()
        )
    assert any(
        not torch.equal(states["bf16"][name].float(), value)
        for name, value in states["fp32"].items()
    )


def losses(root: Path) -> dict[int, float]:
    lines = map(json.loads, (root / "metrics.jsonl").read_text().splitlines())
    return {line["iteration"]: line["loss"] for line in lines if line["phase"] == "training"}


def test_a_converted_checkpoint_resumes_as_the_original_does(tmp_path: Path) -> None:
    """Converting a checkpoint to other files keeps iteration, moments, averages and state, and the
    run resumes bit for bit. With averages as weights the iteration stays the same and the moments
    are new."""
    options = {
        **LLAMA,
        "training_dtype": "bf16",
        "train_iters": 6,
        "checkpoint_interval": 3,
        "ema_type": "ema",
    }
    options |= {"ema_beta": 0.5, "optimizer": "adamw", "skip_bad_steps": True}
    run_distributed(2, train_here, {**options, "experiment_dir": str(tmp_path / "first")})
    source = tmp_path / "first" / "checkpoints" / "3"
    target = tmp_path / "again" / "checkpoints" / "3"
    flags = [f"--from={source}", "--format=distributed", "--shard_size=20KB", "--verify"]
    assert convert_checkpoint.main([*flags, f"--to={target}"]) == 0
    run_distributed(2, train_here, {**options, "experiment_dir": str(tmp_path / "again")})
    first, again = losses(tmp_path / "first"), losses(tmp_path / "again")
    assert list(again) == [4, 5, 6] and all(
        first[iteration] == loss for iteration, loss in again.items()
    )
    averaged = tmp_path / "averaged" / "checkpoints" / "3"
    assert convert_checkpoint.main([*flags, "--weights=average", f"--to={averaged}"]) == 0
    run_distributed(1, train_here, {**options, "experiment_dir": str(tmp_path / "averaged")})
    assert list(losses(tmp_path / "averaged")) == [4, 5, 6]


def test_a_folder_can_be_resumed_and_started_from(tmp_path: Path) -> None:
    """A Hugging Face folder as checkpoints/0 and as --pretrained_checkpoint_path gives the same
    training."""
    start = {
        **LLAMA,
        "train_iters": 0,
        "export_interval": 1,
        "seed": 7,
        "experiment_dir": str(tmp_path / "start"),
    }
    run_distributed(1, train_here, start)
    folder, options = tmp_path / "start" / "export" / "0", {**LLAMA, "train_iters": 3}
    for name in ("resumed", "started"):
        target = tmp_path / name / ("checkpoints/0" if name == "resumed" else "pretrained")
        assert (
            convert_checkpoint.main([f"--from={folder}", f"--to={target}", "--format=distributed"])
            == 0
        )
        with open_source(folder) as theirs, open_source(target) as ours:
            assert ours.model == theirs.model
        more = {} if name == "resumed" else {"pretrained_checkpoint_path": str(target)}
        run_distributed(1, train_here, {**options, **more, "experiment_dir": str(tmp_path / name)})
    assert losses(tmp_path / "resumed") == losses(tmp_path / "started")
    run_distributed(1, train_here, {**options, "experiment_dir": str(tmp_path / "other")})
    assert losses(tmp_path / "other") != losses(tmp_path / "started"), "the weights did not matter"


def write_script(folder: Path, text: str) -> Path:
    path = folder / "callback.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def everything_written(folder: Path) -> bytes:
    return b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_a_weight_too_large_for_fp16_costs_the_export_and_not_the_run(tmp_path: Path) -> None:
    """A warning names the weight; the run leaves no export and calls no script, saves a checkpoint
    and exits with 0."""
    script, root = write_script(tmp_path, f"touch {tmp_path}/called"), tmp_path / "run"
    flags = [
        *TINY,
        "--train_iters=2",
        "--export_interval=1",
        "--export_dtype=fp16",
        "--init_method_std_embed=1e5",
    ]
    outcome = run(
        [*flags, f"--experiment_dir={root}", f"--export_callback_script={script}"], ranks=2
    )
    assert outcome.codes == [0, 0], outcome.output
    assert outcome.output.count("WARNING: no export of iteration") == 2, outcome.output
    assert "model.embed_tokens" in outcome.output or "transformer.wte" in outcome.output
    assert list((root / "export").iterdir()) == [] and not (tmp_path / "called").exists()
    assert (root / "checkpoints" / "2" / "manifest.json").exists()


@pytest.mark.parametrize("how", ["=", pytest.param(" ", marks=SLOW), "@file"])
def test_the_callback_gets_its_environment_and_nobody_else_does(tmp_path: Path, how: str) -> None:
    """The folder is complete when the script starts; values appear in no file and no line, names
    appear in config.json; a resumed run needs the flag again; a failing script causes a warning."""
    script = f'test -f "$1/config.json" || exit 9; echo "$1 $TOKEN" >> {tmp_path}/seen; echo "token $TOKEN"; exit 5'
    value, root = json.dumps({"TOKEN": CANARY, "REPO": "me/mine"}), tmp_path / "run"
    given = {
        "=": [f"--export_callback_env={value}"],
        " ": ["--export-callback-env", value],
        "@file": ["@more"],
    }[how]
    if how == "@file":
        (tmp_path / "more").write_text(f"--export_callback_env='{value}'")
        given = [f"@{tmp_path / 'more'}"]
    flags = [*TINY, "--export_interval=2", f"--experiment_dir={root}", "--checkpoint_interval=2"]
    flags += [f"--export_callback_script={write_script(tmp_path, script)}", *given]
    outcomes = [
        run([*flags, f"--train_iters={iterations}"])
        for iterations in ((2, 4) if how == "=" else (4,))
    ]
    assert [outcome.codes for outcome in outcomes] == [[0]] * len(outcomes), outcomes
    lines = (tmp_path / "seen").read_text().splitlines()
    assert lines == [f"{root}/export/{iteration} {CANARY}" for iteration in (2, 4)]
    output = "".join(outcome.output for outcome in outcomes)
    assert "export 4: token ..." in output and "ended with exit code 5" in output
    assert CANARY not in output and CANARY.encode() not in everything_written(root)
    assert json.loads((root / "config.json").read_text())["export_callback_env"] == "TOKEN,REPO"


WRONG: dict[str, tuple[list[str], str]] = {
    "no JSON": ([f"--export_callback_env=TOKEN={CANARY}"], "not JSON"),
    "a list": ([f'--export_callback_env=["{CANARY}"]'], "not a JSON object"),
    "a number": (
        [f'--export_callback_env={{"A": "{CANARY}", "N": 1}}'],
        "the value of N is not a string",
    ),
    "a quoted word": ([f'--export_callback_env=\'{{"A": "{CANARY}"}}\''], "literal quote"),
    "cut by the shell": (
        ['--export_callback_env={"A":', f'"{CANARY}"}}'],
        "words follow the value",
    ),
    "cut behind a blank": (
        ["--export_callback_env", '{"A":', f'"{CANARY}"}}'],
        "words follow the value",
    ),
    "no script": (
        [f'--export_callback_env={{"A": "{CANARY}"}}', "--export_callback_script=/nowhere"],
        "no such file",
    ),
    "a bad size": (["--export_shard_size=5gb"], "write 5GB"),
    "no architecture": (
        ["--activation_type=squared_relu", "--gated=1"],
        "no Hugging Face architecture",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_come_before_training_and_show_no_secret(tmp_path: Path, case: str) -> None:
    """Errors exit with 2 and one message, without a secret in it or in exit.json."""
    flags, said = WRONG[case]
    outcome = run([*TINY, "--export_interval=2", f"--experiment_dir={tmp_path / 'run'}", *flags])
    assert outcome.codes == [2] and said in outcome.output, outcome.output
    assert read_exit(tmp_path / "run")["exit_code"] == 2
    assert CANARY not in outcome.output and CANARY.encode() not in everything_written(
        tmp_path / "run"
    )
    assert "training @" not in outcome.output and not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_dry_run_refuses_what_cannot_be_exported(tmp_path: Path) -> None:
    """A dry run reports the same error as the run."""
    flags = [
        "--dry_run=1",
        "--export_interval=2",
        "--activation_type=squared_relu",
        "--gated=1",
        "--qk_layernorm=1",
    ]
    outcome = run([*TINY, *flags])
    assert outcome.codes == [2] and "no Hugging Face architecture" in outcome.output, outcome.output
