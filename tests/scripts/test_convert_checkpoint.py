"""scripts/convert_checkpoint.py: what goes in comes out, in both directions, and what cannot be is
refused.

The oracle is transformers, which makes the folders and loads them again.
"""

import json
import math
import multiprocessing
import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_lite.checkpoint import files, manifest
from megatron_lite.commands import convert_checkpoint
from megatron_lite.huggingface import convert as conversion
from megatron_lite.huggingface.load_pretrained import open_source
from tests.support.families import FAMILIES, load_model, logits_of, random_tokens, write_folder
from tests.support.token_files import save_byte_tokenizer

FAST = "mistral, yarn, tied"
DEFAULT = (
    FAST,
    "gpt2, untied, inverse layer scale",
    "gpt_bigcode, multi-head, untied",
    "qwen3, linear rope, window, biases, tied",
)


def convert(source: Path, target: Path, kind: str, *flags: str) -> int:
    return convert_checkpoint.main(
        [f"--from={source}", f"--to={target}", f"--format={kind}", *flags]
    )


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A Hugging Face folder."""
    return write_folder(FAST, tmp_path / "theirs")


def state_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face folder."""
    return {
        name: value
        for path in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(path).items()
    }


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return left.keys() == right.keys() and all(
        value.dtype == right[name].dtype and torch.equal(value, right[name])
        for name, value in left.items()
    )


def write_typed(name: str, folder: Path, dtype: torch.dtype) -> Path:
    """A family's folder with weights of that dtype."""
    write_folder(name, folder)
    state = {key: value.to(dtype) for key, value in state_of(folder).items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**content, "dtype": str(dtype).removeprefix("torch.")})
    )
    return folder


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.slow]) for name in FAMILIES],
)
def test_a_folder_goes_through_a_checkpoint_unchanged(name: str, tmp_path: Path) -> None:
    """Folder -> ours -> folder, in several files on the way: the same tensors bit for bit, the same
    logits in transformers, and both steps verified by our own layers to the last bit."""
    theirs = write_folder(name, tmp_path / "theirs")
    assert convert(theirs, tmp_path / "ours", "distributed", "--shard_size=9KB", "--verify") == 0
    assert len(list((tmp_path / "ours").glob("rank_*.safetensors"))) > 1
    assert (
        convert(
            tmp_path / "ours", tmp_path / "again", "huggingface", "--shard_size=15KB", "--verify"
        )
        == 0
    )
    assert same(state_of(theirs), state_of(tmp_path / "again"))
    before, after = (
        logits_of(load_model(folder), random_tokens()) for folder in (theirs, tmp_path / "again")
    )
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "ours", "theirs"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_goes_through_unchanged(tmp_path: Path, dtype: torch.dtype) -> None:
    """The checkpoint is fp32, knows what it was, and gives the same bits back."""
    theirs = write_typed(FAST, tmp_path / "theirs", dtype)
    assert convert(theirs, tmp_path / "ours", "distributed") == 0
    assert {saved.dtype for saved in manifest.read(tmp_path / "ours").parameters.values()} == {
        "float32"
    }
    assert convert(tmp_path / "ours", tmp_path / "again", "huggingface") == 0
    assert same(state_of(theirs), state_of(tmp_path / "again"))


def test_a_dtype_is_rounded_to_once_and_verified(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """fp32 -> bf16 is torch's own rounding; --verify states a difference within what rounding
    explains."""
    assert convert(theirs, tmp_path / "bf16", "huggingface", "--dtype=bf16", "--verify") == 0
    expected = {name: value.to(torch.bfloat16) for name, value in state_of(theirs).items()}
    assert same(expected, state_of(tmp_path / "bf16"))
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"
    line = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("verified: ")
    )
    assert 0 < float(line.split("logits: ")[1].split()[0]) < 1


@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_tokens_that_rounding_sends_to_other_experts_are_no_difference(
    family: str, tmp_path: Path
) -> None:
    """Some tokens' K-th and next score are closer than bf16 tells apart."""
    theirs = write_folder(family, tmp_path / "theirs")
    assert convert(theirs, tmp_path / "bf16", "huggingface", "--dtype=bf16", "--verify") == 0


