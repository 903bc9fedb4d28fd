"""A tokenizer folder means what transformers says it means: ids, ends, masks and texts beside its
own, or a refusal."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from megatron_lite.corpus import tokenizer_folder
from megatron_lite.corpus.tokenizer_folder import effective
from megatron_lite.data.tokenizing import JsonTokenizer, copy_tokenizer, load_tokenizer
from megatron_lite.errors import DataError
from tests.corpus.test_conversations import TOOL, assistant, pairs, prepare, user, write_lines

transformers = pytest.importorskip("transformers")

TEXTS = [
    "Hello<|endoftext|> world <|im_end|>\n<extra> it's 12345",
    " <|im_start|>größer 😀 <|im_end|><s>x</s>[MASK] <think> y</think>",
    "123 don't  we\n\n  <extra><extra> end",
]
CHATS: list[dict[str, Any]] = [
    {"messages": [user("a"), assistant("b <extra>")]},
    {
        "messages": [
            {"role": "system", "content": "s"},
            user("größer"),
            assistant("c\n"),
            user("d"),
            assistant("e"),
        ]
    },
    {"messages": [user("1 + 1?"), {**assistant("2"), "reasoning": "because"}], "tools": [TOOL]},
    {"messages": [user("1 + 1?"), {**assistant("2"), "thinking": "so"}, user("x")], "tools": []},
    {"messages": [user("1"), {**assistant("2"), "reasoning_content": "thus", "name": None}]},
]
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}BEGIN{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}<|im_end|>FINISH{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if pad_token is defined %}{{ pad_token }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = TEMPLATE.replace("BEGIN", "").replace("FINISH", "")
MARKED = TEMPLATE.replace("BEGIN", "{% generation %}").replace("FINISH", "{% endgeneration %}")
OTHER = "T " + PLAIN.replace("m.reasoning_content", "m.thinking")
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
TYPE = {"__type": "AddedToken"}
EOS = {"eos_token": "<|endoftext|>"}
SPLIT = r"\p{N}{1,3}|[^\s\p{N}]+|\s+"  # as no class of transformers


def token(content: str, **flags: bool) -> dict[str, Any]:
    return {
        "content": content,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
        **flags,
    }


def bytes_and_pairs(pattern: str | None = None) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, "He", "ll", "12", "123", "Ġw", "'t", "nd"]
    merges = [("H", "e"), ("l", "l"), ("1", "2"), ("12", "3"), ("Ġ", "w"), ("'", "t"), ("n", "d")]
    made = Tokenizer(
        models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=merges)
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern is not None:
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), "isolated"),
             pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )  # fmt: skip
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return made


def with_prefix() -> Tokenizer:
    """Like Llama 2's: a prefix, fallback to bytes, <s> before a text."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "H",
        "e",
        "l",
        "o",
        "He",
        "<|",
    ]
    made = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, [("H", "e")], unk_token="<unk>",
                                fuse_unk=True, byte_fallback=True))  # fmt: skip
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def words() -> Tokenizer:
    made = Tokenizer(
        models.WordLevel({"not": 0, "Hello": 1, "world": 2, "end": 3}, unk_token="not")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return made


def with_dropout() -> Tokenizer:
    made = bytes_and_pairs()
    made.model.dropout = 0.5
    return made


def with_limits() -> Tokenizer:
    made = bytes_and_pairs()
    made.enable_truncation(4)
    made.enable_padding(length=50)
    return made


def case(
    build: Callable[[], Tokenizer] = bytes_and_pairs, says: bool | str | None = True, **files: Any
) -> Any:
    """A tokenizer and the files beside it. says: whether they say more than tokenizer.json; a text:
    the refusal.

    None: they do, but only transformers knows.
    """
    return build, files, says


def config(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.items()} | more


# Where tokens stand: in the configuration, the map, the list of added tokens, with flags that
# differ, or null.
CASES: dict[str, Any] = {
    "bare": case(says=False),
    "plain": case(config=config(FAST, EOS), says=False),
    "null bos": case(config=config(FAST, EOS, bos_token=None, add_bos_token=True), says=False),
    "object eos": case(config=config(FAST, eos_token=TYPE | token("<|im_end|>")), says=False),
    "eos in the map": case(config=FAST, map={"eos_token": "<|im_end|>"}, says=False),
    "eos in both, differing": case(config=config(FAST, EOS), map={"eos_token": "<|im_end|>"}, says=False),
    "the map without a configuration": case(map={"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}, says=False),
    "eos in both, tokens listed": case(
        config=config(FAST, EOS, added_tokens_decoder={"263": token("<|endoftext|>", special=True)}),
        map={"eos_token": "<|im_end|>"}, says=False,
    ),
    "bos only in the configuration": case(config=config(FAST, EOS, bos_token="<s>")),
    "bos only in the map": case(config=config(FAST, EOS), map={"bos_token": "<s>"}),
    "objects that are no tokens": case(
        config=config(FAST, EOS, response_schema={"properties": {"content": {"type": "string"}}}, init_inputs=[]),
        says=False,
    ),
    "sep as an object": case(config=config(FAST, EOS, sep_token=TYPE | token("[SEP]"))),
    "a list of extra tokens": case(config=config(FAST, EOS, extra_special_tokens=["<extra>", "[MASK]"])),
    "additional special tokens": case(config=config(FAST, EOS, additional_special_tokens=["<extra>", "<think>"])),
    "additional ones in the map": case(config=config(FAST, EOS), map={"additional_special_tokens": ["<extra>"]}),
    "named extra tokens": case(config=config(FAST, EOS, extra_special_tokens={"image_token": "<extra>"})),
    "a token of its own name": case(config=config(FAST, EOS, image_token="<extra>")),
    "a list of added tokens": case(config=config(FAST, EOS), added={"<extra>": 270, "<think>": 271}),
    "added tokens, one special": case(config=config(FAST, EOS, pad_token="<extra>"), added={"<extra>": 266}),
    "an added decoder with more": case(
        config=config(FAST, EOS, added_tokens_decoder={
            "263": token("<|endoftext|>", special=True), "266": token("<extra>", special=True, lstrip=True),
            "267": token("<think>", special=False, normalized=True)})  # fmt: skip
    ),
    "flags that differ": case(
        config=config(FAST, EOS, added_tokens_decoder={"265": token("<|im_end|>", special=True, rstrip=True)})
    ),
    "flags that differ in the map": case(config=FAST, map={"eos_token": token("<|im_end|>", lstrip=True, rstrip=True)}),
    "a special token of the vocabulary": case(config=config(FAST, EOS, pad_token="12")),
    "special tokens are text": case(
        config=config(FAST, EOS, split_special_tokens=True), says="in transformers,"
    ),
    "eos null in the map": case(config=config(FAST, EOS), map={"eos_token": None}, says=False),
    "another eos, and null in the map": case(
        config=config(FAST, eos_token="<|im_end|>"), map={"eos_token": None}, says=False
    ),
    "eos is a number": case(config=config(FAST, eos_token=5), says="cannot be loaded"),
    "eos is a list": case(config=config(FAST, eos_token=["<|im_end|>"]), says="cannot be loaded"),
    "eos is a number in the map": case(config=config(FAST, EOS), map={"eos_token": 5}, says="cannot be loaded"),
    "eos is an object without content": case(config=config(FAST, eos_token={"x": 1}), says="cannot be loaded"),
    "named extra tokens of any name": case(config=config(FAST, EOS, extra_special_tokens={"image": "<extra>"})),
    "tokens of the model": case(config=config(FAST, EOS, model_specific_special_tokens={"image": "<extra>"})),
    # Classes: those that take the file as it is, and those that split anew.
    "no class": case(config=EOS, says=False),
    "class GPT2Tokenizer": case(lambda: bytes_and_pairs(SPLIT), config=config(EOS, tokenizer_class="GPT2Tokenizer")),
    "class Qwen2Tokenizer": case(lambda: bytes_and_pairs(SPLIT), config=config(EOS, tokenizer_class="Qwen2Tokenizer")),
    "class of the model, qwen2": case(
        lambda: bytes_and_pairs(SPLIT), config=config(FAST, EOS), model={"model_type": "qwen2"}
    ),
    "no class, the model's": case(lambda: bytes_and_pairs(SPLIT), config=EOS, model={"model_type": "gpt2"}),
    "class of another model": case(
        lambda: bytes_and_pairs(SPLIT), config=config(FAST, EOS), model={"model_type": "llama"}, says=False
    ),
    "class of another model, which has its own": case(
        lambda: bytes_and_pairs(SPLIT), config=config(FAST, EOS), model={"model_type": "gemma2"}, says=False
    ),
    "class in the model's file": case(
        lambda: bytes_and_pairs(SPLIT), config=EOS, model={"tokenizer_class": "GPT2Tokenizer"}
    ),
    "class by the name of a model": case(
        lambda: bytes_and_pairs(SPLIT), config=config(FAST, EOS), says=None,
        model={"model_type": "gpt2", "model_name": "qwen2"},
    ),
    "class LlamaTokenizer": case(
        with_prefix, config={"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    ),
    "an unknown class": case(config=config(EOS, tokenizer_class="OwnTokenizer")),
    "code of its own": case(
        config=config(EOS, tokenizer_class="OwnTokenizer", auto_map={"AutoTokenizer": [None, "own.OwnTokenizer"]}),
        says="needs its own code, which is never run",
    ),
    # Tokenizers: a prefix, words, options that change ids.
    "prefix": case(with_prefix, config=config(FAST, bos_token="<s>", eos_token="</s>", unk_token="<unk>"), says=False),
    "words": case(words, config=config(FAST, EOS, unk_token="not")),
    "dropout": case(with_dropout, config=config(FAST, EOS, pad_token="<extra>")),
    "truncation and padding": case(with_limits, config=config(FAST, EOS, bos_token="<s>")),
    # Templates: in the configuration, as a list, in files.
    "template": case(config=config(FAST, EOS, chat_template=PLAIN), says=False),
    "marked template": case(config=config(FAST, EOS, chat_template=MARKED, bos_token="<s>")),
    "template file": case(config=config(FAST, EOS, chat_template=OTHER), jinja=PLAIN, says=False),
    "template file alone": case(jinja=MARKED, says=False),
    "named templates": case(
        config=config(FAST, EOS, chat_template=[{"name": "default", "template": PLAIN},
                                                {"name": "tool_use", "template": OTHER}]), says=False,
    ),  # fmt: skip
    "further templates in a folder": case(config=config(FAST, EOS), jinja=PLAIN, further=OTHER, says=False),
    "no default template": case(
        config=config(FAST, EOS, chat_template=[{"name": "rag", "template": PLAIN}]), says=False
    ),
    "template with a null token": case(config=config(FAST, EOS, bos_token=None, chat_template=PLAIN), says=False),
}  # fmt: skip
THIN = ("eos in both, differing", "another eos, and null in the map", "eos is a list", "class by the name of a model",
        "named extra tokens of any name", "an added decoder with more", "class of the model, qwen2", "code of its own",
        "named templates", "template with a null token", "marked template", "dropout")  # fmt: skip
NAMES = {"config": "tokenizer_config.json", "map": "special_tokens_map.json", "added": "added_tokens.json",
         "model": "config.json", "jinja": "chat_template.jinja",
         "further": "additional_chat_templates/tool_use.jinja"}  # fmt: skip


def write(folder: Path, name: str) -> Path:
    build, files, _ = CASES[name]
    (folder / "additional_chat_templates").mkdir(parents=True)
    build().save(str(folder / "tokenizer.json"))
    for key, content in files.items():
        (folder / NAMES[key]).write_text(
            content if isinstance(content, str) else json.dumps(content)
        )
    if "further" not in files:
        (folder / "additional_chat_templates").rmdir()
    return folder


@pytest.mark.parametrize(
    "name", [name if name in THIN else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_ids_ends_and_masks(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Documents and conversations as transformers encodes them, also by the files that are written
    beside the data."""
    folder, (_, files, says) = write(tmp_path / "T", name), CASES[name]
    source = write_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    words = ["--tokenizer", folder, "--special_tokens", "--overwrite"]
    if isinstance(says, str):
        prepare(source, tmp_path / "x", *words, code=3)
        printed = capsys.readouterr().err
        assert str(folder) in printed and says in printed
        return
    theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    theirs.backend_tokenizer.no_truncation()
    theirs.backend_tokenizer.no_padding()
    if hasattr(theirs.backend_tokenizer.model, "dropout"):
        theirs.backend_tokenizer.model.dropout = None
    expected = [theirs(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    prepare(source, tmp_path / "x", *words)
    own = JsonTokenizer(str(tmp_path / "x.tokenizer.json"), special_tokens=True)
    if theirs.eos_token is not None:
        assert own.end_of_document == theirs.eos_token_id
        names = {
            name: text
            for name, text in theirs.special_tokens_map.items()
            if name.endswith("_token")
        }
        assert own.named_tokens.items() >= names.items()
    written = tokens_of(tmp_path / "x")
    assert written == [[*ids, own.end_of_document] for ids in expected]
    assert [own.encode(text) for text in TEXTS] == expected
    path = str(folder / "tokenizer.json")
    prompts = load_tokenizer(path, True, said=effective(path))
    assert [prompts.encode(text, True) for text in TEXTS] == [
        theirs(text)["input_ids"] for text in TEXTS
    ]
    # Exports of a run, by the tokenizer of its data or by the folder itself.
    for number, file in enumerate((tmp_path / "x.tokenizer.json", folder / "tokenizer.json")):
        (export := tmp_path / f"export{number}").mkdir()
        copied = copy_tokenizer(file, export)
        loaded = transformers.AutoTokenizer.from_pretrained(export, local_files_only=True)
        assert loaded.chat_template == theirs.chat_template
        assert loaded.eos_token_id == copied["eos_token_id"] and (
            number or loaded.eos_token_id == own.end_of_document
        )
        assert (
            number
            or [loaded(text, add_special_tokens=False)["input_ids"] for text in TEXTS] == expected
        )
    # Without transformers: a folder that says no more than its file is as before, any other is
    # refused.
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer_folder, "has_library", lambda: False)
        prepare(source, tmp_path / "y", *words, code=2 if says else 0)
        assert ("pip install -e '.[chat]'" in capsys.readouterr().err) == bool(says)
        assert says or (tokens_of(tmp_path / "y") == written) == (says is False)
    if theirs.chat_template is None:
        return
    source = write_lines(tmp_path / "chats.jsonl", CHATS)
    words = ["--tokenizer", folder, "--chat_template=own"]
    if name == "no default template":
        prepare(source, tmp_path / "z", *words, code=3)
        return
    prepare(source, tmp_path / "z", *words)
    marked = MARKED in str(files)
    for chat, (ids, mask) in zip(CHATS, pairs(tmp_path / "z"), strict=True):
        whole = theirs.apply_chat_template(
            chat["messages"],
            tools=chat.get("tools"),
            return_dict=True,
            return_assistant_tokens_mask=marked,
        )
        assert ids == whole["input_ids"]
        assert sum(mask) and (not marked or mask == whole["assistant_masks"])


def tokens_of(prefix: Path) -> list[list[int]]:
    from megatron_lite.data.indexed_dataset import IndexedDataset

    data = IndexedDataset(str(prefix))
    return [data.document(number).tolist() for number in range(data.num_documents)]


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_damaged_file_beside_is_no_empty_one(tmp_path: Path, name: str, capsys: Any) -> None:
    """A file that was cut may have named the end of documents: exit code 3. An empty object names
    nothing."""
    bytes_and_pairs().save(str(tmp_path / "tokenizer.json"))
    source = write_lines(tmp_path / "a.jsonl", [{"text": "x"}])
    for content in ('{"eos_token": "<|im_end|>", ', "", "null"):
        (tmp_path / name).write_text(content)
        prepare(source, tmp_path / "x", f"--tokenizer={tmp_path}", code=3)
        assert "transformers says" in capsys.readouterr().err
    (tmp_path / name).write_text("{}\n")
    prepare(source, tmp_path / "x", f"--tokenizer={tmp_path}")


def test_exports_have_no_dropout_of_tokens(tmp_path: Path) -> None:
    """The tokenizer beside the data, or another that exports carry, gives transformers the same ids
    each time."""
    with_dropout().save(str(tmp_path / "given.json"))
    (tmp_path / "T").mkdir()
    with_dropout().save(str(tmp_path / "T" / "tokenizer.json"))
    prepare(
        write_lines(tmp_path / "a.jsonl", [{"text": TEXTS[0]}]),
        tmp_path / "x",
        f"--tokenizer={tmp_path / 'given.json'}",
    )
    expected = JsonTokenizer(str(tmp_path / "given.json"), special_tokens=True).encode(TEXTS[0])
    for number, name in enumerate(("x.tokenizer.json", "given.json", "T/tokenizer.json")):
        (export := tmp_path / f"export{number}").mkdir()
        copy_tokenizer(tmp_path / name, export, keep_class=number == 2)
        loaded = transformers.AutoTokenizer.from_pretrained(export, local_files_only=True)
        assert [loaded(TEXTS[0])["input_ids"] for _ in range(5)] == [expected] * 5


def test_ids_that_the_library_does_not_give(tmp_path: Path, capsys: Any) -> None:
    """A tokenizer.json may state other ids of added tokens than the library gives; exit code 3
    names both."""
    content = json.loads(bytes_and_pairs().to_str())
    content["added_tokens"][-1]["id"] += 7
    (tmp_path / "t.json").write_text(json.dumps(content))
    prepare(
        write_lines(tmp_path / "a.jsonl", [{"text": "x"}]),
        tmp_path / "x",
        f"--tokenizer={tmp_path / 't.json'}",
        code=3,
    )
    assert "states the id 272 for <|im_end|>, which tokenizers gives 265" in capsys.readouterr().err


@pytest.mark.parametrize(
    "names",
    [pytest.param(["vocab.json", "merges.txt"], marks=pytest.mark.slow), ["tokenizer.model"]],
)
def test_the_line_that_makes_a_tokenizer_json(
    tmp_path: Path, names: list[str], capsys: Any
) -> None:
    """For a folder without one, and for the other file itself; for vocab.json and merges.txt the
    line is run."""
    folder = tmp_path / "T"
    folder.mkdir()
    bytes_and_pairs().model.save(str(folder))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    if names == ["tokenizer.model"]:
        (folder / "vocab.json").unlink()
        (folder / "tokenizer.model").write_bytes(b"\x0a\x0e")
    source = write_lines(tmp_path / "a.jsonl", [{"text": "Hello"}])
    for given in (folder, folder / names[0]):
        prepare(source, tmp_path / "x", f"--tokenizer={given}", code=3)
        line = capsys.readouterr().err
        assert names[0] in line and line.count("\n") == 1
    if names == ["tokenizer.model"]:
        return
    command = shlex.split(
        line[line.index("python -c") :].replace("FOLDER", str(folder)).replace("NEW", f"{folder}2")
    )
    subprocess.run([sys.executable, *command[1:]], check=True)
    prepare(source, tmp_path / "x", f"--tokenizer={folder}2")
    assert (
        tokens_of(tmp_path / "x")[0][:-1]
        == transformers.AutoTokenizer.from_pretrained(f"{folder}2")("Hello")["input_ids"]
    )


def test_code_of_its_own_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The words of transformers there advise an argument, and a page on the web, that help nobody
    here."""
    folder = tmp_path / "T"
    folder.mkdir()
    bytes_and_pairs().save(str(folder / "tokenizer.json"))
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    prepare(
        write_lines(tmp_path / "a.jsonl", [{"text": "Hello"}]),
        tmp_path / "x",
        f"--tokenizer={folder}",
        code=3,
    )
    line = capsys.readouterr().err
    assert (
        line.count("\n") == 1
        and "its own code, which is never run" in line
        and "trust_remote_code" not in line
    )


def test_nothing_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of the hub in the configuration, a missing file and code elsewhere lead to no
    connection."""
    (tmp_path / "sitecustomize.py").write_text(
        "import socket\ndef refuse(*_, **__):\n    raise SystemExit('a connection')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
    )
    folder = write(tmp_path / "T", "bos only in the configuration")
    said = {
        "_name_or_path": "some/model",
        "model_type": "mistral",
        "transformers_version": "4.40.0",
    }
    (folder / "config.json").write_text(json.dumps(said))
    source = write_lines(tmp_path / "a.jsonl", [{"text": "x"}])
    words = [
        str(source),
        f"--output_prefix={tmp_path / 'x'}",
        f"--tokenizer={folder}",
        "--num_processes=1",
    ]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    code = f"from megatron_lite.cli.prepare_data import main\nif __name__ == '__main__': raise SystemExit(main({words}))"
    (tmp_path / "start.py").write_text(code)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "start.py")], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_unknown_tokens_are_counted(tmp_path: Path, capsys: Any) -> None:
    """Their share is printed, and above 1 % a warning; a byte-level tokenizer knows everything."""
    words().save(str(tmp_path / "words.json"))
    for text, share in (
        ("Hello world x end", "20.00%"),
        ("Hello world " * 200 + "x", "0.25%"),
        ("end", None),
    ):
        source = write_lines(tmp_path / "a.jsonl", [{"text": text}])
        prepare(source, tmp_path / "x", f"--tokenizer={tmp_path / 'words.json'}", "--overwrite")
        said = capsys.readouterr()
        assert (
            (f"unknown tokens    1 ({share})" in said.out)
            == (share is not None)
            == ("unknown tokens" in said.out)
        )
        assert ("WARNING: the tokenizer does not know 20.00%" in said.err) == (share == "20.00%")


def test_one_module_imports_transformers() -> None:
    """The one that only a process of its own imports, so that no start of training does."""
    package = Path(tokenizer_folder.__file__).parents[1]
    lines = {path.name: path.read_text("utf-8").splitlines() for path in package.rglob("*.py")}
    begin = re.compile(r"\s*(from|import) transformers")
    importing = {name for name, each in lines.items() if any(map(begin.match, each))}
    assert importing == {"rendering.py", "model_card.py"}  # the latter in the text that it writes


@pytest.mark.parametrize("normalizer", [normalizers.Lowercase(), normalizers.NFC(), None])
def test_added_tokens_that_are_one_text(tmp_path: Path, normalizer: Any) -> None:
    """tokenizers takes one of them at random, each time that it loads the file."""
    made = Tokenizer(models.BPE({"x": 0}, []))
    made.normalizer = normalizer
    file = str(tmp_path / "own.json")
    for normalized in (False, True):
        made.add_tokens(
            [
                AddedToken(text, normalized=normalized)
                for text in ("Foo\u00e9", "foo\u00e9", "Fooe\u0301")
            ]
        )
        made.save(file)
        if normalized and normalizer:
            with pytest.raises(DataError, match="'Foo.*' and '.*oo.*' are one text"):
                effective(file)
        else:
            assert len(json.loads(effective(file).tokenizer)["added_tokens"]) == 3
