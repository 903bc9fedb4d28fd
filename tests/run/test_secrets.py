"""Sizes and environment variables as typed, and the secrets hidden from them."""

import json
import re

import pytest

from megatron_lite.config.structured_values import environment_values, size_bytes
from megatron_lite.config.values import BadValueError
from megatron_lite.errors import UsageError
from megatron_lite.run.secrets import masked, without_secrets

SECRET = "s3cr3t-value"


def test_sizes_are_those_of_transformers() -> None:
    """KB is 1,000 bytes, KiB is 1,024."""
    sizes = "123=123 7B=7 1KB=1000 10 MB=10000000 500MB=500000000 1.5GB=1500000000 5GB=5000000000 0.5KiB=512"
    sizes += " 2GiB=2147483648 1TiB=1099511627776"
    for text, size in re.findall(r"(\S+(?: MB)?)=(\d+)", sizes):
        assert size_bytes(text) == int(size), text


def test_other_sizes_are_refused() -> None:
    """The message names the flag and what to write."""
    refused = {
        "write 5GB": ("5gb", "5Gb"),
        "write 2GiB": ("2gib",),
        "G is not a unit": ("5G",),
        "not a size": ("GB", "-1", "1e9", "", "\uff15GB", "nan"),
        "at least one byte": ("0", "0.1B"),
        "less than 2**63": ("9999999TiB",),
    }
    for words, texts in refused.items():
        for text in texts:
            with pytest.raises(UsageError, match=f"^--export_shard_size=.*{re.escape(words)}"):
                size_bytes(text)


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
        assert without_secrets([*plain, f"{flag}={SECRET}", *plain]) == [
            *plain,
            f"{flag}=...",
            *plain,
        ]
        assert without_secrets([flag, f'{{"A": "{SECRET}', SECRET, "--gated"]) == [
            flag,
            "...",
            "...",
            "--gated",
        ]


def test_longer_values_are_masked_first_and_short_ones_never() -> None:
    """A value that is a part of another one leaves no rest of it."""
    assert masked("abcdefgh abcd yes", ["abcd", "abcdefgh", "yes", ""]) == "... ... yes"
    assert masked("first second", ["first\nsecond"]) == "... ..."
