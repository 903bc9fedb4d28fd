"""hf:// names: the library's own file system against a hub on the loopback device."""

import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.corpus.from_text import resolve_data
from megatron_lite.corpus.remote_copy import hub_name, local_copy, pin_of
from megatron_lite.errors import DataError
from tests.support.harness import tiny_config
from tests.support.hub_server import Hub
from tests.support.launch import TINY, succeed
from tests.support.token_files import write_documents

library = pytest.importorskip("huggingface_hub")
fsspec_config = pytest.importorskip("fsspec.config")
TEXTS = {"data/a.txt": b"Once upon a time\n" * 50, "data/b.txt": b"there was\n" * 70, "x": b""}
MODEL = {"config.json": b"{}", "model.safetensors": b"s", "pytorch_model.bin": b"never read"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    monkeypatch.setitem(fsspec_config.conf, "hf", {"endpoint": server.address})
    library.HfFileSystem.clear_instance_cache()
    yield server
    server.close()
    library.HfFileSystem.clear_instance_cache()


def contents(path: str | Path) -> dict[str, bytes]:
    files = [file for file in Path(path).rglob("*") if file.is_file()]
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in files
        if file.name not in ("copied.json", "lock")
    }


def test_folders_patterns_and_models(hub: Hub, tmp_path: Path) -> None:
    """A model comes without other formats of its weights; a revision may be named."""
    hub.push("datasets", "me/texts", TEXTS)
    old = hub.push("models", "me/m", MODEL | {"config.json": b"{1}"})
    hub.push("models", "me/m", MODEL)

    def copied(address: str) -> dict[str, bytes]:
        return contents(local_copy(address, "data_path", str(tmp_path)))

    data = {"a.txt": TEXTS["data/a.txt"], "b.txt": TEXTS["data/b.txt"]}
    assert copied("hf://datasets/me/texts/data") == data
    assert copied("hf://datasets/me/texts@main/data/*.txt") == data
    model = {name: MODEL[name] for name in ("config.json", "model.safetensors")}
    assert copied("hf://me/m") == model
    assert copied(f"hf://me/m@{old}") == model | {"config.json": b"{1}"}
    named = Path(local_copy(f"hf://me/m@{old}", "pretrained_checkpoint_path", str(tmp_path)))
    assert hub_name(named) == ("me/m", old)
    part = Path(local_copy("hf://datasets/me/texts/data", "data_path", str(tmp_path)))
    assert hub_name(part) is None is hub_name(tmp_path)


def test_the_first_commit_stays_and_needs_no_network(hub: Hub, tmp_path: Path) -> None:
    """What is pushed later is not read; another cache takes it. A file that is gone is fetched
    again, from that commit."""
    first = hub.push("models", "me/m", MODEL)
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    copy = local_copy("hf://me/m", "pretrained_checkpoint_path", here)
    assert copy.endswith(f"/m@{first}")
    hub.push("models", "me/m", MODEL | {"config.json": b"{2}"})
    Path(copy, "config.json").unlink()
    assert contents(local_copy("hf://me/m", "data_path", here))["config.json"] == b"{}"
    assert contents(local_copy("hf://me/m", "data_path", there))["config.json"] == b"{2}"
    asked = hub.requests
    assert local_copy("hf://me/m", "data_path", here) == copy and hub.requests == asked


@pytest.mark.parametrize("inside", ["data", "data/*.txt"])
def test_a_run_keeps_its_commits(hub: Hub, tmp_path: Path, inside: str) -> None:
    """On a machine without the copy, and beside the copy of another run; a commit that the hub no
    longer has is named."""
    first = hub.push("datasets", "me/texts", TEXTS)
    address = f"hf://datasets/me/texts/{inside}"
    full, empty, taken, late = (str(tmp_path / name) for name in ("full", "empty", "taken", "late"))
    copy = local_copy(address, "data_path", full)
    kept = pin_of(copy)
    assert kept == {address: f"datasets/me/texts@{first}/{inside}"}
    hub.push("datasets", "me/texts", {"data/a.txt": b"other"})
    other = contents(local_copy(address, "data_path", taken))
    for cache in (empty, taken):
        again = local_copy(address, "data_path", cache, kept)
        assert contents(again) == contents(copy) != other
        assert pin_of(again) == kept
        asked = hub.requests
        assert local_copy(address, "data_path", cache, kept) == again and hub.requests == asked
    assert local_copy(address, "data_path", full, kept) == copy
    hub.forget("datasets", "me/texts", first)
    library.HfFileSystem.clear_instance_cache()
    named = f"(revision not found); this run began with hf://{kept[address]}"
    with pytest.raises(DataError, match=re.escape(named)):
        local_copy(address, "data_path", late, kept)


