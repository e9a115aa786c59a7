"""Where repositories lie, as operators write it."""

import pytest

from sluice.serving.repository.stores.location import local_path, store_location


@pytest.mark.parametrize("text", ["/models", "models", "./s3", "C:/models", "file:///models", "a:b/c", "s3:/bucket"])
def test_local_paths(text: str) -> None:
    assert store_location(text) is None
    assert local_path(text) == text.removeprefix("file://")


@pytest.mark.parametrize(
    ("text", "url", "endpoint"),
    [
        ("s3://bucket", "s3://bucket", None),
        ("s3://bucket/some/models", "s3://bucket/some/models", None),
        ("S3://bucket/models", "S3://bucket/models", None),
        ("s3://localhost:9000/bucket/models", "s3://bucket/models", "http://localhost:9000"),
        ("s3://10.0.0.7:9000/bucket", "s3://bucket", "http://10.0.0.7:9000"),
        ("s3://http://localhost:9000/bucket/models", "s3://bucket/models", "http://localhost:9000"),
        ("s3://https://store.example:443/bucket/models", "s3://bucket/models", "https://store.example:443"),
        ("s3://https://store.example/bucket/models", "s3://bucket/models", "https://store.example"),
    ],
)
def test_s3_as_triton_spells_it(text: str, url: str, endpoint: str | None) -> None:
    location = store_location(text)
    assert location is not None
    assert (location.text, location.protocol, location.url) == (text, "s3", url)
    assert location.options.get("endpoint_url") == endpoint


def test_other_stores() -> None:
    google = store_location("gs://bucket/models")
    assert google is not None
    assert (google.protocol, google.url, dict(google.options)) == ("gs", "gs://bucket/models", {})
    azure = store_location("as://account/container/models")
    assert azure is not None
    assert (azure.protocol, azure.url) == ("abfs", "abfs://container/models")
    assert azure.options == {"account_name": "account"}
