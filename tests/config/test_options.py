"""Declarations of options: read-only areas, the writable draft, and conditions that name real options and values."""

from __future__ import annotations

import dataclasses
import re

import pytest

from megatron_lite.config import AREAS, Config, Draft, flatten, unflatten
from megatron_lite.config.option import Flag
from megatron_lite.config.values import FLAGS, is_legal


def test_a_configuration_is_read_only() -> None:
    """Neither an area nor an option of it can be assigned, existing or new."""
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model = config.model  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError, match="num_layers is read-only; use dataclasses.replace"):
        config.model.num_layers = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.number_of_layers = 3  # type: ignore[attr-defined]


def test_a_draft_holds_all_options_and_can_be_written() -> None:
    """Names are unique across areas, and flat values go there and back."""
    assert sorted(FLAGS) == sorted(field.name for area in AREAS.values() for field in dataclasses.fields(area))
    draft = Draft(**flatten(Config()))
    assert vars(draft) == {name: flag.default for name, flag in FLAGS.items()} and draft.changed(*FLAGS) == []
    draft.num_layers, draft.lr_cycle_minima = 3, (7,)
    assert draft.changed(*FLAGS) == ["num_layers", "lr_cycle_minima"]
    assert unflatten(vars(draft)).model.num_layers == 3


def conditions(option: Flag) -> list[str]:
    """Return every condition that an option declares, but not where a rule counts (that may name the option itself)."""
    return [text for text in (option.idle_unless, *(rule.condition for rule in option.needs + option.excludes)) if text]


def places(option: Flag) -> list[str]:
    return [rule.when for rule in option.needs + option.excludes if rule.when]


def test_conditions_name_other_options_and_their_values() -> None:
    """The reason of a rule is a clause without a fix of its own, so that the generated one fits behind it."""
    for name, option in FLAGS.items():
        for text in (*conditions(option), *places(option)):
            for alternative in re.split(" and | or ", text):
                other, _, values = alternative.partition("!=" if "!=" in alternative else "=")
                assert (other != name or text in places(option)) and other in FLAGS, name
                for value in values.split("|") if values else ():
                    assert value == "none" and FLAGS[other].optional or is_legal(FLAGS[other], value), name
        for rule in option.needs + option.excludes:
            assert len(rule.why) > 10 and ";" not in rule.why and not rule.why.endswith("."), name