def test_another_architecture_for_the_same_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--export_model_type: a GPT-2 becomes a GPTBigCode with the same logits; one that cannot
    express it is refused."""
    theirs = write_folder("gpt2", tmp_path / "theirs")
    assert (
        convert(
            theirs, tmp_path / "other", "huggingface", "--export_model_type=gpt_bigcode", "--verify"
        )
        == 0
    )
    model = load_model(tmp_path / "other")
    assert model.config.model_type == "gpt_bigcode"
    before = logits_of(load_model(theirs), random_tokens())
    after = logits_of(model, random_tokens())
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0)
    assert convert(theirs, tmp_path / "llama", "huggingface", "--export_model_type=llama") == 2
    assert "--export_model_type=llama cannot express this model" in capsys.readouterr().err


def test_shards_are_those_of_transformers(tmp_path: Path) -> None:
    """As many files, with the same tensors together, as `save_pretrained` makes; the total in the
    index is right."""
    hub = pytest.importorskip("huggingface_hub")
    theirs = write_folder(FAST, tmp_path / "theirs")
    for size in ("9KB", "500B", "1TB"):
        target = tmp_path / size
        assert convert(theirs, target, "huggingface", f"--shard_size={size}") == 0
        state = state_of(target)
        limit = {"9KB": 9000, "500B": 500, "1TB": 10**12}[size]
        expected = hub.split_torch_state_dict_into_shards(
            dict(sorted(state.items())), max_shard_size=limit
        )
        found = {path.name: sorted(load_file(path)) for path in target.glob("*.safetensors")}
        assert found == {
            name: sorted(names) for name, names in expected.filename_to_tensors.items()
        }
        index = target / "model.safetensors.index.json"
        assert index.exists() == (len(found) > 1)
        if index.exists():
            content = json.loads(index.read_text())
            assert content["metadata"]["total_size"] == sum(
                value.nbytes for value in state.values()
            )
            assert content["weight_map"] == expected.tensor_to_filename
        assert same(state_of(theirs), state)


def damage_an_element(target: Path) -> None:
    """Change one weight of what was just written by a lot."""
    path = target / "model.safetensors"
    state = load_file(path)
    state["model.norm.weight"][3] += 5
    save_file(state, path, {"format": "pt"})


def test_verify_finds_a_single_wrong_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 4 with the difference, and no folder appears."""
    theirs, written = write_folder(FAST, tmp_path / "theirs"), conversion.write_huggingface

    def broken(folder: Path, *arguments: Any) -> Any:
        plan = written(folder, *arguments)
        damage_an_element(folder)
        return plan

    monkeypatch.setattr(conversion, "write_huggingface", broken)
    assert convert(theirs, tmp_path / "to", "huggingface", "--verify") == 4
    assert "--verify: largest difference" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def a_file(folder: Path) -> None:
    folder.write_text("mine")


