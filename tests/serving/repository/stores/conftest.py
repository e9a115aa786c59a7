import logging
from collections.abc import Iterator
from itertools import count
from uuid import uuid4

import fsspec
import pytest

from tests.serving.repository.stores.parts import Bucket, S3Server

_numbers = count()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture
def s3_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The credentials and the quick retries of a test; nothing of the user's own."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def s3(s3_server: S3Server, s3_environment: None) -> Bucket:
    """A bucket of its own on a real S3 server."""
    bucket = f"bucket{next(_numbers)}"
    filesystem = fsspec.filesystem("s3", endpoint_url=s3_server.endpoint, use_listings_cache=False)
    filesystem.mkdir(bucket)
    return Bucket(filesystem, f"{bucket}/models", f"s3://{s3_server.endpoint}/{bucket}/models")


@pytest.fixture
def memory() -> Bucket:
    path = f"/{uuid4().hex}"
    return Bucket(fsspec.filesystem("memory"), path, f"memory:/{path}")


@pytest.fixture(params=[pytest.param("s3", marks=pytest.mark.slow), "memory"])
def bucket(request: pytest.FixtureRequest) -> Bucket:
    """Each kind of store in turn, for what the store itself decides. Other tests have the one in memory."""
    found: Bucket = request.getfixturevalue(request.param)
    return found
