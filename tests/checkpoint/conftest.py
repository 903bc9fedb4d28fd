"""An S3 server for the mirrors of this folder's tests."""

import random
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
import s3fs

from megatron_lite.checkpoint import mirror
from tests.support.s3_server import VARIABLES, S3Server


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """Yield a server at which the environment points; pauses, patience and retries are short."""
    with S3Server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in {**VARIABLES, "AWS_ENDPOINT_URL": server.url}.items():
            patch.setenv(name, value)
        patch.setattr(mirror, "STOPPED_PATIENCE_S", 0.1)
        patch.setattr(mirror, "CLAIM_S", 0.01)
        patch.setattr(mirror, "pause_s", lambda attempt: 0.02)
        patch.setattr(s3fs.S3FileSystem, "retries", 1)
        s3fs.S3FileSystem.clear_instance_cache()
        yield server


@pytest.fixture(scope="module")
def s3(server: S3Server) -> Any:
    return boto3.resource("s3")


@pytest.fixture
def bucket(s3: Any, server: S3Server) -> Any:
    """Return an empty bucket."""
    bucket = s3.Bucket(f"bucket-{random.randrange(10**12)}")
    bucket.create()
    server.requests.clear()
    return bucket
