"""Data in remote storage, from moto's S3 server and a web server: copied once, whole, and again if
it changed."""

import functools
import http.server
import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import boto3
import pytest
import s3fs

import pretrain_gpt
from megatron_lite.cli import prepare_data
from megatron_lite.corpus.prepared import stated, verify
from megatron_lite.corpus.remote_copy import local_copy
from megatron_lite.errors import DataError, UsageError
from megatron_lite.run import remote_storage
from tests.support.launch import TINY, succeed
from tests.support.results import weights
from tests.support.s3_server import VARIABLES, S3Server
from tests.support.token_files import write_documents


@pytest.fixture
def bucket(server: S3Server) -> Any:
    """Return a bucket with two texts in a folder, one of them deeper, and a pair."""
    bucket = boto3.resource("s3").Bucket(f"bucket-{random.randrange(10**12)}")
    bucket.create()
    for name, data in {
        "a/one.txt": b"one",
        "a/b/two.txt": b"two",
        "a/pair.idx": b"i",
        "a/pair.bin": b"tokens",
    }.items():
        bucket.put_object(Key=name, Body=data)
    return bucket


def content(path: str) -> dict[str, bytes]:
    """The files of a copy, by their path in it."""
    found = [file for file in Path(path).rglob("*") if file.is_file()]
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in found
        if file.suffix in (".txt", ".bin", ".idx")
    }


def test_what_an_address_names(bucket: Any, tmp_path: Path) -> None:
    """A file, a folder, a pattern and a prefix each become what a local path may be; local paths
    stay."""
    address, cache = f"s3://{bucket.name}/a", str(tmp_path)
    assert local_copy("a/one.txt", "data_path", None) == "a/one.txt"
    one = local_copy(f"{address}/one.txt", "data_path", cache)
    assert one.endswith("/one.txt") and Path(one).read_bytes() == b"one"
    everything = {"one.txt": b"one", "b/two.txt": b"two", "pair.idx": b"i", "pair.bin": b"tokens"}
    assert content(local_copy(address, "data_path", cache)) == content(
        local_copy(f"{address}/", "data_path", cache)
    )
    assert content(local_copy(address, "data_path", cache)) == everything
    assert content(local_copy(f"{address}/*.txt", "data_path", cache)) == {"one.txt": b"one"}
    assert content(local_copy(f"{address}/**/*.txt", "data_path", cache)) == {
        "one.txt": b"one",
        "b/two.txt": b"two",
    }
    assert content(local_copy(f"{address}/{{one,none}}.txt", "data_path", cache)) == {
        "one.txt": b"one"
    }
    prefix = local_copy(f"{address}/pair", "data_path", cache)
    assert [Path(prefix + ending).read_bytes() for ending in (".idx", ".bin")] == [b"i", b"tokens"]


def test_a_pair_brings_what_is_beside_it(bucket: Any, tmp_path: Path) -> None:
    """Mask and tokenizer that a summary names are the defaults, as of a local pair; a part has
    those of its corpus."""
    turns = [
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": "an answer"},
    ]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 4)
    words = [
        str(tmp_path / "chats.jsonl"),
        "--chat_template=chatml",
        "--shards=2",
        f"--output_prefix={tmp_path}/d/ok",
    ]
    (tmp_path / "d").mkdir()
    assert prepare_data.main([*words, "--validation_documents=1"]) == 0
    for file in (tmp_path / "d").iterdir():
        bucket.upload_file(str(file), f"d/{file.name}")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        for store in (f"s3://{bucket.name}", f"http://127.0.0.1:{web.server_address[1]}"):
            for name in ("ok-00001-of-00002", "ok_validation"):
                copy = local_copy(f"{store}/d/{name}", "data_path", str(tmp_path / "cache"))
                here = tmp_path / "d" / name
                found = stated([copy])
                assert found == {
                    "loss_mask": (f"{copy}_mask",),
                    "tokenizer_file": f"{Path(copy).parent}/ok.tokenizer.json",
                }
                assert "are as they were written" in verify(copy)
                for end in ("_mask.bin", "_mask.idx"):
                    assert Path(copy + end).read_bytes() == Path(f"{here}{end}").read_bytes()
        web.shutdown()


