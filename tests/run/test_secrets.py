"""Sizes and environment variables as typed, and the secrets hidden from them."""

from __future__ import annotations

import json

import pytest

from megatron_lite.config.structured_values import environment_values, size_bytes
from megatron_lite.config.values import BadValueError
from megatron_lite.errors import UsageError
from megatron_lite.run.secrets import masked, without_secrets

SECRET = "s3cr3t-value"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("500MB", 5 * 10**8),
        ("1KB", 1000),
        ("2GiB", 2**31),
        ("1TiB", 2**40),
        ("123", 123),
        ("7B", 7),
        ("1.5GB", 1_500_000_000),
        ("0.5KiB", 512),
        ("10 MB", 10**7),
    ],
)
def test_sizes_are_those_of_transformers(text: str, size: int) -> None:
    """KB is 1,000 bytes, KiB is 1,024."""
    assert size_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5gb", "write 5GB"),
        ("5Gb", "write 5GB"),
        ("2gib", "write 2GiB"),
        ("5G", "G is not a unit"),
        ("GB", "not a size"),
        ("-1", "not a size"),
        ("1e9", "not a size"),
        ("", "not a size"),
        ("0", "at least one byte"),
        ("0.1B", "at least one"),
        ("\uff15GB", "not a size"),
        ("9999999TiB", "less than 2**63"),
        ("nan", "not a size"),
    ],
)
def test_other_sizes_are_refused(text: str, said: str) -> None:
    """The message names the flag and what to write."""
    with pytest.raises(UsageError, match="^--export_shard_size=") as caught:
        size_bytes(text)
    assert said in str(caught.value)


def test_an_environment_is_an_object_of_texts() -> None:
    """Any text is a value, even an empty one."""
    values = {"A": SECRET, "_b1": "", "C": 'two\nlines, "quotes" and = and \u20ac'}
    assert environment_values(json.dumps(values)) == values and environment_values("{}") == {}


@pytest.mark.parametrize(
    "text",
    [
        SECRET,
        f"A={SECRET}",
        f'["{SECRET}"]',
        f'"{SECRET}"',
        "null",
        "1",
        f'{{"A": "{SECRET}"',
        f'{{"A": ["{SECRET}"]}}',
        f'{{"A": {{"B": "{SECRET}"}}}}',
        '{"A": 1}',
        f'{{"{SECRET} x": "1"}}',
        f'{{"A=B": "{SECRET}"}}',
        f'{{"A": "{SECRET}", "A": "x"}}',
        '{"A": "\\u0000"}',
        '{"A": "\\ud800"}',
        f"'{SECRET}'",
        "[" * 10**5,
    ],
)
def test_no_message_shows_a_value(text: str) -> None:
    """No error message repeats a value."""
    with pytest.raises(BadValueError) as caught:
        environment_values(text)
    assert SECRET not in str(caught.value) and SECRET[:6] not in str(caught.value)


def test_recorded_command_lines_have_no_secrets() -> None:
    """Values are hidden in both spellings, after `=` or as words; everything else is unchanged."""
    plain = ["--lr=1", "--data_path", "a", "b", "--gated"]
    for flag in ("--export_callback_env", "--export-callback-env"):
        assert without_secrets([*plain, f"{flag}={SECRET}", *plain]) == [*plain, f"{flag}=...", *plain]
        assert without_secrets([flag, f'{{"A": "{SECRET}', SECRET, "--gated"]) == [flag, "...", "...", "--gated"]


def test_longer_values_are_masked_first_and_short_ones_never() -> None:
    """A value that is a part of another one leaves no rest of it."""
    assert masked("abcdefgh abcd yes", ["abcd", "abcdefgh", "yes", ""]) == "... ... yes"
    assert masked("first second", ["first\nsecond"]) == "... ..."
