"""Conditions that options declare: idle options are warned about and broken rules refused, and
nothing else is.

The tests parse each declaration themselves and make values that meet or break one condition at a
time.
"""

import re
from typing import Any

from megatron_lite.config import Draft, flatten, unflatten
from megatron_lite.config.values import FLAGS, is_legal, parse_list, parse_value
from megatron_lite.validation import resolve, warnings
from megatron_lite.validation.rules import declared

RUN = {
    "dataset_source": "random",
    "train_iters": 10,
    "experiment_dir": "/run",
    "lr_decay_style": "cosine",
}
# 15 only with --experiment_dir
BASE = flatten(resolve(unflatten(RUN), 1)) | {"checkpoint_minutes": None}
FALSY: list[Any] = [None, False, 0, "", ()]


def parsed(name: str, text: str) -> Any:
    return (
        parse_list(FLAGS[name], [text]) if FLAGS[name].is_list else parse_value(FLAGS[name], text)
    )


def candidates(name: str) -> list[Any]:
    """Return legal values of an option: texts that a user may type, nothing, and last the
    default."""
    flag = FLAGS[name]
    texts = (*flag.choices[::-1], "1", "0", "30", "0.5", "-1")
    nothing = [()] if flag.is_list else [None] if flag.optional else [""] if flag.is_text else []
    return [*(parsed(name, text) for text in texts if is_legal(flag, text)), *nothing, flag.default]


def settings(part: str, meet: bool) -> dict[str, Any]:
    """Return options that meet the first alternative of a condition without `and`, or break all of
    them."""
    found = {}
    for alternative in part.split(" or "):
        name, sign, values = re.findall(r"^(\w+)(!?=|)(.*)$", alternative)[0]
        listed = [parsed(name, text) for text in values.split("|")] if sign else FALSY
        any_of_them = (sign == "=") == meet
        found[name] = next(
            value for value in (*candidates(name), *listed) if (value in listed) == any_of_them
        )
        if meet:
            break
    return found


def changed(name: str) -> Any:
    return next(value for value in candidates(name) if value != FLAGS[name].default)


def parts(condition: str) -> list[str]:
    return condition.split(" and ") if condition else []


def test_options_without_effect_are_named_with_the_reason() -> None:
    """Each part of each `idle_unless` alone causes one warning with the options to change; met, it
    causes none."""
    for name, flag in FLAGS.items():
        conditions = parts(flag.idle_unless)
        for broken in (*conditions, None) if conditions else ():
            values = {**BASE, name: changed(name)}
            for part in conditions:
                values |= settings(part, part != broken)
            lines = [
                line
                for line in warnings(unflatten(values))
                if line.startswith(f"--{name} has no effect ")
            ]
            assert len(lines) == (broken is not None), (name, broken, lines)
            assert all(
                f"--{other}" in lines[0] for other in (settings(broken, False) if broken else ())
            ), lines


def test_broken_rules_are_refused_with_reason_and_fix() -> None:
    """Each rule of `needs` and `excludes`, where it applies: one line if it is broken, none if it
    is met."""
    for name, flag in FLAGS.items():
        rules = [(rule, True) for rule in flag.needs] + [(rule, False) for rule in flag.excludes]
        for rule, needed in rules:
            for broken in (True, False):
                values = {**BASE, name: changed(name), **settings(rule.condition, needed != broken)}
                for part in parts(rule.when):
                    values |= settings(part, True)
                lines = [
                    problem.message
                    for problem in declared(Draft(**values))
                    if rule.why in problem.message
                ]
                assert len(lines) == broken, (name, rule, lines)
                fix = rule.fix or (
                    f", or leave {name} out" if needed else "leave one of the two out"
                )
                assert all(
                    line.startswith(f"--{name}=") and line.endswith(fix) for line in lines
                ), lines