def test_only_what_has_changed_is_copied_again(
    bucket: Any, server: S3Server, tmp_path: Path
) -> None:
    """A second start reads nothing; a changed, a lost and a cut file are read again, and no
    other."""
    address, cache = f"s3://{bucket.name}/a", str(tmp_path)

    def read() -> list[str]:
        server.take("GET")
        local_copy(address, "data_path", cache)
        return sorted(
            {path.rpartition("/")[2] for path in server.take("GET") if path.count("/") > 2}
        )

    assert read() == ["one.txt", "pair.bin", "pair.idx", "two.txt"] and read() == []
    bucket.put_object(Key="a/one.txt", Body=b"eno")
    assert read() == ["one.txt"]
    copy = Path(local_copy(address, "data_path", cache))
    (copy / "pair.idx").unlink()
    (copy / "pair.bin").write_bytes(b"tok")
    assert read() == ["pair.bin", "pair.idx"] and content(str(copy))["one.txt"] == b"eno"


def test_a_file_that_changes_under_its_copy_is_refused_then_copied(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writes while it is read: nothing of that copy is used, and the next start has the new
    content."""
    whole = s3fs.S3FileSystem._call_s3

    async def changed(self: Any, method: str, *arguments: Any, **options: Any) -> Any:
        found = await whole(self, method, *arguments, **options)
        if method == "get_object":
            bucket.put_object(Key="a/one.txt", Body=b"two")
        return found

    with (
        monkeypatch.context() as patch,
        pytest.raises(DataError, match=r"one\.txt changed while it was copied"),
    ):
        patch.setattr(s3fs.S3FileSystem, "_call_s3", changed)
        s3fs.S3FileSystem.clear_instance_cache()
        local_copy(f"s3://{bucket.name}/a/one.txt", "data_path", str(tmp_path))
    s3fs.S3FileSystem.clear_instance_cache()
    assert not list(tmp_path.rglob("one.txt"))
    assert (
        Path(local_copy(f"s3://{bucket.name}/a/one.txt", "data_path", str(tmp_path))).read_bytes()
        == b"two"
    )


class Ranges(http.server.BaseHTTPRequestHandler):
    """A server of one file, `content`, with ranges; each answer ends after `most` bytes. `asked`:
    where they began."""

    content = b""
    etag = '"1"'
    most = 10**9
    asked = list[int]()

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:  # noqa: N802 - as the library names it
        self.answer(0, 200)

    def do_GET(self) -> None:  # noqa: N802 - the same
        if not self.path.endswith("/mine.bin"):
            return self.send_error(404)
        ranged = "Range" in self.headers
        start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-")) if ranged else 0
        self.asked.append(start)
        self.answer(start, 206 if ranged else 200)
        self.wfile.write(self.content[start:][: self.most])

    def answer(self, start: int, status: int) -> None:
        if not self.path.endswith("/mine.bin"):
            return self.send_error(404)
        self.send_response(status)
        self.send_header("ETag", self.etag)
        self.send_header("Content-Length", str(len(self.content) - start))
        self.end_headers()


def test_a_copy_goes_on_at_the_byte_where_it_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same start and in the next one, but never behind bytes of another version."""
    ours = random.Random(0).randbytes(10_000_000)
    handler: Any = type("Handler", (Ranges,), {"content": ours, "most": 3_000_000, "asked": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{web.server_address[1]}/mine.bin"
        assert Path(local_copy(address, "data_path", str(tmp_path / "one"))).read_bytes() == ours
        asked = handler.asked[1:]  # the first one asks whether it is a file
        assert asked[0] == 0 and len(asked) > 3 and asked == sorted(set(asked)), (
            "the library drops what it buffers"
        )
        for etag, later in (('"1"', ours), ('"2"', ours[::-1])):
            handler.asked, cache = [], str(tmp_path / etag)
            handler.etag = '"1"'
            handler.content = ours
            handler.most = 3_000_000
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(remote_storage.logger, "warning", interrupt)
                local_copy(address, "data_path", cache)
            handler.etag = etag
            handler.content = later
            handler.most = 10**9
            assert Path(local_copy(address, "data_path", cache)).read_bytes() == later
            assert len(handler.asked) == 4 and (handler.asked[-1] > 0) is (later is ours)
        web.shutdown()


def interrupt(*_: Any) -> None:
    """A user's reaction to a warning."""
    raise KeyboardInterrupt


def test_a_copy_from_s3_goes_on_too(
    bucket: Any, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store fails in the middle of a file: what is there is not read again, and has no
    holes."""
    ours = random.Random(0).randbytes(1_000_000)
    bucket.put_object(Key="a/large.bin", Body=ours)
    address = f"s3://{bucket.name}/a/large.bin"
    monkeypatch.setattr(remote_storage, "_PART_BYTES", 100_000)
    asked, is_broken = list[int](), True
    call = s3fs.S3FileSystem._call_s3

    async def watched(self: Any, method: str, *arguments: Any, **options: Any) -> Any:
        if method == "get_object":
            asked.append(int(options["Range"].removeprefix("bytes=").partition("-")[0]))
            if is_broken and asked[-1] > 500_000:
                raise OSError("cut")
        return await call(self, method, *arguments, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", watched)
    with pytest.raises(DataError, match="cut"):
        local_copy(address, "data_path", str(tmp_path))
    (part,) = tmp_path.rglob("large.bin.part")
    kept = part.read_bytes()
    assert 0 < len(kept) <= 600_000 and ours.startswith(kept) and 500_000 < max(asked)
    asked.clear()
    is_broken = False
    assert Path(local_copy(address, "data_path", str(tmp_path))).read_bytes() == ours
    assert min(asked) == len(kept) and not list(tmp_path.rglob("*.part"))


def test_a_part_from_s3_that_is_cut_is_kept(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Connections end early, some without an error: the same start goes on at the byte where each
    did."""
    ours = random.Random(0).randbytes(1_000_000)
    bucket.put_object(Key="a/large.bin", Body=ours)
    monkeypatch.setattr(remote_storage, "_PART_BYTES", 400_000)
    monkeypatch.setattr(remote_storage, "_PIECE_BYTES", 100_000)
    body = pytest.importorskip("aiobotocore.response").AioStreamingBody
    read, cuts = body.read, [b"", b"reset", b""]

    async def cut(self: Any, amount: int) -> Any:
        if self.tell() < 200_000 or not cuts:
            return await read(self, amount)
        if found := cuts.pop():
            raise ConnectionError(found.decode())
        return found

    monkeypatch.setattr(body, "read", cut)
    copy = local_copy(f"s3://{bucket.name}/a/large.bin", "data_path", str(tmp_path))
    assert Path(copy).read_bytes() == ours and not cuts
    assert "the copy goes on at byte" in caplog.text


def test_errors_are_one_line_without_secrets(
    bucket: Any, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing there, no place, no bucket, a store that is gone."""
    cases: list[tuple[str, str | None, type[Exception], str]] = [
        (
            f"s3://{bucket.name}/nothing",
            str(tmp_path),
            DataError,
            "there is no such file or folder, and no pair",
        ),
        (f"s3://{bucket.name}/a", None, UsageError, "give --dataset_cache or --experiment_dir"),
        ("s3://", str(tmp_path), UsageError, "must be the address of a folder"),
        ("gibberish://a/b", str(tmp_path), UsageError, "give s3://"),
    ]
    for address, cache, kind, words in cases:
        with pytest.raises(kind) as caught:
            local_copy(address, "data_path", cache)
        assert (
            words in str(caught.value)
            and "\n" not in str(caught.value)
            and "canary" not in str(caught.value)
        )
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(DataError) as caught:
        local_copy(f"s3://{bucket.name}/a", "data_path", str(tmp_path))
    assert "\n" not in str(caught.value) and not any(
        it in str(caught.value) for it in list(VARIABLES.values())[:3]
    )
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_pretrained_model_that_cannot_be_copied_ends_a_start(
    bucket: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code and exit.json, as for other data: the copy is made while the command line
    is read."""
    address = f"s3://{bucket.name}/nothing"
    flags = [
        *TINY,
        f"--pretrained_checkpoint_path={address}",
        f"--experiment_dir={tmp_path / 'run'}",
    ]
    assert pretrain_gpt.main(flags) == DataError.exit_code
    said = capsys.readouterr().err
    assert (
        said.startswith(f"ERROR: --pretrained_checkpoint_path={address}: there is no such file")
        and said.count("\n") == 1
    )
    assert (
        json.loads((tmp_path / "run" / "exit.json").read_text())["exit_code"] == DataError.exit_code
    )


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


class WithoutList(Quiet):
    """A server that refuses to list a folder."""

    def list_directory(self, path: Any) -> None:
        self.send_error(404)


@pytest.mark.parametrize("handler", [Quiet, WithoutList])
def test_a_page_of_a_web_server_is_never_a_text(handler: Any, tmp_path: Path) -> None:
    """A folder is refused with the way; its files are read as a list, and as a pattern where the
    server lists them."""
    web_folder, cache = tmp_path / "web" / "data", str(tmp_path / "cache")
    (web_folder / "sub").mkdir(parents=True)
    for name in ("one.txt", "two.txt", "sub/three.txt", "page.html"):
        (web_folder / name).write_text(name)
    serve = functools.partial(handler, directory=str(tmp_path / "web"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as web:
        threading.Thread(target=web.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{web.server_address[1]}/data"
        for name in ("", "/", "/sub", "/nothing", "/nothing*"):
            with pytest.raises(
                DataError, match=r"of a folder in the web give files, \{one,two\}.txt, or a p"
            ) as error:
                local_copy(address + name, "data_path", cache)
            assert address in str(error.value) and not list(tmp_path.glob("cache/**/data"))
        both = {"one.txt": b"one.txt", "two.txt": b"two.txt"}
        assert content(local_copy(address + "/{one,two}.txt", "data_path", cache)) == both
        assert (
            Path(local_copy(address + "/page.html", "data_path", cache)).read_bytes()
            == b"page.html"
        )
        if handler is Quiet:
            assert content(local_copy(address + "/*.txt", "data_path", cache)) == both
            found = content(local_copy(address + "/**/*.txt", "data_path", cache))
            assert found == {**both, "sub/three.txt": b"sub/three.txt"}
            (web_folder / "one.txt").write_text("one_txt")
            os.utime(web_folder / "one.txt", (1, 1))
            assert (
                content(local_copy(address + "/*.txt", "data_path", cache))["one.txt"] == b"one_txt"
            )
        web.shutdown()


def test_a_run_reads_what_is_there(bucket: Any, tmp_path: Path) -> None:
    """Tokens in S3 and a validation text on a web server train two ranks as local files do; a
    restart goes on."""
    write_documents(tmp_path / "tokens", [list(range(20))] * 40)
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "valid.txt").write_text("words " * 200)
    for ending in (".idx", ".bin"):
        bucket.upload_file(str(tmp_path / f"tokens{ending}"), f"tokens{ending}")
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "web")
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        there = f"s3://{bucket.name}/tokens", f"http://127.0.0.1:{web.server_address[1]}/valid.txt"
        here = str(tmp_path / "tokens"), str(tmp_path / "web" / "valid.txt")
        kept = [word for word in TINY if not word.startswith(("--dataset_source", "--vocab_size"))]
        for name, (data, valid), stops in (
            ("there", there, ["--stop_interval=3"]),
            ("there", there, []),
            ("here", here, []),
        ):
            flags = [
                f"--data_path={data}",
                f"--valid_data_path={valid}",
                "--validation_iters=1",
                "--tokenizer_file=byte",
            ]
            flags += ["--vocab_size=257", f"--experiment_dir={tmp_path / name}", *stops]
            succeed([*kept, *flags], ranks=2)
        web.shutdown()
    assert weights(tmp_path / "there") == weights(tmp_path / "here")
