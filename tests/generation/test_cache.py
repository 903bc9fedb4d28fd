"""Texts generated with a cache equal those of transformers, whatever other texts grow with them."""

import dataclasses
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.generation.continuation import (
    Limits,
    SamplingOptions,
    Text,
    TokenSampler,
    continue_texts,
)
from megatron_lite.generation.model import LocalModel, load_model
from megatron_lite.model.embedding_and_head import Head
from megatron_lite.model.kv_cache import KeyValueCache
from megatron_lite.model.layer import MicroBatch
from megatron_lite.seeds import derive_seed
from tests.support import families
from tests.support.harness import tiny_config

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)
CPU = torch.device("cpu")
LENGTHS = (1, 3, 12, 20, 6)  # of prompts; the windows of the families have 7 tokens
NEW_TOKENS = 14


class Recorder(TokenSampler):
    """Sampler that takes the most probable token and records the logits."""

    def __init__(self) -> None:
        super().__init__(SamplingOptions(), 0)
        self.logits: list[Tensor] = []

    def __call__(self, logits: Tensor) -> int:
        self.logits.append(logits.clone())
        return super().__call__(logits)


def grow(
    model: LocalModel,
    prompts: list[list[int]],
    rows: int,
    new_tokens: int = NEW_TOKENS,
    longest: int = 40,
) -> list[Text]:
    texts = [Text(prompt, Recorder()) for prompt in prompts]
    limits = Limits(new_tokens, longest, read_anew=model.config.longrope_length)
    ended = list(continue_texts(model.run, model.device, texts, limits, rows))
    assert len(ended) == len(texts) and all(text.finish is not None for text in texts)
    return texts


def prompts_of(seed: int = 0) -> list[list[int]]:
    return [families.random_tokens(1, length, seed=seed + length)[0].tolist() for length in LENGTHS]


