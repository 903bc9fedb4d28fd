"""Options of earlier versions: commands, configurations and checkpoints with them go on, or say
what to write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.checkpoint import manifest
from megatron_lite.checkpoint.compatibility import differences, moved_rate
from megatron_lite.checkpoint.saved_state import with_current_names
from megatron_lite.cli.parse import parse
from megatron_lite.config import Config, flatten, unflatten
from megatron_lite.config.values import FLAGS, SPELLINGS, written
from megatron_lite.errors import DamagedError, UsageError
from megatron_lite.huggingface.model_folder import checkpoint_values
from megatron_lite.schedules.learning_rate import learning_rate
from megatron_lite.validation import resolve
from scripts.replay_step import configuration
from tests.checkpoint.test_damage import seal
from tests.support.launch import TINY, succeed
from tests.support.results import assert_same_run

RUN = "--dataset_source=random --train_iters=200 --lr_decay_style=cosine --experiment_dir=x".split()

# Removed option -> its default, another value, and what the refusal of that says to write, if
# anything.
REMOVED = {
    "pipeline_delay": ("0.0", "1", ""),
    "checkpoint_offset": ("0", "5", "--checkpoint_interval=<iterations>"),
    "stop_offset": ("0", "5", "--stop_interval=<iterations>"),
    "log_timestamps": ("0", "1", ""),
    "enable_all_loggers": ("0", "1", ""),
    "tensor_logs_show_elements": ("8", "16", "--save_tensor_logs=1"),
    "data_sample_warn_time_ms": ("1000.0", "50", "--num_workers"),
    "data_batch_warn_time_ms": ("1000", "50", "--num_workers"),
    "profile_wait": ("0", "2", "--profile_skip=<iterations>"),
    "profile_warmup": ("1", "0", "--profile_skip=<iterations>"),
    "profile_cycles": ("1", "3", "--profile_active=<iterations>"),
    "profile_export": ("1", "0", ""),
    "profile_averages": ("0", "2", "--profile_cpu"),
    "profile_trace": ("0", "1", "--profile_cpu=1"),
    "profile_log": ("0", "1", ""),
    "profile_column_width": ("80", "120", "--profile_cpu"),
    "load_pretrained_weights": ("1", "0", "--load_parts=architecture"),
    "load_pretrained_optimizer": ("0", "1", "--load_parts=model,optimizer"),
}

# The others of the 45 that were weighed: each means something that no other option says, or later
# work needs it.
KEPT = """
    throttle_cpu throttle_cpu_rate throttle_cpu_delay init_method_std_embed init_method_std_qkv
    init_method_std_attn_proj init_method_std_mlp_1 init_method_std_mlp_2 min_loss_scale loss_scale_window profile_skip
    fim_fragment_rate fim_ignore_prefix multiprocessing_context use_pretrained_config ignore_pretrained_config
    checkpoint_minutes validation_by_dataset export_weights sample_tokens sample_temperature sample_top_k sample_top_p
