"""Conversations as tokens and loss masks, token by token beside transformers'
`apply_chat_template`."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megatron_lite.cli.prepare_data import main, parse, read_options
from megatron_lite.corpus.prepare import prepare as prepare_corpus
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.tokenizing import JsonTokenizer, copy_tokenizer, train_tokenizer
from scripts.concatenate_dataset import find_pairs
from tests.support.token_files import data_config, read_batches

TEXTS = [
    "What is the capital of Spain? Madrid.",
    "Wie heißt das? Größe: 12 €\n\n",
    "こんにちは 😀 é\t",
    "assistant user model system",
]
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Größe <&>", "parameters": {"type": "object"}},
}
# In the styles of Qwen 2.5, Llama 3, Gemma 2 and Zephyr. ANSWER stands for what the assistant says,
# with its end.
QWEN = """{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
{%- else %}
    {%- set system = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' %}
{%- endif %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>" }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' }}
        {%- BEGIN %}
        {%- if message.content %}
            {{- message.content }}
        {%- endif %}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- END %}
        {{- '\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% if loop.index0 == 0 %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{% if message['role'] == 'assistant' %}{% BEGIN %}{{ message['content'] | trim + '<|eot_id|>' }}{% END %}"
    "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{{ '<start_of_turn>model\\n' }}{% BEGIN %}"
    "{{ message['content'] | trim + '<end_of_turn>' }}{% END %}{{ '\\n' }}"
    "{% else %}{{ '<start_of_turn>user\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}\n"
    "{% if message['role'] == 'user' %}\n{{ '<|user|>\\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n{{ '<|system|>\\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\\n' }}"
    "{% BEGIN %}{{ message['content'] + eos_token }}{% END %}{{ '\\n' }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)


def plain(template: str) -> str:
    return template.replace("BEGIN", "if true").replace("END", "endif")


def marked(template: str) -> str:
    return template.replace("BEGIN", "generation").replace("END", "endgeneration")


def byte_level(special: list[str], begin: str = "") -> Tokenizer:
    """A byte-level BPE; `begin` stands before a text that asks for special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
        )
    return tokenizer


def sentencepiece(special: list[str], prefix: bool) -> Tokenizer:
    """A BPE over characters with fallback to bytes; `prefix`: with a space before each part of a
    text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    names = ["<unk>", *special, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator([text for text in TEXTS if text.isascii()] * 4, trainer)
    for name in special:
        tokenizer.add_special_tokens([AddedToken(name, normalized=False)])
    return tokenizer


# By family: tokenizer, its special tokens, template, and whether that takes a system message.
FAMILIES: dict[str, tuple[Any, dict[str, str], str, bool]] = {
    "qwen": (
        lambda: byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        QWEN,
        True,
    ),
    "llama": (
        lambda: byte_level(
            [
                "<|begin_of_text|>",
                "<|end_of_text|>",
                "<|start_header_id|>",
                "<|end_header_id|>",
                "<|eot_id|>",
            ],
            "<|begin_of_text|>",
        ),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        LLAMA,
        True,
    ),
    "gemma": (
        lambda: sentencepiece(
            ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"], prefix=False
        ),
        {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"},
        GEMMA,
        False,
    ),
    "zephyr": (
        lambda: sentencepiece(["<s>", "</s>"], prefix=True),
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        ZEPHYR,
        True,
    ),
}


def write_tokenizer(folder: Path, family: str, template: str) -> Path:
    build, tokens, _, _ = FAMILIES[family]
    folder.mkdir()
    build().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def prepare(source: Path, prefix: Path, *words: object, code: int = 0) -> None:
    assert (
        main([str(source), "--output_prefix", str(prefix), "--num_processes=1", *map(str, words)])
        == code
    )


def pairs(prefix: Path) -> list[tuple[list[int], list[int]]]:
    """The tokens and the mask of each document."""
    tokens, mask = IndexedDataset(str(prefix)), IndexedDataset(f"{prefix}_mask")
    assert tokens.num_documents == mask.num_documents
    return [
        (tokens.document(n).tolist(), mask.document(n).tolist())
        for n in range(tokens.num_documents)
    ]


def said(prefix: Path) -> list[str]:
    """What counts in each document, as text."""
    tokenizer = JsonTokenizer(f"{prefix}.tokenizer.json")
    return [
        tokenizer.decode([token for token, counts in zip(*pair, strict=True) if counts], True)
        for pair in pairs(prefix)
    ]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def conversations(system: bool) -> list[list[dict[str, Any]]]:
    """One to three turns of random texts, with white space around them and characters of several
    bytes."""
    draw = random.Random(0)

    def text() -> str:
        words = " ".join(
            draw.choices(
                "Madrid. größer 12 € 😀😀 こんにちは é\n\n the capital".split(" "),
                k=draw.randrange(1, 9),
            )
        )
        return draw.choice(["", " ", "\n"]) + words + draw.choice(["", "  ", "\n\n"])

    made = [
        [part for _ in range(draw.randrange(1, 4)) for part in (user(text()), assistant(text()))]
        for _ in range(30)
    ]
    if system:
        made = [
            [{"role": "system", "content": text()}, *messages] if draw.random() < 0.5 else messages
            for messages in made
        ]
    return [*made, [user("nobody answers")]]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_mask_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """With the family's template, and with the same one that marks the answer for transformers; 31
    conversations."""
    _, _, template, system = FAMILIES[family]
    messages = conversations(system)
    source = write_lines(tmp_path / "chats.jsonl", [{"messages": each} for each in messages])
    theirs = PreTrainedTokenizerFast.from_pretrained(
        write_tokenizer(tmp_path / "marked", family, marked(template))
    )
    unmarked = PreTrainedTokenizerFast.from_pretrained(
        write_tokenizer(tmp_path / "plain", family, plain(template))
    )
    expected = []
    for each in messages:
        whole = theirs.apply_chat_template(
            each, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        expected.append((whole["input_ids"], whole["assistant_masks"]))
        assert (
            unmarked.apply_chat_template(each, tokenize=True, return_dict=True)["input_ids"]
            == whole["input_ids"]
        )
    assert expected[-1][1].count(1) == 0 < expected[0][1].count(1)
    for name in ("plain", "marked"):
        prepare(
            source, tmp_path / f"{name}_data", "--tokenizer", tmp_path / name, "--chat_template=own"
        )
        assert pairs(tmp_path / f"{name}_data") == expected, name


def test_tools_and_calls(tmp_path: Path) -> None:
    """What a record says besides messages reaches the template; an answer that only calls counts;
    null is absent."""
    folder = write_tokenizer(tmp_path / "plain", "qwen", plain(QWEN))
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "€"}}}
    messages = [
        {**user("1 + 1?"), "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        assistant("Two."),
    ]
    source = write_lines(tmp_path / "chats.jsonl", [{"messages": messages, "tools": [TOOL]}])
    prepare(source, tmp_path / "x", "--tokenizer", folder, "--chat_template=own")
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = theirs.apply_chat_template(messages, tools=[TOOL], tokenize=True, return_dict=True)[
        "input_ids"
    ]
    assert pairs(tmp_path / "x")[0][0] == expected
    assert said(tmp_path / "x") == [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "€"}}\n</tool_call><|im_end|>Two.<|im_end|>'
    ]


def test_other_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompt and completion, as texts or messages, and ShareGPT's names. Of earlier answers in a
    prompt none counts. A completion ends with the end of a document, once; a template ends its
    turns itself."""
    records = [
        {"prompt": "2 + 2 =", "completion": " 4"},
        {"prompt": "2 + 2 =", "completion": " 4<|endoftext|>"},
        {"prompt": "2 + 2 =", "completion": ""},
        {"prompt": [user("a"), assistant("b"), user("c")], "completion": [assistant("d 😀")]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
        {"messages": [user("hi"), assistant("")]},
    ]
    source = write_lines(tmp_path / "chats.jsonl", records)
    for words in (["--train_tokenizer=300"], ["--tokenizer=byte"]):
        prepare(source, tmp_path / "x", "--chat_template=zephyr", "--overwrite", *words)
        end = "<|endoftext|>"
        assert said(tmp_path / "x") == [f" 4{end}", f" 4{end}", "", f"d 😀{end}", f"ho{end}", ""], (
            words
        )
        tokenizer = JsonTokenizer(str(tmp_path / "x.tokenizer.json"))
        whole = tokenizer.decode(pairs(tmp_path / "x")[4][0], True)
        assert whole == f"<|user|>\nhi{end}\n<|assistant|>\nho{end}\n"
        assert "2 documents without an answer" in capsys.readouterr().out
    prepare(source, tmp_path / "y", "--chat_template=zephyr", "--end_of_document=none")
    assert said(tmp_path / "y")[0] == " 4"
    prepare(source, tmp_path / "w", "--chat_template=chatml", "--end_of_document=<|endoftext|>")
    assert said(tmp_path / "w") == [
        f" 4{end}", f" 4{end}", "", f"d 😀<|im_end|>{end}", f"ho<|im_end|>{end}", ""
    ]  # fmt: skip
    assert all(tokens.count(256) == 1 and tokens[-1] == 256 for tokens, _ in pairs(tmp_path / "w"))
    prepare(write_lines(tmp_path / "k.jsonl", [{"a": {"b": records[5]["messages"]}}]), tmp_path / "z",
            "--chat_template=chatml", "--json_key=a.b")  # fmt: skip
    assert len(pairs(tmp_path / "z")) == 1


def test_tables(tmp_path: Path) -> None:
    """Rows of parquet files are records; keys that other rows have are null in them."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    records = [
        {"messages": [user("a"), {**assistant("b"), "name": "x"}]},
        {"prompt": "c", "completion": "d"},
    ]
    parquet.write_table(arrow.Table.from_pylist(records[:1]), tmp_path / "a.parquet")
    empty = {"messages": None, "prompt": None, "completion": None, "text": "t"}
    parquet.write_table(
        arrow.Table.from_pylist([empty | record for record in records]), tmp_path / "b.parquet"
    )
    source = write_lines(tmp_path / "chats.jsonl", [records[0], *records])
    prepare(source, tmp_path / "lines", "--chat_template=chatml")
    prepare(tmp_path / "*.parquet", tmp_path / "rows", "--chat_template=chatml")
    assert pairs(tmp_path / "rows") == pairs(tmp_path / "lines")


def test_bad_records_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By line, key and rule; with --strict the first one ends the work."""
    # drops what was thought before the last question, as Qwen 3 does
    thinks = tmp_path / "thinks.jinja"
    thinks.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] if not loop.last else m.content }}\n"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    good = [user("a"), assistant("<think>b</think>c")]
    bad = {
        "needs messages (a list), conversations, or prompt and completion": [
            {},
            3,
            {"messages": []},
            {"prompt": "x"},
        ],
        "messages[1] needs a role and a content, both texts": [
            {"messages": [user("a"), message]}
            for message in ({"content": "x"}, {"role": 1}, 7, assistant(8))  # type: ignore[arg-type]
        ],
        "what the chat template writes up to messages[1] changes with what follows (it drops thoughts, or "
        "begins answers differently); end the record there, or give a template with {% generation %} blocks": [
            {"messages": [*good, user("d"), assistant("e")]}
        ],
        "the chat template (--chat_template) refuses it: ": [
            {"messages": [{"role": "user", "content": [{"text": "x"}]}, assistant("b")]}
        ],
    }
    lines = [record for records in bad.values() for record in records]
    source = write_lines(tmp_path / "chats.jsonl", [*lines, {"messages": good}])
    prepare(source, tmp_path / "x", f"--chat_template={thinks}")
    printed = capsys.readouterr().err.splitlines()
    rules = [rule for rule, records in bad.items() for _ in records]
    for number, rule in enumerate(rules, 1):
        assert printed[number - 1].startswith(
            f"skipped {source}: line {number}: not a conversation: {rule}"
        ), number
    assert said(tmp_path / "x") == ["<think>b</think>c\n"]
    prepare(source, tmp_path / "y", f"--chat_template={thinks}", "--strict", code=3)
    assert f"ERROR: {source}: line 1: not a conversation: needs messages" in capsys.readouterr().err


def test_bad_templates_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """None, a missing file, a wrong one, one that leaves the sandbox, and flags that a template
    does not need."""
    source = write_lines(tmp_path / "chats.jsonl", [{"messages": [user("a"), assistant("b")]}])
    escape = tmp_path / "escape.jinja"
    escape.write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    (tmp_path / "wrong.jinja").write_text("{% for %}")
    for words, code, message in (
        (
            ["--chat_template=own"],
            2,
            "this tokenizer has no chat template; --chat_template is chatml, llama3",
        ),
        (["--chat_template=absent"], 3, "absent: "),
        (
            [f"--chat_template={tmp_path / 'wrong.jinja'}"],
            3,
            "the chat template (--chat_template) refuses it: ",
        ),
        (
            [f"--chat_template={escape}"],
            3,
            "access to attribute '__class__' of 'list' object is unsafe",
        ),
        (["--chat_template=chatml", "--separator=x"], 2, "--chat_template: leave out --separator"),
    ):
        prepare(source, tmp_path / "x", *words, code=code)
        assert message in capsys.readouterr().err, words
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "chats.jsonl",
        "escape.jinja",
        "wrong.jinja",
    ]


def test_random_records_end_no_run(tmp_path: Path) -> None:
    """Any JSON value in any place of a record makes a document or a fault, never an error of
    ours."""
    draw = random.Random(1)
    simple = [
        None,
        True,
        3,
        2.5,
        "",
        " ",
        "text",
        "assistant",
        "user",
        "\ud83d",
        "{{ x }}",
        "<|im_end|>",
    ]
    keys = [
        "messages",
        "role",
        "content",
        "prompt",
        "completion",
        "conversations",
        "from",
        "value",
        "tools",
    ]

    def value(depth: int = 0) -> Any:
        if depth > 2 or draw.random() < 0.5:
            return draw.choice(simple)
        if draw.random() < 0.5:
            return [value(depth + 1) for _ in range(draw.randrange(3))]
        return {key: value(depth + 1) for key in draw.sample(keys, draw.randrange(5))}

    def changed(part: Any) -> Any:
        """A record with one part replaced, or a key more."""
        if not isinstance(part, list | dict) or draw.random() < 0.2:
            return value()
        places = list(part) if isinstance(part, dict) else range(len(part))
        place = draw.choice([*places, "tools"] if isinstance(part, dict) else places)
        if isinstance(part, list):
            return [changed(item) if number == place else item for number, item in enumerate(part)]
        return {**part, place: changed(part.get(place))}

    talk = [user("a"), assistant("b")]
    good = [
        {"messages": talk},
        {"prompt": talk[:1], "completion": talk[1:]},
        {"prompt": "a", "completion": "b"},
    ]
    good += [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]
    source = write_lines(
        tmp_path / "chats.jsonl", [changed(draw.choice(good)) for _ in range(1500)]
    )
    prepare(source, tmp_path / "x", "--chat_template=chatml")
    assert 100 < len(pairs(tmp_path / "x")) < 1400


def test_every_pair_has_its_mask(tmp_path: Path) -> None:
    """Of shards and validation documents, without duplicates; --verify and folders know the masks.
    Two processes with many pieces write the same bytes."""
    records = [{"messages": [user(f"{n % 37}?"), assistant("x" * (n % 37))]} for n in range(60)]
    source = write_lines(tmp_path / "chats.jsonl", records)
    words = ("--chat_template=chatml", "--shards=2", "--validation_documents=7", "--deduplicate")
    prepare(source, tmp_path / "data" / "x", *words)
    prefixes = [
        tmp_path / "data" / f"x{part}"
        for part in ("-00000-of-00002", "-00001-of-00002", "_validation")
    ]
    found = [text for prefix in prefixes[:2] for text in _said(prefix, tmp_path / "data" / "x")]
    held_out = _said(prefixes[2], tmp_path / "data" / "x")
    assert len(found) == 30 and len(held_out) == 7 and len({*found, *held_out}) == 37
    assert all(text in ("", *("x" * n + "<|im_end|>" for n in range(1, 37))) for text in found)
    assert all(
        main(["--verify", f"{prefix}{part}"]) == 0 for prefix in prefixes for part in ("", "_mask")
    )
    assert find_pairs([str(tmp_path / "data")]) == list(map(str, prefixes[:2]))
    again = parse(
        [
            str(source),
            "--output_prefix",
            str(tmp_path / "again" / "x"),
            "--num_processes=2",
            *words,
        ],
        "",
    )
    prepare_corpus(replace(read_options(again), piece_bytes=1500))
    names = sorted(
        path.name for path in (tmp_path / "data").iterdir() if path.suffix in (".bin", ".idx")
    )
    assert len(names) == 12
    assert all(
        (tmp_path / "again" / x).read_bytes() == (tmp_path / "data" / x).read_bytes() for x in names
    )
    # Data of another kind in this place leave nothing of the old tokenizer.
    (tmp_path / "a.txt").write_text("text")
    prepare(tmp_path / "a.txt", tmp_path / "data" / "x", "--overwrite")
    assert not (tmp_path / "data" / "x.tokenizer_config.json").exists()


def _said(prefix: Path, corpus: Path) -> list[str]:
    tokenizer = JsonTokenizer(f"{corpus}.tokenizer.json")
    return [
        tokenizer.decode(np.array(tokens)[np.array(mask) == 1], True)
        for tokens, mask in pairs(prefix)
    ]


@pytest.mark.parametrize("order", [{}, {"shuffle_documents": True}, {"truncate_documents": False}])
def test_packing_keeps_the_mask(tmp_path: Path, order: dict[str, Any]) -> None:
    """In streams, shuffled documents and whole documents, a label counts if it is of an answer,
    which has small letters, or ends one."""
    (tmp_path / "bare.jinja").write_text(
        "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    )
    records = [
        {"messages": [user("Q" * (n + 1)), assistant("abc"[n % 3] * 9), user("R")]}
        for n in range(20)
    ]
    source = write_lines(tmp_path / "chats.jsonl", records)
    prepare(source, tmp_path / "x", f"--chat_template={tmp_path / 'bare.jinja'}")
    options: dict[str, Any] = dict(
        batch_size=4, micro_batch_size=4, sequence_length=40, train_iters=9, vocab_size=257
    )
    config = data_config(
        str(tmp_path / "x"), loss_mask=(str(tmp_path / "x_mask"),), **{**options, **order}
    )
    for batch in (batch for step in read_batches(config) for batch in step):
        before, labels = batch.tokens[:, :-1].numpy(), batch.tokens[:, 1:].numpy()
        small = [(array >= ord("a")) & (array <= ord("z")) for array in (before, labels)]
        assert batch.masked is not None
        np.testing.assert_array_equal(
            ~batch.masked.numpy(), small[1] | ((labels == 256) & small[0])
        )


def test_an_export_carries_the_template(tmp_path: Path) -> None:
    """transformers renders a conversation with the tokenizer of an export as the data were
    rendered."""
    train_tokenizer(iter(TEXTS * 4), 300, str(tmp_path / "given.json"))
    messages = [{"role": "system", "content": "s"}, user("größer?"), assistant("ja 😀")]
    source = write_lines(tmp_path / "chats.jsonl", [{"messages": messages}])
    for name in ("chatml", "llama3", "zephyr"):
        prepare(
            source,
            tmp_path / name,
            "--tokenizer",
            tmp_path / "given.json",
            f"--chat_template={name}",
        )
        (tmp_path / f"{name}_export").mkdir()
        copy_tokenizer(tmp_path / f"{name}.tokenizer.json", tmp_path / f"{name}_export")
        theirs = AutoTokenizer.from_pretrained(tmp_path / f"{name}_export")
        ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        assert ids == pairs(tmp_path / name)[0][0] and theirs.eos_token == "<|endoftext|>", name
    # A base model's tokenizer has the token that ends a turn, and ends documents with another.
    byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]).save(str(tmp_path / "base.json"))
    prepare(source, tmp_path / "x", "--tokenizer", tmp_path / "base.json", "--chat_template=chatml")
    copied = copy_tokenizer(tmp_path / "x.tokenizer.json", tmp_path / "zephyr_export")
    assert copied["eos_token_id"] == JsonTokenizer(str(tmp_path / "base.json")).token_id(
        "<|im_end|>"
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "zephyr_export").eos_token == "<|im_end|>"