def generated(model: Any, prompt: list[int], new_tokens: int = NEW_TOKENS) -> list[int]:
    """Generate one text with transformers, without end tokens."""
    tokens = torch.tensor([prompt])
    more = dict(max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    found = model.generate(tokens, attention_mask=torch.ones_like(tokens), **more)
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", families.FIRST_BY_DEFAULT)
def test_greedy_texts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Prompts of different lengths give the tokens of transformers; logits are within 1e-5 of those
    of a full pass."""
    families.write_folder(name, tmp_path)
    theirs, ours = families.load_model(tmp_path), load_model(tmp_path, 40, "fp32", CPU)
    texts = grow(ours, prompts_of()[:-1], rows=3)
    assert [text.tokens for text in texts] == [generated(theirs, text.prompt) for text in texts]
    for text in texts:
        whole = families.logits_of(theirs, torch.tensor([text.prompt + text.tokens[:-1]]))[0]
        assert isinstance(text.sampler, Recorder)
        torch.testing.assert_close(
            torch.stack(text.sampler.logits), whole[len(text.prompt) - 1 :], rtol=0, atol=1e-5
        )


LONG = 64  # new tokens, many times as many as a window has


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "gemma3_text" else [pytest.mark.slow])
        for name in families.FAMILIES
    ],
)
def test_long_greedy_texts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """From a prompt within a window to many times its length, where it turns around in the cache."""
    learned = "n_positions" in families.FAMILIES[name]
    families.write_folder(
        name, tmp_path, **{"n_positions" if learned else "max_position_embeddings": 128}
    )
    theirs, ours = families.load_model(tmp_path), load_model(tmp_path, 80, "fp32", CPU)
    prompts = [families.random_tokens(1, length, seed=9)[0].tolist() for length in (3, 9)]
    for text in grow(ours, prompts, rows=2, new_tokens=LONG, longest=80):
        assert len(text.tokens) == LONG
        assert text.tokens == generated(theirs, text.prompt, LONG)


@pytest.mark.parametrize("rows", [1, 3])
def test_longrope_follows_the_length_of_the_text_so_far(rows: int, tmp_path: Path) -> None:
    """Short factors up to the original length, long ones beyond. Where a text grows past it,
    transformers reads the whole text anew."""
    families.write_folder("phi3, longrope", tmp_path, original_max_position_embeddings=16)
    theirs, ours = families.load_model(tmp_path), load_model(tmp_path, 40, "fp32", CPU)
    prompts = [*prompts_of(), families.random_tokens(1, 16, seed=5)[0].tolist()]
    texts = grow(ours, prompts, rows)
    assert [text.tokens for text in texts] == [generated(theirs, text.prompt) for text in texts]
    assert {len(text.prompt) > 16 for text in texts} == {text.length <= 16 for text in texts}
    for text in texts:
        assert isinstance(text.sampler, Recorder)
        assert len(text.sampler.logits) == len(text.tokens)
        for number, logits in enumerate(text.sampler.logits):
            so_far = torch.tensor([text.prompt + text.tokens[:number]])
            whole = families.logits_of(theirs, so_far)[0, -1]
            torch.testing.assert_close(logits, whole, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    folder = tmp_path_factory.mktemp("mistral")
    return load_model(families.write_folder("mistral, window", folder), 40, "fp32", CPU)


@pytest.mark.parametrize("dtype, rows", [("fp32", 4), ("bf16", 2), ("fp32", 1)])
def test_a_text_does_not_depend_on_its_neighbours(dtype: str, rows: int, tmp_path: Path) -> None:
    """A text is bit-identical alone, in another order, and with texts that end sooner."""
    model = load_model(families.write_folder("starcoder2, window", tmp_path), 40, dtype, CPU)
    together = grow(model, prompts_of(), rows)
    backwards = grow(model, prompts_of()[::-1], rows)[::-1]
    for one, other in zip(together, backwards, strict=True):
        (alone,) = grow(model, [one.prompt], rows)
        for text in (other, alone):
            assert text.tokens == one.tokens
            assert torch.equal(torch.stack(text.sampler.logits), torch.stack(one.sampler.logits))  # type: ignore[attr-defined]


def test_a_pass_takes_the_threads_that_its_work_is_worth(
    mistral: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new token of a small model takes one, a long prompt or a large model all; the user's number
    stays."""
    taken: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.setattr(mistral, "_most_threads", 6)
    small = mistral.config
    for number in (None, "5"):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if number is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", number)
        for hidden_size, tokens in ((768, 1), (768, 8), (2048, 1), (768, 90), (4096, 1)):
            # Only the rule reads this size: the layers stay as they are.
            config = dataclasses.replace(small, hidden_size=hidden_size)
            monkeypatch.setattr(mistral, "config", config)
            monkeypatch.setattr(mistral, "layers", [lambda hidden, batch: batch.tokens])
            found = torch.zeros(1, tokens, dtype=torch.int64)
            mistral.run(MicroBatch(found, found))
    assert taken == [1, 1, 2, 3, 6]


def test_texts_end_one_by_one_and_where_the_model_ends(mistral: LocalModel) -> None:
    """Texts that end at different lengths all end where they should."""
    prompts = prompts_of()
    alone = {len(prompt): grow(mistral, [prompt], 1)[0].tokens for prompt in prompts}
    texts = [Text(prompt, Recorder()) for prompt in prompts]
    limits = Limits(NEW_TOKENS, 24, stops=lambda text: len(text.tokens) * 2 > len(text.prompt) + 3)
    order = [len(text.prompt) for text in continue_texts(mistral.run, CPU, texts, limits, 2)]
    assert order == [1, 3, 6, 20, 12] or sorted(order) == sorted(LENGTHS)
    for text in texts:
        assert text.tokens == alone[len(text.prompt)][: len(text.tokens)]
    assert {len(text.prompt): text.finish for text in texts} == {
        1: "stop",
        3: "stop",
        12: "stop",
        20: "context",
        6: "stop",
    }


def test_a_cache_holds_what_can_be_looked_at() -> None:
    """A window of 7 needs 7 slots; without a window there is one slot per token of the longest
    text."""
    cache = KeyValueCache(3, 30)
    like = torch.zeros(1, 2, 5, 8)
    num_bytes = 0
    for block, window, slots in (("a", 7, 7), ("b", None, 30), ("c", 100, 30)):
        texts = cache.of(block, like, window)
        assert (
            [keys.shape for keys, _ in texts]
            == [values.shape for _, values in texts]
            == [(2, slots, 8)] * 3
        )
        assert cache.of(block, like, window) is texts
        num_bytes += sum(tensor.nbytes for pair in texts for tensor in pair)
    assert num_bytes == 2 * 4 * 3 * 2 * 8 * (7 + 30 + 30)


class RandomSource:
    """Weight source that draws weights from a generator instead of reading files."""

    folder = Path("nowhere")
    training: Mapping[str, Any] = {}

    def __init__(self, **options: Any) -> None:
        self.model = tiny_config(
            num_layers=2, sequence_length=40, init_method_std=0.4, **options
        ).model
        self.facts = self

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def verify(self) -> None:
        pass

    def read(self, name: str, first: int, target: Tensor) -> None:
        generator = torch.Generator().manual_seed(derive_seed(name))
        values = torch.randn(target.shape, generator=generator)
        target.copy_(1 + 0.2 * values if "norm.weight" in name else 0.3 * values)


@pytest.mark.parametrize(
    "options",
    [
        dict(
            make_vocab_size_divisible_by=48,
            logit_soft_cap=5.0,
            qk_layernorm=True,
            hybrid_norm=True,
            use_rotary_embeddings=True,
            use_position_embeddings=True,
            rotary_percent=0.5,
            embedding_scale=3.0,
            residual_scale=0.5,
            attention_scale=0.6,
            attention_soft_cap=0.8,
            logit_scale=0.4,
        ),
        dict(
            full_precision_residual=True,
            input_embedding_norm=True,
            attention_softmax_in_fp32=True,
            zero_centered_normalization=True,
            head_groups=1,
            window_size=5,
            attention_sinks=True,
            attention_dropout=0.1,
            embedding_dropout=0.1,
            tie_word_embeddings=False,
        ),
        dict(
            num_experts=4,
            num_experts_per_token=2,
            num_shared_experts=1,
            moe_layer_frequency=2,
            use_rotary_embeddings=True,
        ),
    ],
    ids=["factors, caps, every norm", "fp32 residual stream, wide softmax", "experts"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_options_that_transformers_lacks_have_the_texts_of_whole_passes(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    """The logits of each step equal those of a pass over the whole text; dropout plays no part."""
    source: Any = RandomSource(**options)
    model = LocalModel(source, 40, dtype, CPU)
    head = model.layers[-1]
    assert isinstance(head, Head)
    for text in grow(model, prompts_of(), 2):
        whole = torch.tensor([text.prompt + text.tokens[:-1]])
        hidden: Tensor | None = None
        for layer in model.layers[:-1]:
            hidden = layer(hidden, MicroBatch(whole, whole))
        assert hidden is not None and isinstance(text.sampler, Recorder)
        expected = head.logits(hidden)[0, len(text.prompt) - 1 :]
        tolerance = (1e-5 if dtype == torch.float32 else 0.05) * float(expected.abs().max())
        torch.testing.assert_close(
            torch.stack(text.sampler.logits), expected, rtol=0, atol=tolerance
        )


def test_prompts_are_attended_to_by_what_works() -> None:
    """Prompts use flash attention on a CPU in fp32, and math whenever the softmax must be in
    fp32."""
    for upcast, expected in ((False, "flash"), (True, "math")):
        source: Any = RandomSource(use_rotary_embeddings=True, attention_softmax_in_fp32=upcast)
        assert LocalModel(source, 40, torch.float32, CPU).prompt_attention() == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("backend", ["auto", "math"])
def test_texts_of_a_gpu_are_those_of_a_cpu(backend: str) -> None:
    """On a GPU texts equal those of transformers in fp32, and do not depend on other texts in
    bf16."""
    source: Any = RandomSource(
        use_rotary_embeddings=True, head_groups=2, window_size=7, kv_channels=16
    )
    gpu = torch.device("cuda")
    on_cpu = grow(LocalModel(source, 40, torch.float32, CPU), prompts_of(), 3)
    model = LocalModel(source, 40, torch.float32, gpu)
    texts = [Text(prompt, Recorder()) for prompt in prompts_of()]
    ended = list(continue_texts(model.run, gpu, texts, Limits(NEW_TOKENS, 40), 3, backend=backend))
    assert len(ended) == len(texts)
    assert [text.tokens for text in texts] == [text.tokens for text in on_cpu]
    half = LocalModel(source, 40, torch.bfloat16, gpu)
    together = grow(half, prompts_of(), 3)
    for text in together:
        assert grow(half, [text.prompt], 3)[0].tokens == text.tokens
