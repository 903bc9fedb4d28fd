"""Files for llama.cpp: what is written, what llama.cpp computes from it, and what is refused because it
would compute something else.

The oracle of numbers is llama.cpp, in slow tests; transformers' own reader of such files is none.
"""

import copy
import importlib.util
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
    trainers,
)
from tokenizers import pre_tokenizers as splitters

from megatron_lite.commands import convert_checkpoint
from megatron_lite.data.tokenizing import BYTE_FILE, character_tokenizer
from megatron_lite.errors import DataError
from megatron_lite.huggingface.gguf_tokenizer import tokenizer_keys
from tests.support.families import (
    FAMILIES,
    VOCAB_SIZE,
    load_model,
    logits_of,
    random_tokens,
    write_folder,
)
from tests.support.llama_cpp import ask

needs_gguf = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="needs the package gguf"
)
needs_llama_cpp = pytest.mark.skipif(
    not (importlib.util.find_spec("gguf") and importlib.util.find_spec("xllamacpp")),
    reason="needs the packages gguf and xllamacpp (llama.cpp)",
)
BYTES = splitters.ByteLevel(add_prefix_space=False)
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def convert(source: Path, target: Path, *flags: str) -> int:
    return convert_checkpoint.main([f"--from={source}", f"--to={target}", "--format=gguf", *flags])