""".split()

# What was typed, and what it is today.
RENAMED = {
    f"--{name}_{typed}": f"--{name}={value}"
    for name in ("lr_warmup", "lr_wsd_decay", "lr_rewarmup", "lr_cycle", "lr_cooldown")
    for typed, value in {
        "iters=7": "7",
        "iters=1": "1",
        "fraction=0.25": "0.25",
        "fraction=1e-1": "0.1",
        "fraction=.5": "50%",
        "fraction=1": "1.0",
    }.items()
}


def parsed(*words: str) -> dict[str, Any]:
    return flatten(parse([*RUN, *words]).config)


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_option_has_an_answer(name: str) -> None:
    """Its default changes nothing; another value is refused, with what to write or how to go on."""
    default, other, instead = REMOVED[name]
    assert name not in SPELLINGS
    assert parsed(f"--{name}={default}") == parsed()
    with pytest.raises(UsageError) as error:
        parse([*RUN, f"--{name}={other}"])
    (line,) = str(error.value).splitlines()
    assert (
        line.startswith(f"--{name}={other} is refused: ")
        and f"accepted: --{name}={float(default):g}" in line
    )
    assert (instead or "--") in line, line


@pytest.mark.parametrize("name", KEPT)
def test_the_others_are_options(name: str) -> None:
    default = FLAGS[name].default
    assert parsed(f"--{name}={'none' if default is None else written(default)}")[name] == default


def test_show_all_options_is_answered() -> None:
    with pytest.raises(
        UsageError, match="--show_all_options is not a flag here: the log file and config.json in"
    ):
        parse([*RUN, "--show_all_options=1"])


@pytest.mark.parametrize("typed", RENAMED)
def test_a_renamed_option_means_the_same(typed: str) -> None:
    assert parsed(typed) == parsed(RENAMED[typed])


def test_of_both_names_the_last_counts() -> None:
    """With a warning; earlier versions refused them together."""
    arguments = parse([*RUN, "--lr_warmup_iters=5", "--lr_warmup_fraction=0.5"])
    assert arguments.warnings == ("--lr_warmup is given twice: 0.5 is used, 5 is not",)
    assert arguments.config.learning_rate.lr_warmup == "0.5"


def test_one_is_an_iteration_and_a_point_makes_it_all() -> None:
    """Rates of the first update: 1 is one iteration of warmup, 1.0 and 100% the whole cycle of
    200."""
    rates = {}
    for value in ("1", "1.0", "100%", "0.05", "5%", "10", "0", "0.0"):
        config = resolve(parse([*RUN, "--lr=0.01", f"--lr_warmup={value}"]).config, 1)
        rates[value] = learning_rate(config, 1)
    assert rates["1"] == 0.01 and rates["0"] == rates["0.0"] < 0.01
    assert rates["1.0"] == rates["100%"] == pytest.approx(0.01 / 200)
    assert rates["0.05"] == rates["5%"] == rates["10"] == pytest.approx(0.01 / 10)


@pytest.mark.parametrize(
    "value", ["1.5", "200%", "-0.1", "100.0", "nan%", "%", "1e-400", "ten%", "0x1p-1", "-1"]
)
def test_what_is_neither_a_number_nor_a_share_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="--lr_warmup=") as error:
        parse([*RUN, f"--lr_warmup={value}"])
    assert "a share" in str(error.value)


def test_a_cycle_has_a_length() -> None:
    for value in ("0", "0.0", "0%"):
        with pytest.raises(UsageError, match="--lr_cycle=.*must be >= 1, or a share as 0.1 or 10%"):
            parse([*RUN, f"--lr_cycle={value}"])


# -- saved configurations
# ----------------------------------------------------------------------------------------------

PAIRS = ("lr_warmup", "lr_wsd_decay", "lr_rewarmup", "lr_cycle", "lr_cooldown")


def saved_earlier(config: Config) -> dict[str, Any]:
    """Return a configuration as an earlier version wrote it: two options for each length, and
    removed ones."""
    saved = flatten(config)
    for name in PAIRS:
        value = saved.pop(name)
        is_share = isinstance(value, str)
        unset = FLAGS[name].default
        saved |= {
            f"{name}_iters": unset if is_share else value,
            f"{name}_fraction": float(value) if is_share else None,
        }
    return {
        **saved,
        **dict.fromkeys((*REMOVED, "show_all_options"), 3),
        "load_pretrained_weights": True,
    }


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--lr_warmup=20 --lr_cooldown=10 --lr_decay_style=constant",
        "--lr_warmup=0.1 --lr_wsd_decay=0.3 --lr_num_cycles=2 --lr_rewarmup=0.05",
        "--lr_warmup=1.0",
        "--lr_wsd_decay=0 --lr_cycle=0.5",
        "--lr_cycle=50 --lr_rewarmup=3 --lr_cooldown=10%",
    ],
)
def test_a_saved_configuration_is_read_with_the_same_numbers(words: str) -> None:
    """Nothing differs on a resume, and the rate of every iteration is the same."""
    config = resolve(parse([*RUN, *words.split()]).config, 1)
    current = with_current_names(saved_earlier(config))
    # no option is unknown
    assert checkpoint_values(current, "here").keys() == vars(config.model).keys()
    assert {name: current[name] for name in PAIRS} == {
        name: flatten(config)[name] for name in PAIRS
    }
    assert differences(current, config, None) == [] and moved_rate(current, config, 50) is None
    again = configuration({"config": saved_earlier(config)}, None)  # to replay a bad step
    assert again.learning_rate == config.learning_rate
    assert [learning_rate(again, step) for step in range(1, 221)] == [
        learning_rate(config, step) for step in range(1, 221)
    ]


@pytest.mark.parametrize(
    ("weights", "optimizer", "before", "now"),
    [
        (True, False, ["model"], ["model"]),
        (True, True, ["model"], ["model", "optimizer"]),
        (True, True, ["model", "step"], ["model", "optimizer", "step"]),
        (True, True, ["model", "optimizer", "step"], ["model", "optimizer", "step"]),
        (False, False, ["model"], ["architecture"]),
    ],
)
def test_what_an_earlier_version_loaded(
    weights: bool, optimizer: bool, before: list[str], now: list[str]
) -> None:
    """As a replay of a bad step before the first checkpoint loads it."""
    saved = {
        "load_pretrained_weights": weights,
        "load_pretrained_optimizer": optimizer,
        "load_parts": before,
    }
    assert configuration({"config": saved}, None).source.load_parts == tuple(now)


def test_a_run_of_an_earlier_version_resumes(tmp_path: Path) -> None:
    """A checkpoint and config.json with the names of then: the same command goes on as if nothing
    had changed."""
    flags = [word for word in TINY if "max_position_embeddings" not in word]  # as saved
    flags += ["--lr_warmup_fraction=0.5", "--lr_wsd_decay_iters=2", "--lr_decay_style=linear"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    succeed([*flags, f"--experiment_dir={whole}"])
    succeed([*flags, f"--experiment_dir={stopped}", "--stop_interval=3"])
    for path in (stopped / "checkpoints" / "3" / "manifest.json", stopped / "config.json"):
        content = json.loads(path.read_bytes())
        if "config" in content:
            content["config"] = saved_earlier(unflatten(tuples(content["config"])))
            path.write_bytes(seal(content))
        else:
            path.write_text(json.dumps(saved_earlier(unflatten(tuples(content)))))
    output = succeed([*flags, f"--experiment_dir={stopped}", "--stop_interval=6"]).output
    assert (
        "the learning rate of iteration" not in output
        and "lr_" not in output.partition("resumed")[2]
    ), output
    assert_same_run(stopped, whole)
    broken = json.loads((stopped / "checkpoints" / "6" / "manifest.json").read_bytes())
    broken["config"] |= {"lr_warmup_iters": 0, "lr_warmup_fraction": 1.5}
    (stopped / "checkpoints" / "6" / "manifest.json").write_bytes(seal(broken))
    with pytest.raises(DamagedError, match="config: lr_warmup: a fraction is between 0 and 1.0"):
        manifest.read(stopped / "checkpoints" / "6")


def tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
