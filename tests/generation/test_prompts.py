"""Prompts, stop strings, sampling, and the text of a continuation, with tokenizers whose tokens are
not letters."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from megatron_lite.data.tokenizing import ByteTokenizer, JsonTokenizer, Tokenizer, train_tokenizer
from megatron_lite.errors import CheckpointError, DataError, NumericsError
from megatron_lite.generation.continuation import (
    NOT_FINITE,
    Limits,
    SamplingOptions,
    Text,
    TokenSampler,
    continue_texts,
)
from megatron_lite.generation.prompts import (
    Continuations,
    encode_prompt,
    end_tokens,
    numbered,
    open_tokenizer,
    read_prompts,
)
from tests.support.token_files import save_byte_tokenizer

SAMPLER = TokenSampler(SamplingOptions(), 0)


def metaspace_tokenizer(folder: Path) -> JsonTokenizer:
    """A tokenizer like those of Llama 2 and Mistral: a space belongs to the next word, a text
    begins with <s>."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, normalizers, processors

    words = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", "▁the", "▁cat", "s", "▁s", "a", "t", "é", "▁a"]
    tokenizer = Library(
        models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    parts = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return JsonTokenizer(str(folder / "tokenizer.json"))


def continuation(
    tokenizer: Tokenizer, prompt: list[int], tokens: list[int], stops: tuple[str, ...] = ()
) -> str:
    return Continuations(tokenizer, stops).text(Text(prompt, SAMPLER, tokens))


def test_a_continuation_keeps_the_space_before_its_first_word(tmp_path: Path) -> None:
    tokenizer = metaspace_tokenizer(tmp_path)
    assert tokenizer.decode([6]) == "cat", "alone, a first word loses its space"
    assert continuation(tokenizer, [1, 5], [6, 7, 3, 9]) == " cats\na"
    assert tokenizer.encode("a", template=True) == [1, *tokenizer.encode("a")]


@pytest.mark.parametrize("cuts", [(1,), (2,), (3, 1), (5,)], ids=str)
def test_a_stop_string_ends_a_text_wherever_its_tokens_begin(
    cuts: tuple[int, ...], tmp_path: Path
) -> None:
    """A text ends with the token that completes a stop string, and is cut before the stop
    string."""
    whole, stop = "one two END three", "END"
    tokenizer = train_tokenizer(
        iter([whole, " END", "two EN", "D three"] * 20), 290, str(tmp_path / "t.json")
    )
    pieces, at = [], 0
    while at < len(whole):
        size = cuts[len(pieces) % len(cuts)]
        pieces += tokenizer.encode(whole[at : at + size])
        at += size
    text, continuations = Text([], SAMPLER), Continuations(tokenizer, ("unused", stop))
    limits = Limits(1000, 1000, stops=continuations.stopped)
    for token in pieces:
        limits.add(text, token)
        if text.finish:
            break
    assert text.finish == "stop" and continuations.text(text) == "one two "
    assert stop not in tokenizer.decode(text.tokens[:-1])


def test_the_first_complete_stop_string_counts() -> None:
    letters = list(b"xabcab")
    tokenizer = ByteTokenizer()
    assert continuation(tokenizer, [65], letters, ("cab", "bc")) == "xa"
    assert (
        continuation(tokenizer, [65], letters, ("bc", "abc", "c")) == "x"
    )  # of strings that end together, the longest
    assert continuation(tokenizer, [65], letters, ("A",)) == "xabcab"  # only the prompt contains it
    assert continuation(tokenizer, [0xC3], [0xA9, 65], ()) in ("\ufffdA", "é" + "A")


def test_what_is_certain_of_a_growing_text_never_changes() -> None:
    """Not half a character, nor what may become a stop string; all prefixes, one token a byte."""
    whole = "aé EN ENDE, 你好 END more".encode()
    continuations = Continuations(ByteTokenizer(), ("END", "?!"))
    seen = [continuations.certain(Text([65], SAMPLER, list(whole[:size]))) for size in range(9)]
    assert seen == ["", "a", "a", "aé", "aé ", "aé ", "aé ", "aé EN ", "aé EN "]
    cut = whole.index(b"END")
    assert continuations.certain(Text([65], SAMPLER, list(whole[: cut + 2]))) == "aé EN "
    for size in range(cut, len(whole) + 1):  # as far as the last token brings it
        assert continuations.certain(Text([65], SAMPLER, list(whole[:size]))) == "aé EN "
    assert continuations.text(Text([65], SAMPLER, list(whole))) == "aé EN "
    growing = [
        Continuations(ByteTokenizer()).certain(Text([65], SAMPLER, list(whole[:size])))
        for size in range(len(whole) + 1)
    ]
    assert growing[-1] == whole.decode()
    assert all(after.startswith(before) for before, after in itertools.pairwise(growing))


def test_a_text_ends_at_the_first_limit() -> None:
    def finish(limits: Limits, tokens: list[int]) -> tuple[str | None, list[int]]:
        text = Text([1, 2], SAMPLER)
        for token in tokens:
            if text.finish is None:
                limits.add(text, token)
        return text.finish, text.tokens

    assert finish(Limits(3, 100, {9}), [4, 5, 6, 7]) == ("length", [4, 5, 6])
    assert finish(Limits(3, 4, {9}), [4, 5, 6, 7]) == ("context", [4, 5])
    assert finish(Limits(3, 5, {9}), [4, 5, 6, 7]) == ("length", [4, 5, 6])
    assert finish(Limits(3, 100, {9, 5}), [4, 5, 6, 7]) == ("end", [4])


def test_end_tokens_are_those_of_the_folder_too(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    assert end_tokens(tmp_path, tokenizer) == {256}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert end_tokens(tmp_path, tokenizer) == {256, 5}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert end_tokens(tmp_path, tokenizer) == {256, 7, 8}
    (tmp_path / "generation_config.json").write_text("[")
    assert end_tokens(tmp_path, tokenizer) == {256, 5}


def test_prompts_are_lines_and_equal_ones_are_numbered() -> None:
    assert read_prompts("\ufeffa\r\n\n \nb c\n\u2028d".encode(), "--x") == ["a", "b c", "\u2028d"]
    assert [*numbered(["a", "b", "a", "a"])] == [("a", 0), ("b", 0), ("a", 1), ("a", 2)]


def test_prompts_fit_the_model_or_are_refused() -> None:
    tokenizer = ByteTokenizer()
    assert encode_prompt(tokenizer, "", True, 257, 4) == [256]
    assert encode_prompt(tokenizer, "abc", True, 257, 4) == [97, 98, 99]
    with pytest.raises(DataError, match="4 tokens.*at most 4"):
        encode_prompt(tokenizer, "abcd", True, 257, 4)
    with pytest.raises(DataError, match="vocabulary of 99"):
        encode_prompt(tokenizer, "abc", True, 99, 10)
    with pytest.raises(DataError, match="vocabulary of 99"):
        encode_prompt(tokenizer, "", True, 99, 10)


def test_token_bytes_add_up_to_the_text(tmp_path: Path) -> None:
    """Bytes are exact for byte-level vocabularies; other decoders strip the first space."""
    text = "the cats' café, zoë\n\n日本語 🎉 END"
    save_byte_tokenizer(str(tmp_path / "bytes.json"))
    trained = train_tokenizer(iter([text * 5]), 300, str(tmp_path / "trained.json"))
    for tokenizer in (ByteTokenizer(), JsonTokenizer(str(tmp_path / "bytes.json")), trained):
        counts = tokenizer.token_bytes()
        assert counts.shape == (tokenizer.vocab_size,) and counts[tokenizer.end_of_document] == 0
        assert counts[tokenizer.encode(text)].sum() == len(text.encode())
    other = metaspace_tokenizer(tmp_path)
    tokens = [5, 6, 7, 3, 11, 12]
    assert other.token_bytes()[tokens].sum() == len(" the cats\né a".encode())
    assert other.token_bytes()[[0, 1, 2]].tolist() == [0, 0, 0]


def test_tokenizers_of_folders(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match="no tokenizer.json; name one with --tokenizer_file"):
        open_tokenizer(tmp_path, None, False)
    save_byte_tokenizer(str(tmp_path / "tokenizer.json"))
    spelled = "<|endoftext|>"
    assert open_tokenizer(tmp_path, None, True).encode(spelled) == [256]
    assert len(open_tokenizer(tmp_path, None, False).encode(spelled)) == len(spelled)
    assert open_tokenizer(tmp_path, "byte", False).encode("a") == [97]
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{tmp_path}"}}')
    assert open_tokenizer(adapter, None, True).encode(spelled) == [256]
    for base, named in (("null", "not named"), ('["a"]', r"\['a'\]"), ('"a/b"', "a/b")):
        (adapter / "adapter_config.json").write_text(f'{{"base_model_name_or_path": {base}}}')
        with pytest.raises(CheckpointError, match=f"a model that is not here .{named}.; convert"):
            open_tokenizer(adapter, None, True)


LOGITS = 3 * torch.randn(200, generator=torch.Generator().manual_seed(0))
OPTIONS = (
    SamplingOptions(1.0),
    SamplingOptions(0.3),
    SamplingOptions(2.5, top_k=7),
    SamplingOptions(1.0, top_p=0.6),
    SamplingOptions(0.7, top_k=50, top_p=0.9),
    SamplingOptions(1.0, top_k=1),
    SamplingOptions(1.0, top_p=1e-9),
    SamplingOptions(1.0, top_k=10_000, top_p=1.0),
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_probabilities_are_those_of_transformers(options: SamplingOptions) -> None:
    """Temperature, top-k and top-p in transformers' order, including that something is always
    left."""
    warpers = pytest.importorskip(
        "transformers", reason="transformers is not installed"
    ).generation.logits_process
    scores = LOGITS.double()[None]
    scores = warpers.TemperatureLogitsWarper(options.temperature)(None, scores)
    if options.top_k is not None:
        scores = warpers.TopKLogitsWarper(options.top_k)(None, scores)
    if options.top_p < 1.0:
        scores = warpers.TopPLogitsWarper(options.top_p)(None, scores)
    torch.testing.assert_close(
        options.probabilities(LOGITS), scores.softmax(-1)[0], rtol=1e-12, atol=1e-15
    )


def test_draws_follow_the_probabilities_and_repeat_with_the_seed() -> None:
    """4,000 draws stay within 4 standard deviations of every token's share; one seed gives one
    stream."""
    options, count = SamplingOptions(1.5, top_k=12), 4_000
    sampler = TokenSampler(options, 1)
    drawn = torch.bincount(
        torch.tensor([sampler(LOGITS) for _ in range(count)]), minlength=len(LOGITS)
    )
    expected = options.probabilities(LOGITS)
    error = (drawn / count - expected).abs()
    assert (error <= 4 * (expected * (1 - expected) / count).sqrt()).all()
    samplers = [TokenSampler(options, seed) for seed in (3, 3, 4)]
    first, again, other = ([sampler(LOGITS) for _ in range(30)] for sampler in samplers)
    assert first == again != other


def test_without_temperature_the_most_probable_token_is_taken() -> None:
    greedy, cold = TokenSampler(SamplingOptions(), 1), TokenSampler(SamplingOptions(1e-8), 1)
    assert greedy(LOGITS) == int(LOGITS.argmax()) == cold(LOGITS)
    assert greedy(LOGITS.bfloat16()) == int(LOGITS.bfloat16().argmax())


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("options", [SamplingOptions(), SamplingOptions(1.0)], ids=str)
def test_broken_logits_are_an_error(value: float, options: SamplingOptions) -> None:
    """No token is drawn, and the text ends in an error."""
    logits = LOGITS.clone()
    logits[3] = value
    text = Text([1], TokenSampler(options, 1))
    assert text.sampler(logits) == NOT_FINITE
    with pytest.raises(NumericsError, match="not finite"):
        next(continue_texts(lambda _: logits[None], torch.device("cpu"), [text], Limits(3, 9), 1))
