"""Weight decay: which parameters each mask and pattern selects, that exactly those decay, and what
is said of it."""

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.config.optimizer import OPTIMIZERS
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import UsageError
from megatron_lite.model import parameter_patterns
from megatron_lite.model.gpt import parameters_of
from megatron_lite.model.parameter_patterns import describe, selected
from megatron_lite.validation import resolve
from megatron_lite.validation.warnings import warnings
from tests.support.engine_runs import Engine
from tests.support.harness import full_weights, layers_of, run_distributed, start_run, tiny_config

DECAY = "weight_decay_modules"

Options = dict[str, Any]
MODELS: list[Options] = [
    {},
    {"tie_word_embeddings": False},
    {"add_linear_biases": False, "normalization_type": "rms_norm"},
    {"tie_word_embeddings": False, "use_rotary_embeddings": True, "gated": True},
]


def names(options: Options) -> list[str]:
    return [parameter.spec.name for parameter in parameters_of(layers_of(tiny_config(**options)))]


def decayed(**options: Any) -> list[str]:
    """The names that decay, in the order of the model."""
    specs = [parameter.spec for parameter in parameters_of(layers_of(tiny_config(**options)))]
    return [spec.name for spec in specs if spec.weight_decay]


# -- masks
# -----------------------------------------------------------------------------------------------------------


def levanter_decays(name: str) -> bool:
    """Levanter's own rule, on the path of classes that it would see: its LayerNorm, Embedding and
    Linear modules."""
    module, leaf = name.rsplit(".", 1)
    kind = (
        "LayerNorm"
        if "norm" in module
        else "Embedding"
        if module.startswith("embedding")
        else "Linear"
    )
    return re.search(
        "LayerNorm|RMSNorm|RmsNorm|Embedding", f"{kind}.{leaf}"
    ) is None and not name.endswith("bias")


@pytest.mark.parametrize("options", MODELS, ids=str)
def test_masks(options: Options) -> None:
    """Fast-LLM: all but norms and biases, also unasked; Levanter: its rule, a tied head is the
    embedding; off: all."""
    every = names(options)
    matrices = [name for name in every if "norm" not in name and not name.endswith("bias")]
    assert (
        decayed(**options) == decayed(weight_decay_default_mask="fast_llm", **options) == matrices
    )
    by_levanter = decayed(weight_decay_default_mask="levanter", **options)
    assert by_levanter == [name for name in every if levanter_decays(name)]
    assert ("head.output.weight" in by_levanter) == (not options.get("tie_word_embeddings", True))
    assert not any(name.startswith("embedding") for name in by_levanter)
    assert decayed(weight_decay_default_mask="off", **options) == every


CASES: list[Options] = [
    {"weight_decay_default_mask": "levanter"},
    {"weight_decay_default_mask": "off"},
    {"weight_decay_modules": ("*.mlp.*.bias", "regex:head")},
    {"weight_decay_modules": ("head.norm",), "weight_decay_default_mask": "levanter"},
]
UNTIED: Options = {
    "tie_word_embeddings": False,
    "random_bias_init": True,
    "layer_norm_init_range": 0.1,
}


def one_update(distributed: Distributed, runs: list[Options]) -> list[dict[str, np.ndarray]]:
    """The common start, then the weights after one update of each run; their gradients are the
    same."""
    weights = [full_weights(Engine(distributed, runs[0]).model)]
    for options in runs:
        engine = Engine(distributed, options)
        engine.step(1)
        weights.append(full_weights(engine.model))
    return weights


def test_exactly_the_selected_decay() -> None:
    """Against the update without decay: a selected weight lost lr * weight_decay of itself, every
    other not a bit.

    By every optimizer on two ranks, with two of the cases each, ZeRO 1 and 3.
    """
    runs: list[Options] = []
    for number, optimizer in enumerate(OPTIMIZERS):
        runs.append({**UNTIED, "optimizer": optimizer, "weight_decay": 0.0})
        for stage, case in zip((1, 3), CASES[number % 2 :: 2], strict=True):
            runs.append(
                {**UNTIED, "optimizer": optimizer, "weight_decay": 0.3, "zero_stage": stage, **case}
            )
    initial, *found = run_distributed(2, one_update, runs)[0]
    plain = found[0]
    for options, weights in zip(runs, found, strict=True):
        if options["weight_decay"] == 0.0:
            plain = weights
            continue
        expected = set(decayed(**options))
        for name, weight in weights.items():
            if name in expected:
                lost = 1e-2 * 0.3 * initial[name]
                np.testing.assert_allclose(
                    weight, plain[name] - lost, rtol=0, atol=1e-6, err_msg=f"{options}: {name}"
                )
                assert not lost.any() or np.abs(weight - plain[name]).max() > 1e-5, name
            else:
                assert np.array_equal(weight, plain[name]), (options, name)