def a_folder_with(*names: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir()
        for name in names:
            (folder / name).write_text("mine")

    return make


FOREIGN = "holds files that belong to no checkpoint or export"
NESTED = "must not contain each other"
REFUSALS: dict[str, tuple[Callable[[Path], None] | None, list[str], int, str]] = {
    "exists": (
        a_folder_with("config.json"),
        [],
        2,
        "exists; choose another folder, or replace it with --exist_ok",
    ),
    "is a file": (a_file, ["--exist_ok"], 2, FOREIGN),
    "foreign file": (a_folder_with("config.json", "notes.txt"), ["--exist_ok"], 2, FOREIGN),
    "a link": (
        lambda folder: folder.symlink_to(folder.parent / "theirs"),
        ["--exist_ok"],
        2,
        NESTED,
    ),
    "size": (None, ["--shard_size=5gb"], 2, "--shard_size=5gb: gb is not a unit"),
    "average": (None, ["--weights=average"], 4, "one set of weights"),
    "no tokenizer": (
        None,
        ["--tokenizer_file=/nowhere/t.json"],
        3,
        "/nowhere/t.json: cannot be read",
    ),
    "overflow": (
        None,
        ["--dtype=fp16"],
        5,
        "model.norm.weight has a weight of 1e+06, too large for fp16",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_impossible_conversions_are_refused_and_change_nothing(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, the right exit code; what was there is there as it was, and nothing beside it."""
    make, flags, code, said = REFUSALS[case]
    theirs, target = write_folder(FAST, tmp_path / "theirs"), tmp_path / "to"
    if case == "overflow":
        state = state_of(theirs)
        state["model.norm.weight"][2] = 1e6
        save_file(state, theirs / "model.safetensors", {"format": "pt"})
    if make is not None:
        make(target)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()  # transformers' progress
    assert convert(theirs, target, "huggingface", *flags) == code
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1, error
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert {path.name for path in tmp_path.iterdir()} <= {"theirs", "to"}


def test_a_folder_inside_the_source_and_a_wrong_number_are_refused(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written into what is read, nor a checkpoint under the number of another
    iteration."""
    for target, said in (
        ("theirs/in", NESTED),
        ("theirs", NESTED),
        ("7", "must be named after its iteration"),
    ):
        assert convert(theirs, tmp_path / target, "distributed", "--exist_ok") == 2
        assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_only_our_own_folders_are_replaced(tmp_path: Path) -> None:
    """--exist_ok replaces an export; an empty folder is replaced without it."""
    theirs, target = write_folder(FAST, tmp_path / "theirs"), tmp_path / "to"
    target.mkdir()
    assert convert(theirs, target, "huggingface", "--dtype=bf16") == 0
    assert convert(theirs, target, "huggingface", "--exist_ok") == 0
    assert same(state_of(theirs), state_of(target))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs", "to"]


def convert_and_die(theirs: Path, target: Path) -> None:
    """In a process of its own: killed when the folder is whole, but has not its name yet."""
    files.publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    convert(theirs, target, "huggingface")


def test_killed_in_between_nothing_half_appears(tmp_path: Path) -> None:
    """SIGKILL while it writes: no folder of that name; the next conversion sweeps what was left,
    and only that."""
    theirs, target = write_folder(FAST, tmp_path / "theirs"), tmp_path / "to"
    other = tmp_path / ".tmp-other-0123456789abcdef"
    other.mkdir()
    process = multiprocessing.get_context("forkserver").Process(
        target=convert_and_die, args=(theirs, target)
    )
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    (left,) = (path for path in tmp_path.iterdir() if path.name.startswith(".tmp-to-"))
    assert any(left.iterdir()) and not target.exists()
    assert convert(theirs, target, "huggingface") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "theirs", "to"]


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_others_can_read_it_where_the_umask_lets_them(
    theirs: Path, tmp_path: Path, mask: int
) -> None:
    """Files 0644 and folders 0755 as a rule; a stricter umask is what its user wants."""
    previous = os.umask(mask)
    try:
        for kind in ("huggingface", "distributed"):
            assert convert(theirs, tmp_path / kind, kind) == 0
    finally:
        os.umask(previous)
    for kind in ("huggingface", "distributed"):
        assert (tmp_path / kind).stat().st_mode & 0o777 == 0o777 & ~mask
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / kind).iterdir()} == {
            0o666 & ~mask
        }


def test_no_more_than_one_parameter_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a parameter is read, those before it are gone, and nothing larger than the largest is
    ever made."""
    theirs, read_whole = write_folder(FAST, tmp_path / "theirs"), conversion.read_whole
    read: list[weakref.ref[Tensor]] = []

    def watched(source: Any, name: str, shape: tuple[int, ...]) -> Tensor:
        assert not [value for value in read if value() is not None], name
        value = read_whole(source, name, shape)
        read.append(weakref.ref(value))
        return value

    def bounded(*arguments: Any, **options: Any) -> Tensor:
        made = empty(*arguments, **options)
        assert made.device.type == "meta" or made.nbytes <= 4 * largest, made.shape
        return made

    with open_source(theirs) as source:
        largest = max(
            map(math.prod, conversion.shapes_of(conversion.build_gpt(source.model, 1)).values())
        )
    empty = torch.empty
    monkeypatch.setattr(conversion, "read_whole", watched)
    monkeypatch.setattr(torch, "empty", bounded)
    assert convert(theirs, tmp_path / "to", "huggingface", "--dtype=bf16") == 0
    assert len(read) > 10


def test_special_tokens_and_the_tokenizer_come_along(theirs: Path, tmp_path: Path) -> None:
    """A Hugging Face folder keeps its own tokenizer and ids."""
    save_byte_tokenizer(str(tmp_path / "byte.json"))
    assert convert(theirs, tmp_path / "1", "huggingface") == 0
    assert not (tmp_path / "1" / "tokenizer.json").exists()
    (tmp_path / "byte.json").rename(theirs / "tokenizer.json")
    assert convert(theirs, tmp_path / "2", "huggingface") == 0
    for name, eos in (("1", 2), ("2", 2)):  # nothing was trained to end otherwise
        content = json.loads((tmp_path / name / "config.json").read_text())
        assert (content["bos_token_id"], content["eos_token_id"]) == (1, eos)
    assert (tmp_path / "2" / "tokenizer.json").read_bytes() == (
        theirs / "tokenizer.json"
    ).read_bytes()
