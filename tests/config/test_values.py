"""A value that is nearly a choice of its option suggests that choice; bounds of numbers are enforced."""

from __future__ import annotations

import re

import pytest

from megatron_lite.config.other_programs import refused_value
from megatron_lite.config.values import FLAGS, BadValueError, is_legal, limits, number, parse_list, parse_value


def suggested(name: str, text: str) -> tuple[str, ...]:
    """Return the choices that the answer to a value names."""
    with pytest.raises(BadValueError) as caught:
        parse_list(FLAGS[name], [text]) if FLAGS[name].is_list else parse_value(FLAGS[name], text)
    return caught.value.instead


def test_part_of_a_choice_suggests_that_choice() -> None:
    """The beginning or a word of a choice or its alias, or a choice with more behind it; then what looks similar."""
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
        for begun in {word[:end] for word in words for end in range(2, len(word)) if word[end - 1].isalnum()}:
            if is_legal(flag, begun) or refused_value(flag.name, begun):
                continue
            named = suggested(flag.name, begun)
            assert named and len(named) <= 3, (flag.name, begun)
            possible = {
                choice for word, choice in words.items() if word.replace("_", "").startswith(begun.replace("_", ""))
            }
            assert {*named} <= possible, (flag.name, begun)


def test_every_bound_of_a_number_is_enforced() -> None:
    """A number at an inclusive bound is legal; beyond a bound, or at an exclusive one, it is refused with the range."""
    bounded = 0
    for flag in (flag for flag in FLAGS.values() if flag.kind in ("int", "float")):
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
