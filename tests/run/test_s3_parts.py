"""Large files in S3: a part that failed is sent anew from its first byte, and a failed upload leaves
no parts."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import s3fs
from botocore.exceptions import HTTPClientError

from megatron_lite.run import s3_parts
from megatron_lite.run.remote_storage import RemoteFolder
from tests.support.s3_server import VARIABLES, S3Server

PART_BYTES = 5 * 2**20  # the least that S3 takes
OURS = random.Random(0).randbytes(2 * PART_BYTES + 1234)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a bucket at which the environment points."""
    with S3Server() as server:
        for name, value in {**VARIABLES, "AWS_ENDPOINT_URL": server.url}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(s3_parts, "PART_BYTES", PART_BYTES)
        s3fs.S3FileSystem.clear_instance_cache()
        bucket = boto3.resource("s3").Bucket(f"bucket-{random.randrange(10**12)}")
        bucket.create()
        yield bucket
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_part_that_failed_is_sent_from_its_start(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks after some pieces of the second part, which s3fs then sends again."""
    (tmp_path / "large").write_bytes(OURS)
    session = pytest.importorskip("aiobotocore.httpsession").AIOHTTPSession
    send, broken = session.send, list[bytes]()

    async def breaks(self: Any, request: Any) -> Any:
        if "partNumber=2" in request.url and not broken:
            async for piece in request.body:
                broken.append(piece)
                raise HTTPClientError(error="reset")
        return await send(self, request)

    monkeypatch.setattr(session, "send", breaks)
    RemoteFolder(f"s3://{bucket.name}", "mirror").upload(tmp_path / "large", "a", {})
    assert broken and bucket.Object("a").get()["Body"].read() == OURS


def test_an_upload_that_is_refused_leaves_no_parts(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever lists unfinished uploads, and pays for them, finds none."""
    (tmp_path / "large").write_bytes(OURS)
    call = s3fs.S3FileSystem._call_s3

    async def refused(self: Any, method: str, *arguments: Any, **options: Any) -> Any:
        if options.get("PartNumber") == 2:
            raise PermissionError("refused")
        return await call(self, method, *arguments, **options)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", refused)
    with pytest.raises(PermissionError, match="refused"):
        RemoteFolder(f"s3://{bucket.name}", "mirror").upload(tmp_path / "large", "a", {})
    client = bucket.meta.client
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket.name)
    assert not list(bucket.objects.all())


def test_a_body_begins_anew_where_its_length_is_asked(tmp_path: Path) -> None:
    """For https, botocore reads a body after it has asked for the length, at each attempt."""
    (tmp_path / "large").write_bytes(OURS[:1000])
    with open(tmp_path / "large", "rb") as file:
        part = s3_parts._Part(file, 100, 600)
        assert part.read(50) == OURS[100:150] and part.tell() == 50
        assert len(part) == 500 and part.read(1000) == OURS[100:600] and part.read(1000) == b""
        part.seek(499)
        assert part.read(7) == OURS[599:600]
