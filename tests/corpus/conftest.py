"""A server of S3 at which the environment of the tests of a file points."""

from collections.abc import Iterator

import pytest
import s3fs

from tests.support.s3_server import VARIABLES, S3Server


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """Yield a server at which the environment points."""
    with S3Server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in {**VARIABLES, "AWS_ENDPOINT_URL": server.url}.items():
            patch.setenv(name, value)
        patch.setattr(s3fs.S3FileSystem, "retries", 1)
        s3fs.S3FileSystem.clear_instance_cache()
        yield server
    s3fs.S3FileSystem.clear_instance_cache()