def save_letters(folder: Path) -> None:
    """Write a tokenizer of VOCAB_SIZE ids without merges: llama.cpp answers models with texts only."""
    letters = sorted(splitters.ByteLevel.alphabet())[: VOCAB_SIZE - 1]
    tokenizer = Tokenizer(models.BPE({text: number for number, text in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = BYTES, decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def read(file: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return a file's keys and tensors, bf16 as raw bytes."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    return keys, {tensor.name: tensor.data for tensor in reader.tensors}


@needs_gguf
def test_file_of_a_llama(tmp_path: Path) -> None:
    folder = write_folder("llama, llama3 rope, tied, attention biases", tmp_path / "hf")
    assert convert(folder, tmp_path / "g", "--dtype=fp16", "--tokenizer_file=byte") == 3  # 257 ids
    assert convert(folder, tmp_path / "g", "--dtype=fp16") == 0
    keys, tensors = read(tmp_path / "g" / "model.gguf")
    config = json.loads((folder / "config.json").read_text())
    heads, width = config["num_attention_heads"], config["hidden_size"]
    expected = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 64,
        "llama.embedding_length": width,
        "llama.feed_forward_length": 44,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.rope.freq_base": 500.0,
        "llama.rope.scaling.type": "none",
        "llama.vocab_size": VOCAB_SIZE,
        "tokenizer.ggml.model": "none",
    }
    assert expected.items() <= keys.items()
    assert keys["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-4)
    state = load_file(folder / "model.safetensors")
    query = state["model.layers.1.self_attn.q_proj.weight"].half().numpy()
    # channels j and j + d / 2 of a head are neighbours there
    pairs = query.reshape(heads, 2, -1, width).swapaxes(1, 2).reshape(query.shape)
    assert np.array_equal(tensors["blk.1.attn_q.weight"], pairs)
    value = state["model.layers.1.self_attn.v_proj.weight"].half().numpy()
    assert np.array_equal(tensors["blk.1.attn_v.weight"], value)
    norm = tensors["blk.0.ffn_norm.weight"]
    assert norm.dtype == np.float32
    assert np.array_equal(norm, state["model.layers.0.post_attention_layernorm.weight"].numpy())
    assert "output.weight" not in tensors  # tied
    scaled = load_model(folder).model.rotary_emb.inv_freq.numpy()
    usual = 500.0 ** -(np.arange(len(scaled)) * 2 / config["head_dim"])
    np.testing.assert_allclose(tensors["rope_freqs.weight"], usual / scaled, rtol=1e-6)


@needs_gguf
def test_file_of_a_gpt2_with_bytes(tmp_path: Path) -> None:
    folder = write_folder("gpt2", tmp_path / "hf", vocab_size=300)
    flags = ("--dtype=bf16", "--tokenizer_file=byte")
    assert convert(folder, tmp_path / "g", *flags) == 0
    assert convert(folder, tmp_path / "g", *flags) == 2  # exists
    assert convert(folder, tmp_path / "g", *flags, "--exist_ok") == 0
    keys, tensors = read(tmp_path / "g" / "model.gguf")
    assert keys["tokenizer.ggml.pre"] == "gpt-2" and keys["tokenizer.ggml.eos_token_id"] == 256
    assert len(keys["tokenizer.ggml.tokens"]) == 300
    assert keys["tokenizer.ggml.tokens"][256:258] == ["<|endoftext|>", "[PAD257]"]
    assert keys["tokenizer.ggml.token_type"][255:258] == [1, 3, 5]
    state = load_file(folder / "model.safetensors")
    matrix = state["transformer.h.2.mlp.c_fc.weight"].t().bfloat16().contiguous()
    raw = tensors["blk.2.ffn_up.weight"].view(np.uint8)
    assert np.array_equal(raw, matrix.view(torch.uint8).numpy())
    assert not {"output.weight", "blk.0.ffn_gate.weight"} & {*tensors}


GEMMA_3 = {
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 10,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
}
SCALED = {
    "rope_parameters": dict.fromkeys(
        ("full_attention", "sliding_attention"),
        dict(rope_type="linear", rope_theta=1e4, factor=3.0),
    )
}
REFUSED = {
    "mistral with a window": ("mistral, window", {}, "windows=0"),
    "an activation": ("gpt2, untied, inverse layer scale", {}, "activation_type=gelu"),
    "a family": ("gpt_oss", {}, "gpt_oss is none of gpt2"),
    "YaRN without rounding": ("mistral, yarn, tied", {"sliding_window": None}, "rope_truncate"),
    "LongRoPE": ("phi3, longrope", {}, "rope_type=default|linear|yarn"),
    "biases": ("qwen3", {"attention_bias": True}, "add_linear_biases=0"),
    "Qwen3-MoE without normalization": ("qwen3_moe", {"norm_topk_prob": False}, "top_k=1"),
    "OLMoE with it": ("olmoe", {"num_key_value_heads": 5, "norm_topk_prob": True}, "top_k=0"),
    "another order of windows": ("gemma2, no caps, untied", {}, "windows=10"),
    "scaled blocks with a window": ("gemma3_text", GEMMA_3 | SCALED, "scaled_windows=0"),
    "another scale of scores": ("gemma2", {}, "channels=kv_channels"),
}


@needs_gguf
@pytest.mark.parametrize("case", REFUSED)
def test_refuses_what_llama_cpp_computes_otherwise(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, changes, reason = REFUSED[case]
    folder = write_folder(name, tmp_path / "hf", **copy.deepcopy(changes))
    assert convert(folder, tmp_path / "g") == 2
    message = capsys.readouterr().err
    assert reason in message and "write --format=huggingface" in message
    assert not (tmp_path / "g").exists()


def test_needs_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder("gpt2", tmp_path / "hf")
    assert convert(folder, tmp_path / "g", "--verify") == 2
    assert convert(folder, tmp_path / "g", "--shard_size=1GB") == 2
    assert capsys.readouterr().err.count("leave it out") == 2
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert convert(folder, tmp_path / "g") == 2
    assert "pip install 'megatron_lite[gguf]'" in capsys.readouterr().err


# -- tokenizers


def split_by(pattern: str) -> Any:
    bytes_ = splitters.ByteLevel(add_prefix_space=False, use_regex=False)
    return splitters.Sequence([splitters.Split(Regex(pattern), "isolated"), bytes_])


def byte_level(splitter: Any, **model: Any) -> Tokenizer:
    """Train a byte-level BPE. model: changes of its `model`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = splitter, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|user|>"],
        initial_alphabet=sorted(splitters.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXTS, *DOCUMENTS] * 3, trainer)
    tokenizer.add_tokens([AddedToken("<added>", normalized=False)])
    said = json.loads(tokenizer.to_str())
    said["model"] |= model
    return Tokenizer.from_str(json.dumps(said))


def sentence_piece(is_prefixed: bool) -> Tokenizer:
    """Make a BPE of characters with a merge for each two halves of a token, as conversions of
    SentencePiece's models have."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = splitters.Split(Regex("(?=▁)"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=500, limit_alphabet=150, show_progress=False)
    trained.train_from_iterator([*TEXTS, *DOCUMENTS] * 3, trainer)
    found = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    words = [text for text, _ in found if len(text) > 1]
    letters = [text for text, _ in found if len(text) == 1]
    order = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *words, *letters]
    vocabulary = {text: number for number, text in enumerate(order)}
    halves = [(text[:cut], text[cut:]) for text in words for cut in range(1, len(text))]
    merges = [pair for pair in halves if {*pair} <= {*vocabulary}]
    model = models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer, spaces = Tokenizer(model), normalizers.Replace(" ", "▁")
    prefixed = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    tokenizer.normalizer = prefixed if is_prefixed else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    template = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.post_processor = template
    return tokenizer


DOCUMENTS = [
    path.read_text("utf-8") for path in sorted(Path(__file__).parents[2].glob("docs/s*.md"))
]
TEXTS = [
    *("Hello world", "it's we'LL I'VE O'NEIL", "  two   spaces \n\n\nlines \t tab \r\n end "),
    *(
        "1234567 12.5 ½ ² ٣٤٥",
        "日本語のテキスト русский текст العربية हिन्दी",
        "😀👩‍👩‍👧 e\u0301 é ÉCOLE straße",
    ),
    *(
        "x=1;\n    return  foo(bar)[0]#!!",
        "<|endoftext|>a<|user|>b<added>c",
        "   ",
        "\n \n a",
        " leading",
    ),
    *("a\u00a0b\u2028c\u3000d", "ſ's 'ſ Ǆ ǅ ǆ", ""),
]
KNOWN: dict[str, tuple[str, Callable[[], Tokenizer]]] = {
    "GPT-2": ("gpt-2", lambda: byte_level(BYTES)),
    "StarCoder 2": (
        "smollm",
        lambda: byte_level(splitters.Sequence([splitters.Digits(individual_digits=True), BYTES])),
    ),
    "Qwen": ("qwen2", lambda: byte_level(split_by(QWEN))),
    "Llama 3's pattern": ("smaug-bpe", lambda: byte_level(split_by(LLAMA_3))),
    "Llama 3": ("llama-bpe", lambda: byte_level(split_by(LLAMA_3), ignore_merges=True)),
    "bytes": ("gpt-2", lambda: Tokenizer.from_file(str(BYTE_FILE))),
    "Llama 2": ("", lambda: sentence_piece(True)),
    "Gemma": ("", lambda: sentence_piece(False)),
}


def save(tokenizer: Tokenizer, folder: Path) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_keys_of_tokenizers(tmp_path: Path) -> None:
    for name in ("GPT-2", "Llama 3"):
        pre, make = KNOWN[name]
        keys = tokenizer_keys(save(make(), tmp_path), 700)
        assert keys["tokenizer.ggml.pre"] == pre
        assert keys["tokenizer.ggml.token_type"][:3] == [3, 3, 1]  # two special ones
        assert keys["tokenizer.ggml.tokens"][600] == "<added>"
        assert keys["tokenizer.ggml.token_type"][600:602] == [4, 5]
        assert not keys["tokenizer.ggml.add_bos_token"] and "tokenizer.ggml.scores" not in keys
    keys = tokenizer_keys(save(sentence_piece(True), tmp_path), 900)
    assert keys["tokenizer.ggml.model"] == "llama" and keys["tokenizer.ggml.add_space_prefix"]
    assert keys["tokenizer.ggml.add_bos_token"] and keys["tokenizer.ggml.bos_token_id"] == 1
    assert keys["tokenizer.ggml.token_type"][2:4] == [3, 6]  # </s> and a byte
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "{{ messages }}"}))
    keys = tokenizer_keys(save(sentence_piece(False), tmp_path), 900)
    assert keys["tokenizer.chat_template"] == "{{ messages }}"
    assert not keys["tokenizer.ggml.add_space_prefix"]


def test_refuses_tokenizers(tmp_path: Path) -> None:
    def refused(tokenizer: Tokenizer, vocab_size: int = 900) -> str:
        with pytest.raises(DataError) as error:
            tokenizer_keys(save(tokenizer, tmp_path), vocab_size)
        return str(error.value)

    assert r"splits them by \w+" in refused(byte_level(split_by(r"\w+")))
    character_tokenizer(["ab"], str(tmp_path / "characters.json"))
    with pytest.raises(DataError, match="its BPE splits them by no rule; write"):
        tokenizer_keys(tmp_path / "characters.json", 900)
    prefixed = splitters.ByteLevel(add_prefix_space=True)
    assert '"add_prefix_space": true' in refused(byte_level(prefixed))
    assert "ignores merges" in refused(byte_level(BYTES, ignore_merges=True))
    assert "has 601 ids, and the model 600" in refused(byte_level(BYTES), 600)
    folded = byte_level(BYTES)
    folded.normalizer = normalizers.Lowercase()
    assert "Lowercase" in refused(folded)
    trained = sentence_piece(True)
    said = json.loads(trained.to_str())
    said["model"]["merges"] = said["model"]["merges"][1:]
    assert "merges are not all" in refused(Tokenizer.from_str(json.dumps(said)))
    trained.normalizer = None
    trained.pre_tokenizer = splitters.Metaspace(prepend_scheme="first", split=False)
    assert "Metaspace" in refused(trained)


@pytest.mark.slow
@needs_llama_cpp
@pytest.mark.parametrize("name", KNOWN)
def test_llama_cpp_gives_texts_the_same_ids(name: str, tmp_path: Path) -> None:
    tokenizer = KNOWN[name][1]()
    folder = write_folder("llama", tmp_path / "hf", vocab_size=1000)
    save(tokenizer, folder)
    assert convert(folder, tmp_path / "g") == 0
    draw, every = random.Random(0), "".join(DOCUMENTS)
    starts = [draw.randrange(len(every) - 100) for _ in range(60)]
    texts = [*TEXTS, *(every[start : start + draw.randrange(1, 100)] for start in starts)]
    letters = " \n\t'a1Zé日.,!\r-_ \u00a0sSdD9²ー"
    texts += ["".join(draw.choices(letters, k=draw.randrange(1, 25))) for _ in range(60)]
    found = ask(tmp_path / "g" / "model.gguf", [], texts)["ids"]
    for text, ids in zip(texts, found, strict=True):
        assert ids == tokenizer.encode(text).ids, repr(text)


# -- logits

YARN, LLAMA_3_ROPE, LINEAR, PLAIN = (
    {"rope_parameters": {"rope_theta": 500.0} | changes}
    for changes in (
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16),
        dict(rope_type="llama3", factor=4.0, original_max_position_embeddings=16)
        | dict(low_freq_factor=1.0, high_freq_factor=4.0),
        dict(rope_type="linear", factor=3.0),
        dict(rope_type="default"),
    )
)
NO_WINDOW: dict[str, Any] = {"sliding_window": None}
UNTIED, UNBIASED = {"tie_word_embeddings": False}, {"attention_bias": False}
# A family of tests/support/families.py and changes of its keys.
COMPUTED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"mlp_bias": True, "attention_bias": True, "head_dim": 8} | LINEAR),
    ("llama", YARN),
    ("llama, llama3 rope, tied, attention biases", {}),
    ("mistral, yarn, tied", NO_WINDOW | LLAMA_3_ROPE),
    ("gpt2", {}),
    ("gpt_bigcode, multi-query", {}),
    ("gpt_bigcode, multi-head, untied", {}),
    ("qwen2, yarn", YARN),
    ("qwen2, window, tied", {"use_sliding_window": False}),
    ("qwen3", {}),
    ("qwen3", LINEAR | {"tie_word_embeddings": True}),
    ("starcoder2, window", NO_WINDOW),
    ("stablelm", {}),
    ("stablelm, biases, tied", {}),
    ("stablelm, parallel branches", {}),
    ("gpt_neox", {}),
    ("gpt_neox", {"use_parallel_residual": False, "tie_word_embeddings": True}),
    ("phi3", {}),
    ("phi3, partial rope, window, tied", NO_WINDOW),
    ("olmo2, yarn", YARN),
    ("olmo2, biases, tied", UNBIASED),
    ("olmo3, every fourth block full, biases, tied", UNBIASED),
    ("smollm3", {}),
    ("smollm3", LINEAR | UNTIED),
    ("gemma", {}),
    ("gemma2", {"query_pre_attn_scalar": 10}),
    ("gemma3_text", GEMMA_3),
    ("gemma3_text, one base, biases", GEMMA_3 | UNBIASED | UNTIED),
    ("granite", YARN),
    ("granite, usual factors, biases, tied", {}),
    ("nemotron, linear rope", {"hidden_size": 80}),
    ("nemotron, biases, tied", {"hidden_act": "relu2"}),
    ("seed_oss", {}),
    ("seed_oss", UNBIASED | YARN),
    ("exaone4, no window, tied", LLAMA_3_ROPE),
    ("exaone4, no window, tied", UNTIED | PLAIN),
    ("glm4", YARN),
    ("glm4, linear rope, no biases, tied", {}),
    ("cohere2", {}),
    ("mixtral", LINEAR),
    ("mixtral, window, tied", NO_WINDOW),
    ("qwen3_moe", YARN),
    ("olmoe", {"num_key_value_heads": 5}),
    ("olmoe, one choice, biases, tied", UNBIASED),
    ("granitemoe", {}),
    ("granitemoe, scores without a factor, biases, tied", {}),
]
# llama.cpp reads GELU from a table of fp16.
WITH_GELU = ("gpt2", "gpt_bigcode", "gpt_neox", "starcoder2", "gemma")


@pytest.mark.slow
@needs_llama_cpp
@pytest.mark.parametrize("number", range(len(COMPUTED)))
def test_llama_cpp_computes_the_same(number: int, tmp_path: Path) -> None:
    name, changes = COMPUTED[number]
    # transformers changes dictionaries that it is given
    folder = write_folder(name, tmp_path / "hf", **copy.deepcopy(changes))
    save_letters(folder)
    assert convert(folder, tmp_path / "g", "--dtype=fp32") == 0
    model, tokens = load_model(folder), random_tokens()
    prompts = [tokens[0].tolist(), tokens[1, :5].tolist(), tokens[1, :1].tolist()]
    found = ask(tmp_path / "g" / "model.gguf", prompts)["logprobs"]
    limit = 1e-2 if FAMILIES[name]["model_type"].startswith(WITH_GELU) else 1e-4
    for prompt, theirs in zip(prompts, found, strict=True):
        ours = logits_of(model, torch.tensor([prompt]))[0, -1].log_softmax(-1)
        torch.testing.assert_close(torch.tensor(theirs), ours, atol=limit, rtol=0.0)
