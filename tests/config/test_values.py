"""Options: declarations, bounds, values that are nearly a choice, and the table of other programs'
flags and values."""

import dataclasses
import re

import pytest

from megatron_lite.config import AREAS, Config, Draft, flatten, unflatten
from megatron_lite.config.option import Flag
from megatron_lite.config.other_programs import Row, read_table, refused_value
from megatron_lite.config.values import (
    FLAGS,
    BadValueError,
    is_legal,
    limits,
    number,
    parse_list,
    parse_value,
)


def suggested(name: str, text: str) -> tuple[str, ...]:
    """Return the choices that the answer to a value names."""
    with pytest.raises(BadValueError) as caught:
        parse_list(FLAGS[name], [text]) if FLAGS[name].is_list else parse_value(FLAGS[name], text)
    return caught.value.instead


def test_part_of_a_choice_suggests_that_choice() -> None:
    """The beginning or a word of a choice or its alias, or a choice with more behind it; then what
    looks similar."""
    for typed, meant in (
        ("training_dtype=bfloat", "bf16"),
        ("training_dtype=fp", "fp32 fp16"),
        ("optimizer=mu", "muon"),
        ("lr_decay_style=cos", "cosine"),
        ("lr_decay_style=cosine_annealing", "cosine"),
        ("lr_decay_style=sqrt", "inv_sqrt"),
        ("normalization_type=layer", "layer_norm"),
        ("normalization_type=norm", "layer_norm rms_norm"),
        ("activation_type=square", "squared_relu"),
        ("attention_backend=flash_attn", "flash"),
        ("model=mistral", "mistral-7b mistral-7b-v0.3"),
        ("lr_decay_style=cosin", "cosine"),
        ("lr_decay_style=x", ""),
    ):
        name, _, text = typed.partition("=")
        assert suggested(name, text) == tuple(meant.split()), typed


def test_every_beginning_of_a_choice_suggests_that_choice() -> None:
    """From two letters on, for every option; three choices are named at most."""
    for flag in (flag for flag in FLAGS.values() if flag.choices):
        words = {word: flag.value_aliases.get(word, word) for word in flag.choices}
        words |= flag.value_aliases
        for begun in {
            word[:end] for word in words for end in range(2, len(word)) if word[end - 1].isalnum()
        }:
            if is_legal(flag, begun) or refused_value(flag.name, begun):
                continue
            named = suggested(flag.name, begun)
            assert named and len(named) <= 3, (flag.name, begun)
            possible = {
                choice
                for word, choice in words.items()
                if word.replace("_", "").startswith(begun.replace("_", ""))
            }
            assert {*named} <= possible, (flag.name, begun)


def test_every_bound_of_a_number_is_enforced() -> None:
    """A number at an inclusive bound is legal; beyond a bound, or at an exclusive one, it is
    refused with the range."""
    bounded = 0
    numbers = (flag for flag in FLAGS.values() if flag.kind in ("int", "float"))
    for flag in (flag for flag in numbers if not flag.is_list):
        option = flag
        for bound, step, inclusive in (
            (option.minimum, -1, True),
            (option.maximum, 1, True),
            (option.above, 0, False),
            (option.below, 0, False),
        ):
            if bound is not None:
                bounded += 1
                assert is_legal(flag, number(bound)) == inclusive, flag.name
                with pytest.raises(BadValueError, match=re.escape(f"must be {limits(flag)}")):
                    parse_value(flag, number(bound + step * max(1, abs(bound))))
    assert bounded > 150


TABLE = """\
# A comment.
[texts]
run: --experiment_dir=<folder>

[some program]
save out_dir -> {run} | checkpoints go
    to <folder>/checkpoints
max_steps -> --train_iters
warmup:steps | a remark = with -> signs | in it
dtype = float32 float | always
flash = 1 (switch) | {run}
[values]
device=tpu device=gpu:<number> | no {value}
"""


def test_every_kind_of_row() -> None:
    table = read_table(TABLE)
    assert table.programs["some program"] == (
        Row(
            ("save", "out_dir"),
            "--experiment_dir=<folder>",
            "checkpoints go to <folder>/checkpoints",
        ),
        Row(("max_steps",), "--train_iters"),
        Row(("warmup:steps",), remark="a remark = with -> signs | in it"),
        Row(("dtype",), remark="always", only=("float32", "float")),
        Row(("flash",), remark="--experiment_dir=<folder>", only=("1",), switch=True),
    )
    assert dict(table.values) == {"device=tpu": "no tpu", "device=gpu:<number>": "no gpu:<number>"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("save", "write <names> -> <flags>"),
        ("dtype = float32", "write <names> -> <flags>"),
        ("save -> {nothing}", "[texts] has no nothing"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(line: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(line)}: ") as caught:
        read_table(f"{TABLE}[other]\n{line}\n")
    assert said in str(caught.value)
    with pytest.raises(ValueError, match="^save -> --lr: write .program. above it"):
        read_table("save -> --lr\n")


def test_a_configuration_is_read_only() -> None:
    """Neither an area nor an option of it can be assigned, existing or new."""
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model = config.model  # type: ignore[misc]
    with pytest.raises(
        dataclasses.FrozenInstanceError, match="num_layers is read-only; use dataclasses.replace"
    ):
        config.model.num_layers = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.number_of_layers = 3  # type: ignore[attr-defined]


def test_a_draft_holds_all_options_and_can_be_written() -> None:
    """Names are unique across areas, and flat values go there and back."""
    assert sorted(FLAGS) == sorted(
        field.name for area in AREAS.values() for field in dataclasses.fields(area)
    )
    draft = Draft(**flatten(Config()))
    assert (
        vars(draft) == {name: flag.default for name, flag in FLAGS.items()}
        and draft.changed(*FLAGS) == []
    )
    draft.num_layers, draft.lr_cycle_minima = 3, (7,)
    assert draft.changed(*FLAGS) == ["num_layers", "lr_cycle_minima"]
    assert unflatten(vars(draft)).model.num_layers == 3


def conditions(option: Flag) -> list[str]:
    """Return every condition that an option declares, but not where a rule counts (that may name
    the option itself)."""
    return [
        text
        for text in (
            option.idle_unless,
            *(rule.condition for rule in option.needs + option.excludes),
        )
        if text
    ]


def places(option: Flag) -> list[str]:
    return [rule.when for rule in option.needs + option.excludes if rule.when]


def test_conditions_name_other_options_and_their_values() -> None:
    """The reason of a rule is a clause without a fix of its own, so that the generated one fits
    behind it."""
    for name, option in FLAGS.items():
        for text in (*conditions(option), *places(option)):
            for alternative in re.split(" and | or ", text):
                other, _, values = alternative.partition("!=" if "!=" in alternative else "=")
                assert (other != name or text in places(option)) and other in FLAGS, name
                for value in values.split("|") if values else ():
                    assert (
                        value == "none" and FLAGS[other].optional or is_legal(FLAGS[other], value)
                    ), name
        for rule in option.needs + option.excludes:
            assert len(rule.why) > 10 and ";" not in rule.why and not rule.why.endswith("."), name
