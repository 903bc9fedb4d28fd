"""Options of rotary positions and of attention in fp32: derived values and errors."""

from typing import Any

import pytest

from megatron_lite.cli.parse import parse
from megatron_lite.config import ModelConfig, unflatten
from megatron_lite.errors import UsageError
from megatron_lite.validation import resolve
from tests.support.tables import rows


def model(**options: Any) -> ModelConfig:
    """Resolve a model with heads of 10 channels; check that resolving again changes nothing."""
    sizes = dict(dataset_source="random", hidden_size=80, use_rotary_embeddings=True)
    config = resolve(unflatten({**sizes, **options}), 1)
    assert resolve(config, 1) == config
    return config.model


def test_the_base_has_two_names() -> None:
    """Both names are filled in, whichever is given, or neither."""
    assert (model().rotary_base, model().rotary_embedding_scale) == (10000.0, -9.210340371976184)
    assert model(rotary_base=500000.0).rotary_embedding_scale == -13.122363377404328
    assert model(rotary_embedding_scale=-13.122363377404328).rotary_base == 500000.0
    assert model(rotary_embedding_scale=-13.815510557964274).rotary_base == 1000000.0
    assert model(rotary_base=1e6, rotary_embedding_scale=-13.815510557964274).rotary_base == 1e6


@pytest.mark.parametrize(
    ("options", "filled"),
    [
        (dict(), (None,) * 10),
        (dict(rope_type="linear", rope_factor=2.0), (2.0, *(None,) * 9)),
        (dict(rope_type="llama3", rope_factor=8.0), (8.0, 2048, 1.0, 4.0, *(None,) * 6)),
        (
            dict(rope_type="yarn", rope_factor=4.0),
            (4.0, 2048, None, None, 32.0, 1.0, None, None, None, True),
        ),
        (
            dict(rope_type="yarn", rope_original_max_position_embeddings=512, rope_truncate=False),
            (4.0, 512, None, None, 32.0, 1.0, None, None, None, False),
        ),
        (
            dict(rope_type="yarn", rope_original_max_position_embeddings=512, rope_factor=3.0),
            (3.0, 512, None, None, 32.0, 1.0, None, None, None, True),
        ),
    ],
    ids=str,
)
def test_a_rope_is_filled_in_as_far_as_its_type_reads_it(
    options: dict[str, Any], filled: tuple[Any, ...]
) -> None:
    found = model(**options)
    others = ("rope_type", "rope_short_factor", "rope_long_factor")
    names = [name for name in vars(found) if name.startswith("rope_") and name not in others]
    assert filled == tuple(getattr(found, name) for name in names)


REFUSED = """
--rotary_base=100 --rotary_embedding_scale=-9
    --rotary_base=100, --rotary_embedding_scale=-9: the scale must be minus the logarithm of the base
--rotary_percent=0.55
    --rotary_percent=0.55: rotates 5 of a head's 10 channels (kv_channels), but they rotate in pairs;
    --rotary_percent=0.4 rotates 4
--rotary_percent=0.1
    rotates 1 of a head's 10 channels (kv_channels), but they rotate in pairs; --rotary_percent=0.2 rotates 2
--rotary_percent=0.01
    rotates 0 of
--rotary_percent=0.35 --kv_channels=67
    --rotary_percent=0.33 rotates 22
--rotary_percent=0.5 --kv_channels=1
    more --kv_channels
--kv_channels=7
    write an even --kv_channels
--rope_type=ntk
    --rope_type=ntk: takes default, linear, llama3, yarn
--rope_factor=2
    --rope_factor=2, --rope_type=default: this type does not use it; write --rope_type=linear, llama3, yarn or longrope, or
    leave rope_factor out
--rope_type=longrope --rope_factor=2 --rope_short_factor=1,2 --rope_long_factor=1,2,3,4,5
    --rope_short_factor=1,2: takes 5 numbers, one for each pair of rotated channels
--rope_type=linear
    --rope_type=linear: the scaling factor is missing; write --rope_factor=<factor>
--rope_type=llama3 --rope_original_max_position_embeddings=64
    write --rope_factor=<factor>
--rope_type=yarn
    write --rope_factor=<factor> or --rope_original_max_position_embeddings=<positions>
--rope_type=yarn --rope_original_max_position_embeddings=4096
    their quotient, rope_factor, must be >= 1
--rope_type=llama3 --rope_factor=2 --rope_high_freq_factor=1
    --rope_high_freq_factor=1, --rope_low_freq_factor=1: frequencies between the two are
--rope_type=llama3 --rope_factor=2 --rope_low_freq_factor=5
    --rope_high_freq_factor=4, --rope_low_freq_factor=5: frequencies between
--rope_type=yarn --rope_factor=2 --rope_beta_fast=0.5
    --rope_beta_fast=0.5, --rope_beta_slow=1: the ramp must end at
--rope_type=yarn --rope_factor=2 --rope_mscale=0.7
    --rope_mscale=0.7: has an effect only together with rope_mscale_all_dim
--rope_type=yarn --rope_factor=2 --rope_mscale_all_dim=0.7
    write --rope_mscale as well
--rope_type=yarn --rope_factor=2 --rope_mscale=0.7 --rope_mscale_all_dim=1 --rope_attention_factor=1
    --rope_attention_factor=1, --rope_mscale=0.7, --rope_mscale_all_dim=1: the mscales derive
--use_rotary_embeddings=0 --rope_type=yarn
    --rope_type=yarn: there are no rotary positions; write --use_rotary_embeddings=1, or leave rope_type out
"""


@pytest.mark.parametrize(("flags", "message"), rows(REFUSED))
def test_contradictions_and_ignored_options_are_refused(flags: str, message: str) -> None:
    """Every error is one line with flag, value, rule and fix."""
    start = ("--dataset_source=random", "--hidden_size=80", "--use_rotary_embeddings=1")
    with pytest.raises(UsageError) as caught:
        resolve(parse([*start, *flags.split()]).config, 1)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_advised_values_are_accepted() -> None:
    assert model(rotary_percent=0.4).rotated_channels == 4
    assert model(rotary_percent=0.2).rotated_channels == 2
    assert model(rotary_percent=0.33, kv_channels=67).rotated_channels == 22
    assert model(attention_softmax_in_fp32=True, attention_backend="math").attention_softmax_in_fp32
    assert model(hidden_dropout=0.3).embedding_dropout == 0.3
    assert model(hidden_dropout=0.3, embedding_dropout=0.0).embedding_dropout == 0.0
