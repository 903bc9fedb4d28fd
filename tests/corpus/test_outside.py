"""Names that listings give and that lead out of their folder: refused by name, before anything is
read or written."""

import http.server
import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from megatron_lite.corpus.inputs import find_inputs
from megatron_lite.corpus.remote_copy import local_copy
from megatron_lite.errors import CheckpointError, DataError
from megatron_lite.huggingface.model_folder import weight_files
from scripts.concatenate_dataset import find_pairs
from tests.support.s3_server import S3Server
from tests.support.token_files import write_documents

OUT = r"leads out of the folder"
# From a folder of the store: a copy has that folder in its own, so that two steps up lead out.
NAMES = (
    "../../planted/x.txt",
    "../../../planted/x.txt",
    "b/../../../planted/x.txt",
    "b/c/../../../../planted/x.txt",
    "./../../planted/x.txt",
    "..//../planted/x.txt",
    "../.././planted/./x.txt",
    "../../planted/deep/er/x.txt",
    "../../planted/größe x.txt",
    "../../x.txt",
)


def content(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_bucket_writes_into_its_copy_only(server: S3Server, tmp_path: Path, name: str) -> None:
    """A key of any depth that leads out of the copy; the good one beside it is not used either."""
    bucket = boto3.resource("s3").Bucket(f"bucket-{random.randrange(10**12)}")
    bucket.create()
    for key in ("texts/one.txt", f"texts/{name}"):
        bucket.put_object(Key=key, Body=b"planted")
    cache = tmp_path / "a" / "cache"
    with pytest.raises(DataError, match=OUT) as refused:
        local_copy(f"s3://{bucket.name}/texts", "data_path", str(cache))
    assert Path(name).name in str(refused.value)
    assert {Path(path).name for path in content(tmp_path)} <= {"lock", "one.txt", "copied.json"}
    assert all(path.startswith("a/cache/") and ".." not in path for path in content(tmp_path))


def test_names_that_only_look_odd_are_copied(server: S3Server, tmp_path: Path) -> None:
    """Dots that lead nowhere, or inside; the names of the copy's own files are refused."""
    bucket = boto3.resource("s3").Bucket(f"bucket-{random.randrange(10**12)}")
    bucket.create()
    for key in ("t/..one.txt", "t/a..b/two.txt", "t/a/../three.txt", "t/.../four.txt"):
        bucket.put_object(Key=key, Body=key.encode())
    copy = Path(local_copy(f"s3://{bucket.name}/t", "data_path", str(tmp_path)))
    assert sorted(content(copy)) == [".../four.txt", "..one.txt", "a..b/two.txt", "three.txt"]
    for name in ("copied.json", "lock"):
        bucket.put_object(Key=f"own/{name}", Body=b"{}")
        with pytest.raises(
            DataError, match=rf"own/{name}: a copy has a file of its own with this name"
        ):
            local_copy(f"s3://{bucket.name}/own/*", "data_path", str(tmp_path))
        bucket.Object(f"own/{name}").delete()


@pytest.fixture
def website() -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a server, and the links of its only page, /web/texts/; all else is a
    small file."""
    links: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = "".join(f'<a href="{link}">file</a>' for link in links)
            data = page.encode() if self.path.rstrip("/").endswith("texts") else b"planted"
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data if self.command == "GET" else b"")

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        threading.Thread(target=web.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{web.server_address[1]}/web/texts", links
        web.shutdown()


@pytest.mark.parametrize("name", NAMES)
def test_a_page_of_links_writes_into_its_copy_only(
    website: tuple[str, list[str]], tmp_path: Path, name: str
) -> None:
    """A link of a page is a name, too."""
    address, links = website
    links += ["one.txt", name]
    with pytest.raises(DataError, match=OUT):
        local_copy(f"{address}/**", "data_path", str(tmp_path / "a" / "cache"))
    assert all(path.startswith("a/cache/") for path in content(tmp_path))


def _link(place: str, target: str) -> Callable[[Path], None]:
    """Return what makes a link at a place of the data folder; the target is relative to the test's
    folder."""

    def make(data: Path) -> None:
        (data / place).parent.mkdir(parents=True, exist_ok=True)
        (data / place).symlink_to(data.parent / target)

    return make


LINKS = {
    "a file": _link("a.txt", "outside/x.txt"),
    "a deep file": _link("b/c/a.txt", "outside/x.txt"),
    "another name": _link("a.md", "outside/x.txt"),
    "lines": _link("a.jsonl", "outside/lines.jsonl"),
    "a neighbor with a longer name": _link("a.txt", "data_2/x.txt"),
    "a relative link": lambda data: (data / "a.txt").symlink_to("../outside/x.txt"),
    "a link to a link": lambda data: (data / "a.txt").symlink_to(
        data.parent / "outside" / "to_x.txt"
    ),
    "out and in and out": lambda data: (data / "a.txt").symlink_to("../data/../outside/x.txt"),
    "compressed": _link("a.txt.gz", "outside/x.txt"),
    "a table": _link("a.parquet", "outside/x.txt"),
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a data folder with a text, beside others that are none of its business."""
    for name in ("data/one.txt", "outside/x.txt", "outside/lines.jsonl", "data_2/x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}')
    (tmp_path / "outside" / "to_x.txt").symlink_to(tmp_path / "outside" / "x.txt")
    return tmp_path / "data"


@pytest.mark.parametrize("kind", LINKS)
def test_a_link_in_a_data_folder_stays_inside(data: Path, tmp_path: Path, kind: str) -> None:
    """By address and by path: the message names the link, and nothing is copied."""
    LINKS[kind](data)
    before = content(tmp_path)
    for name in (f"file://{data}", str(data)):
        with pytest.raises(DataError, match=rf"/a\.[a-z.]+: {OUT} {data}"):
            find_inputs([local_copy(name, "data_path", str(tmp_path / "cache"))])
    assert content(tmp_path) == before


def test_patterns_and_pairs_stay_inside(data: Path, tmp_path: Path) -> None:
    """A pattern reads a folder, too, even through a link to a folder; so does the list of a
    folder's pairs."""
    (data / "b").symlink_to(tmp_path / "outside")
    for pattern in (f"{data}/*", f"{data}/**/*.txt", f"{data}/?/x.txt", f"{data}/[b]/x.txt"):
        with pytest.raises(DataError, match=rf"{data}/b(/\w+\.txt)?: {OUT} {data}"):
            find_inputs([pattern])
    assert [
        Path(file.path).name for file in find_inputs([f"{tmp_path}/d*/*.txt", f"{data}/o*"])
    ] == [
        "one.txt",
        "x.txt",
        "one.txt",
    ]
    for ending in (".idx", ".bin"):
        write_documents(tmp_path / "outside" / "pair", [[1, 2]])
        write_documents(data / "pair", [[1, 2]])
        assert find_pairs([str(data)]) == [str(data / "pair")]
        (data / f"pair{ending}").unlink()
        (data / f"pair{ending}").symlink_to(tmp_path / "outside" / f"pair{ending}")
        with pytest.raises(DataError, match=rf"pair\{ending}: {OUT}"):
            find_pairs([str(data)])


def test_links_that_a_user_names_are_read(data: Path, tmp_path: Path) -> None:
    """A data folder that is a link, a link by its own name, links inside, and a snapshot in the
    cache of the hub."""
    (tmp_path / "mine").symlink_to(data)
    (tmp_path / "mine.txt").symlink_to(tmp_path / "outside" / "x.txt")
    (data / "two.txt").symlink_to("one.txt")
    files = find_inputs(
        [str(tmp_path / "mine"), str(tmp_path / "mine.txt"), f"{tmp_path}/mine/*.txt"]
    )
    assert [Path(file.path).name for file in files] == [
        "one.txt",
        "two.txt",
        "mine.txt",
        "one.txt",
        "two.txt",
    ]
    blob = tmp_path / "hub" / "blobs" / "1a2b"
    snapshot = tmp_path / "hub" / "snapshots" / "main" / "data"
    for folder in (blob.parent, snapshot):
        folder.mkdir(parents=True)
    blob.write_text("text")
    (snapshot / "a.txt").symlink_to("../../../blobs/1a2b")
    for name in (snapshot, snapshot.parent):
        assert [Path(file.path).name for file in find_inputs([str(name)])] == ["a.txt"]
    (snapshot / "b.txt").symlink_to(tmp_path / "outside" / "x.txt")
    with pytest.raises(DataError, match=rf"b\.txt: {OUT}"):
        find_inputs([str(snapshot)])


@pytest.mark.parametrize(
    "name", [name.removeprefix("../") for name in NAMES[:8]] + ["/outside/x.txt", "link.arrow"]
)
def test_what_a_saved_data_set_and_an_index_list_stays_inside(
    data: Path, tmp_path: Path, name: str
) -> None:
    """The data files of `state.json`; the index of shards takes plain names of its folder only."""
    if name.startswith("/"):
        name = str(tmp_path) + name
    (data / "link.arrow").symlink_to(tmp_path / "outside" / "x.txt")
    (data / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "one.txt"}, {"filename": name}]})
    )
    with pytest.raises(DataError, match=OUT):
        find_inputs([str(data)])
    index = {"weight_map": {"a": name.replace(".txt", ".safetensors")}}
    (data / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match="is not the name of a safetensors file of this folder"
    ):
        weight_files(data)
