"""The help fits on two screens; the banner shows every option and marks changed ones."""

import re
import shlex
from pathlib import Path

import pytest

from megatron_lite.cli.help import banners, help_text
from megatron_lite.cli.unknown_flags import instead, refused
from megatron_lite.config import flatten, unflatten
from megatron_lite.config.values import FLAGS, SPELLINGS, written
from megatron_lite.validation import resolve


def test_help_fits_on_two_screens() -> None:
    """At most two screens of 50 lines of 120 columns, with every basic option once and its
    default."""
    lines = help_text(everything=False).splitlines()
    assert len(lines) <= 100 and max(map(len, lines)) <= 120
    for flag in FLAGS.values():
        assert sum(line.startswith(f"  --{flag.name}=") for line in lines) == flag.basic
    assert any("--num_layers=N" in line and line.endswith("[12]") for line in lines)
    assert any("--zero_stage=N|auto" in line for line in lines)
    assert "--help_all" in "\n".join(lines)


@pytest.mark.parametrize("everything", [False, True])
def test_every_heading_has_options(everything: bool) -> None:
    """An area without options to show has no heading."""
    lines = help_text(everything).splitlines()
    headings = [
        place for place, line in enumerate(lines) if line.endswith(":") and line == line.strip()
    ]
    assert len(headings) >= 10
    assert all(lines[place + 1].startswith("  --") for place in headings)


def test_daily_options_are_in_the_short_help() -> None:
    """The flags of the README's commands on one's own text stand in --help."""
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    (command,) = re.findall(r"^torchrun --standalone .*--tokenizer_file.*$", readme, re.M)
    flags = re.findall(r" --(\w+)=", command.split("pretrain_gpt.py")[1])
    shown = help_text(everything=False)
    assert len(flags) > 10 and not [
        flag for flag in flags if f"  --{SPELLINGS[flag].name}=" not in shown
    ]


def test_help_all_has_everything() -> None:
    """It has every option, alias, refused flag and flag of another program."""
    text = help_text(everything=True)
    assert max(map(len, text.splitlines())) <= 120
    for flag in FLAGS.values():
        assert f"  --{flag.name}=" in text
        assert all(f"--{alias}" in text for alias in flag.aliases)
    assert all(f"--{name}=" in text for name in refused())
    assert all(f"--{name}" in text for name in instead())


def marked(world_size: int = 1, **options: object) -> set[str]:
    """Return the names that the banner marks as different from the default."""
    config = resolve(unflatten({"dataset_source": "random", **options}), world_size)
    lines = banners(config, {})[0].splitlines()[1:-1]
    return {line.split()[1] for line in lines if line.startswith("*")} - {"dataset_source"}


def test_banner_lists_every_option_sorted() -> None:
    """Each option has one dotted line with its value as typed; the derived numbers keep their
    order."""
    config = resolve(unflatten({"data_path": ("0.5", "a", "0.5", "b"), "gated": True}), 2)
    lines = banners(config, {"parameters": "1,234", "a": "b"})[0].splitlines()
    split = next(place for place, line in enumerate(lines) if " derived " in line)
    names = [line[2:].split(" ")[0] for line in lines[1:split]]
    assert names == sorted(flatten(config))
    assert "* data_path " in "\n".join(lines) and lines[names.index("data_path") + 1].endswith(
        ". 0.5 a 0.5 b"
    )
    assert lines[names.index("window_size") + 1].endswith(". (full causal attention)")
    assert lines[names.index("split") + 1].endswith(". 969,30,1")
    assert [line.split()[0] for line in lines[split + 1 : -1]] == ["parameters", "a"]
    assert lines[0].startswith("---") and " end of arguments " in lines[-1]
    assert (
        len(
            {
                line.index(" ", 2 + len(name) + 1)
                for name, line in zip(names, lines[1:split], strict=True)
            }
        )
        == 1
    )


def test_banner_marks_what_differs_from_the_default() -> None:
    """A derived value is not marked, unless it is not the one that would have been derived."""
    assert marked() == set()
    assert marked(8, hidden_size=512, num_layers=3, train_iters=7, sequence_length=4096) == {
        "hidden_size",
        "num_layers",
        "train_iters",
        "sequence_length",
    }
    assert marked(init_method_std=0.5, kv_channels=128, head_groups=1) == {
        "init_method_std",
        "head_groups",
    }
    assert marked(2, batch_size=8, micro_batch_size=2) == {"batch_size", "micro_batch_size"}
    assert marked(2, batch_size=8) == {"batch_size"}
    split = {"micro_batch_size": 2, "breadth_first_micro_batches": 4}
    assert marked(2, **split) == {"batch_size", *split}, (
        "the batch follows, but nothing else gives the same numbers"
    )
    assert marked(2, micro_batch_size=1) == set()
    assert marked(4, tensor_parallel=2) == {"tensor_parallel"}
    assert marked(experiment_dir="/x/y", gated=True) == {"experiment_dir", "gated"}
    assert marked(experiment_dir="/x/y", experiment_name="z") == {
        "experiment_dir",
        "experiment_name",
    }


def test_short_banner_has_what_differs_as_typed() -> None:
    """Options that differ from the default, in lines of 118 columns that a shell reads back, then
    derived numbers."""
    values = {
        "num_layers": 3,
        "data_path": ("0.5", "a b", "0.5", "c"),
        "experiment_dir": "/x",
        "rope_factor": None,
    }
    config = resolve(unflatten({**values, "lr": 3e-4, "train_iters": 7}), 1)
    title, *lines = banners(config, {"parameters": "1,234"})[1].splitlines()
    assert "/x/config.json" in title
    assert lines[-1].split() == ["parameters", "." * 38, "1,234"]
    typed = shlex.split(" ".join(lines[:-1]))
    assert typed == [
        "--data_path=0.5 a b 0.5 c",
        "--experiment_dir=/x",
        "--lr=0.0003",
        "--num_layers=3",
        "--train_iters=7",
    ]
    many = resolve(
        unflatten({"data_path": tuple(f"/data/{number:04d}" for number in range(1250))}), 1
    )
    assert max(map(len, banners(many, {})[1].splitlines())) < 250
    assert "... (1,250 words)" in banners(many, {})[1]


def test_values_are_written_as_typed() -> None:
    """Numbers without rounding and without a needless fraction."""
    for value, text in (
        (None, "none"),
        (True, "1"),
        (False, "0"),
        (7, "7"),
        (1.0, "1"),
        (0.1, "0.1"),
        (3e-6, "3e-06"),
        (1e300, "1e+300"),
        ((969.0, 0.5), "969,0.5"),
        (("a", "b"), "a b"),
        ((), ""),
        ("x", "x"),
        (65536.0, "65536"),
    ):
        assert written(value) == text