def test_a_copy_of_another_commit_is_named(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model is copied before a mirror is asked: a run whose checkpoint is there alone keeps the
    commit with which it began."""
    address, cache = "hf://me/m", str(tmp_path)
    kept = {address: f"me/m@{hub.push('models', 'me/m', MODEL)}"}
    now = hub.push("models", "me/m", MODEL | {"config.json": b"{2}"})
    copy = local_copy(address, "pretrained_checkpoint_path", cache)
    data = write_documents(tmp_path / "data", [np.arange(64)])
    options: dict[str, Any] = {"data_path": (data,), "dataset_source": "list"}
    options["use_pretrained_config"] = False
    config = tiny_config(1, **options, pretrained_checkpoint_path=copy)
    logger = logging.getLogger("test")
    of_model = {"use_pretrained_config": False, "pretrained_checkpoint_path": copy}
    for begun, expected in ((None, {address: f"me/m@{now}"}), ({"pinned": kept}, kept)):
        assert (
            resolve_data(tiny_config(1, **of_model), None, tmp_path, logger, begun)[1] == expected
        )
    assert resolve_data(config, None, tmp_path, logger)[1] == {address: f"me/m@{now}"}
    assert not caplog.records
    began = {"config": {}, "pinned": kept}
    assert resolve_data(config, None, tmp_path, logger, began)[1] == kept
    (record,) = caplog.records
    assert f"is of hf://me/m@{now}, but the run began with hf://{kept[address]}" in record.message


def test_what_is_not_there(hub: Hub, tmp_path: Path) -> None:
    """Neither a repository nor a file."""
    hub.push("datasets", "me/texts", TEXTS)
    for address in ("hf://datasets/me/none", "hf://datasets/me/texts/data/c.txt"):
        with pytest.raises(DataError, match=f"--data_path={address}: "):
            local_copy(address, "data_path", str(tmp_path))


@pytest.mark.slow
def test_a_run_from_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model and texts by name; the second start is offline, and a resume with another cache reads
    the commits of the checkpoint."""
    succeed([*TINY, f"--experiment_dir={tmp_path}/r", "--export_interval=1"])
    export = next((tmp_path / "r" / "export").iterdir())
    model = hub.push("models", "me/m", contents(export))
    texts = hub.push("datasets", "me/texts", TEXTS)
    monkeypatch.setenv("HF_ENDPOINT", hub.address)
    flags = "--data_path=hf://datasets/me/texts/data --tokenizer_file=byte --train_iters=2 --sequence_length=16"
    command = [*flags.split(), "--pretrained_checkpoint_path=hf://me/m", "--device=cpu"]
    command += ["--split=1", f"--dataset_cache={tmp_path}/cache", "--resize_vocabulary=mean"]
    command += ["--vocab_size=257"]
    succeed([*command, f"--experiment_dir={tmp_path}/one"])
    assert (asked := hub.requests)
    succeed([*command, f"--experiment_dir={tmp_path}/two"])
    assert hub.requests == asked
    commits = texts, model
    texts = hub.push("datasets", "me/texts", {"data/a.txt": b"other"})
    model = hub.push("models", "me/m", {"config.json": b"{}"})
    shutil.rmtree(tmp_path / "cache")
    elsewhere = [*command, "--train_iters=4", f"--experiment_dir={tmp_path}/one"]
    assert "resumed from" in succeed(elsewhere).stdouts[0]
    saved = json.loads((tmp_path / "one/checkpoints/4/manifest.json").read_text())["state"][
        "pinned"
    ]
    names = ("hf://datasets/me/texts/data", "hf://me/m")
    assert saved == dict(
        zip(names, (f"datasets/me/texts@{commits[0]}/data", f"me/m@{commits[1]}"), strict=True)
    )
    assert texts != commits[0] and model != commits[1]