# -- patterns
# --------------------------------------------------------------------------------------------------------


def test_patterns_alone_and_beside_a_mask() -> None:
    """Alone, nothing else decays; beside a mask, what it selects besides."""
    every = names({})
    assert decayed(weight_decay_modules=("head.norm",)) == ["head.norm.weight", "head.norm.bias"]
    both = decayed(weight_decay_modules=("head.norm",), weight_decay_default_mask="levanter")
    assert both == [name for name in every if levanter_decays(name) or name.startswith("head.norm")]
    both = decayed(weight_decay_modules=("*.bias",), weight_decay_default_mask="fast_llm")
    assert both == [name for name in every if "norm.weight" not in name]


@pytest.mark.parametrize(
    ("pattern", "expression"),
    [
        ("embedding.word.weight", r"embedding\.word\.weight$"),  # a name
        ("blocks.1", r"blocks\.1\."),  # a prefix of whole parts: not blocks.10
        ("*.bias", r".*\.bias$"),
        ("blocks.?.mlp.up.*", r"blocks\.\d\.mlp\.up\."),
        ("mlp", r".*mlp"),  # neither a name nor a prefix: any part of names, mlp_norm included
        ("on.out", r".*on\.out"),
        (
            "regex:.*mlp.*weight|.*attention.*weight|.*word",
            r".*mlp.*weight|.*attention.*weight|.*word",
        ),
        ("regex:blocks", r"blocks"),  # from the beginning on, but not to the end
    ],
)
def test_a_pattern_selects_these_weights(pattern: str, expression: str) -> None:
    """A name, a prefix, wildcards, else a part of names; `regex:` as in Levanter from the
    beginning."""
    every = names({"num_layers": 12})
    expected = [name for name in every if re.match(expression, name)]
    assert 0 < len(expected) < len(every)
    assert (
        selected(DECAY, pattern, every)
        == expected
        == decayed(num_layers=12, weight_decay_modules=(pattern,))
    )


def test_the_expression_of_levanters_page() -> None:
    """The answer to it decays the matrices of attention and MLP and the embeddings, and no norm or
    bias."""
    page = ".*attn.*weight|.*mlp.*weight|.*token_embeddings|.*position_embeddings"
    for text in (page, f"regex:{page}"):
        with pytest.raises(UsageError) as caught:
            selected(DECAY, text, names({}))
        (translated,) = re.findall("; write --weight_decay_modules='(.*)'$", str(caught.value))
        matrices = [name for name in names({}) if "norm" not in name and not name.endswith("bias")]
        assert selected(DECAY, translated, names({})) == matrices


@pytest.mark.parametrize(
    "text",
    ["(.+)+$X", "(?:[a-z.0]+)+$X", "(.|[a-z])*$X", "(.|..)+$X", "(.*)*X", "(.*.*.*.*.*.*.*)*X"],
)
def test_an_expression_that_matches_for_ever_is_refused(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time ends the match, however the expression repeats, and the signal's handler is the one from
    before."""
    monkeypatch.setattr(parameter_patterns, "MATCHING_S", 0.05)
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(UsageError, match=r"--weight_decay_modules: .* takes more than 0.05 s"):
        selected(DECAY, f"regex:{text}", ["blocks.0.attention.query_key_value.weight"])
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("block.0.mpl", "'block.0.mpl' matches nothing; similar names: .*blocks.0"),
        ("blocks.2", "'blocks.2' matches nothing"),
        ("*.gain", "'\\*.gain' matches nothing"),
        ("regex:mlp", "'regex:mlp' matches nothing; .* it must match from the start of a name"),
        ("regex:.*mlp$", "matches nothing"),
    ],
)
def test_patterns_that_select_nothing(pattern: str, message: str) -> None:
    """Refused with names that exist, also beside one that selects something."""
    with pytest.raises(UsageError, match=message):
        decayed(weight_decay_modules=("blocks", pattern))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("regex:", "the pattern is empty"),
        ("", "the pattern is empty"),
        ("regex:(", "not a regular expression: missing \\)"),
        ("regex:*", "not a regular expression: nothing to repeat"),
        ("regex:" + "(" * 4000, "not a regular expression: "),
        ("regex:a{99999999999}", "not a regular expression: "),
        ("regex:[[a]", "not a regular expression: Possible nested set"),
    ],
)
def test_expressions_that_cannot_be_read(pattern: str, message: str) -> None:
    """Refused when the command line is read, before any model is built; what Python warns of,
    too."""
    with pytest.raises(UsageError, match=message) as caught:
        tiny_config(weight_decay_modules=(pattern,))
    assert len(str(caught.value)) < 500


def test_a_mask_that_leaves_patterns_nothing_to_say() -> None:
    """`off` beside patterns is refused; nothing is said of a weight decay of 0; derived values stay
    as they are."""
    with pytest.raises(
        UsageError, match="without a mask all weights decay, whatever the patterns select"
    ):
        tiny_config(weight_decay_modules=("mlp",), weight_decay_default_mask="off")
    assert not [line for line in warnings(tiny_config(weight_decay=0.0)) if "decay" in line]
    for options, mask in (({}, "fast_llm"), ({"weight_decay_modules": ("mlp",)}, None)):
        config = tiny_config(**options)
        assert config.optimizer.weight_decay_default_mask == mask and resolve(config, 1) == config


# -- what is said of it
# ----------------------------------------------------------------------------------------------


def described(**options: Any) -> str:
    return describe(parameters_of(layers_of(tiny_config(num_layers=12, **options))))


def test_the_line_of_the_log() -> None:
    """Counts, and names in the order of the model, those of all blocks as one; frozen parameters do
    not count."""
    line = described(tie_word_embeddings=False, use_rotary_embeddings=True)
    assert line == (
        "weight decay on 50 of 148 parameters (151,552 of 156,608 weights): embedding.word.weight, "
        "blocks.*.attention.query_key_value.weight (12), blocks.*.attention.output.weight (12), "
        "blocks.*.mlp.up.weight (12), blocks.*.mlp.down.weight (12), head.output.weight"
    )
    line = described(
        weight_decay_modules=(
            "blocks.0.mlp.up",
            "blocks.[2-4].mlp.up.weight",
            "blocks.9.mlp.up.weight",
        )
    )
    assert line.endswith(": blocks.{0,2-4,9}.mlp.up.weight (5), blocks.0.mlp.up.bias")
    line = described(freeze=("embedding", "blocks.3"))
    assert ": blocks.*.attention.query_key_value.weight (11), " in line and "embedding" not in line
    assert described(weight_decay_modules=("head.norm",), freeze=("head",)).startswith(
        "weight decay on 0 of 146"
    )


def test_order_is_that_of_the_model() -> None:
    """The names in the line, put together again, are the decayed ones as the model has them."""
    line = described(weight_decay_default_mask="off")
    patterns = [re.sub(r" \(\d+\)", "", item) for item in line.split(": ")[1].split(", ")]
    every = names({"num_layers": 12})
    assert patterns == list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in every))


# -- changing it
# -----------------------------------------------------------------------------------------------------


def continued(
    distributed: Distributed, folder: str, options: Options, iterations: int
) -> dict[str, np.ndarray]:
    """The weights at an iteration, which is saved; resumes what the folder has."""
    from megatron_lite.outputs.saving import save
    from megatron_lite.train import train_step

    options = {"experiment_dir": folder, "train_iters": iterations, "lr_decay_iters": 10, **options}
    run = start_run(distributed, tiny_config(distributed.world_size, **options))
    batches = run.data.batches("training", run.iteration, iterations - run.iteration)
    for iteration, micro_batches in enumerate(batches, start=run.iteration + 1):
        train_step(run, micro_batches, iteration)
        run.iteration = iteration
    save(run)
    return full_weights(run.model)


def start_and_go_on(
    distributed: Distributed, folder: str, first: Options, later: list[Options]
) -> list[Any]:
    """The weights after two updates, and after a third by each of `later`."""
    results = [continued(distributed, f"{folder}/start", first, 2)]
    for number, options in enumerate(later):
        if distributed.rank == 0:
            shutil.copytree(f"{folder}/start/checkpoints", f"{folder}/{number}/checkpoints")
        distributed.barrier()
        results.append(continued(distributed, f"{folder}/{number}", options, 3))
    return results


def test_another_mask_after_a_resume(tmp_path: Path) -> None:
    """Two ranks: shards are laid out in another order, and only the decay of the one update
    differs."""
    common: Options = {"weight_decay": 0.3, "lr_warmup": 0, "lr": 1e-2, "zero_stage": 3}
    masks: list[Options] = [
        {},
        {"weight_decay_default_mask": "levanter"},
        {"weight_decay_default_mask": "off"},
    ]
    arguments = (str(tmp_path), common, [{**common, **mask} for mask in masks])
    start, same, levanter, off = run_distributed(2, start_and_go_on, *arguments)[0]
    for name, weight in same.items():
        lost = 1e-2 * 0.3 * start[name]  # what decay takes in one update
        exempt = not levanter_decays(name) and name.startswith("embedding")
        for other, difference in (
            (levanter, lost if exempt else 0.0),
            (off, 0.0 if name in decayed() else -lost),
        ):
            if np.any(difference):
                np.testing.assert_allclose(
                    other[name], weight + difference, rtol=0, atol=1e-6, err_msg=name
                )
                assert not np.array_equal(other[name], weight), name
            else:
                assert np.array_equal(other[name], weight), name
