import pytest

from sluice.gateway.api.v2.grpc.methods import API_CATEGORIES
from sluice.gateway.front.http.access import find_api_category
from sluice.gateway.front.http.openapi import v2_paths
from sluice.gateway.front.restrictions import (
    ApiCategory,
    Restriction,
    Restrictions,
    find_repeated_category,
    parse_restriction,
)
from sluice.gateway.options.config import read_config
from sluice.gateway.options.option import OptionError


def test_reads_parts_key_and_value() -> None:
    expected = Restriction(frozenset({ApiCategory.HEALTH, ApiCategory.SHARED_MEMORY}), "admin-key", "a=b:c")
    assert parse_restriction("health, shared-memory:Admin-Key=a=b:c") == expected
    assert "a=b:c" not in repr(expected)


@pytest.mark.parametrize("text", ["", "health", "health:key", "health:=v", "health:k=", "x:k=v", "health,health:k=v"])
def test_what_is_no_restriction(text: str) -> None:
    with pytest.raises(ValueError, match="API,API:KEY=VALUE, where APIs are of health, metadata, inference"):
        parse_restriction(text)


@pytest.mark.parametrize("flag", ["--http-restricted-api", "--grpc-restricted-protocol"])
def test_a_part_has_one_key(flag: str) -> None:
    with pytest.raises(OptionError, match=f"{flag} names 'trace' more than once"):
        read_config({flag: ["trace:a=1", "health,trace:b=2"]}, {})
    assert find_repeated_category([parse_restriction("trace:a=1"), parse_restriction("health:b=2")]) is None


def test_the_variable_has_semicolons_between() -> None:
    config = read_config({}, {"SLUICE_HTTP_RESTRICTED_API": "health,trace:a=1; logging:b=2"})
    assert [each.key for each in config.http.restrictions] == ["a", "b"]


def test_only_the_value_admits() -> None:
    only = Restrictions([parse_restriction("inference:k=v")]).find(ApiCategory.INFERENCE)
    assert only is not None
    assert [only.admits(sent) for sent in (b"v", None, b"", b"V", b"v ", b"\xff")] == [True] + [False] * 5


@pytest.mark.parametrize("path", [path.format(model="m", region="r") for path in v2_paths()])
def test_every_path_of_the_protocol_belongs_to_a_part(path: str) -> None:
    assert find_api_category(path) is not None


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/chat/completions", ApiCategory.INFERENCE),
        ("/v1/completions", ApiCategory.INFERENCE),
        ("/v1/rag/docs/query", ApiCategory.INFERENCE),
        ("/v1/rag/docs/search", ApiCategory.INFERENCE),
        ("/v1/rag/docs/documents", ApiCategory.MODEL_REPOSITORY),
        ("/v1/rag/docs/documents/a/query", ApiCategory.MODEL_REPOSITORY),
        ("/v1/rag/collections", ApiCategory.MODEL_REPOSITORY),
        ("/v1/rag/collections/docs", ApiCategory.MODEL_REPOSITORY),
        ("/v1/embeddings", ApiCategory.INFERENCE),
        ("/pooling", ApiCategory.INFERENCE),
        ("/v2/rerank", ApiCategory.INFERENCE),
        ("/ping", ApiCategory.HEALTH),
        ("/version", ApiCategory.METADATA),
        ("/v1/models", ApiCategory.METADATA),
        ("/v1/load_lora_adapter", ApiCategory.MODEL_REPOSITORY),
        ("/v1/unload_lora_adapter", ApiCategory.MODEL_REPOSITORY),
        ("/sleep", ApiCategory.MODEL_REPOSITORY),
        ("/wake_up", ApiCategory.MODEL_REPOSITORY),
        ("/is_sleeping", ApiCategory.MODEL_REPOSITORY),
        ("/health", ApiCategory.HEALTH),
        ("/v2/models/m/versions/3/infer", ApiCategory.INFERENCE),
        ("/v2/models/m/versions/3", ApiCategory.METADATA),
        ("/v2/models/stats", ApiCategory.STATISTICS),
        ("/v2/models/infer", ApiCategory.METADATA),
        ("/v2/models/m/trace/setting", ApiCategory.TRACE),
        ("/v2/repository/models/m/load", ApiCategory.MODEL_REPOSITORY),
        ("/v2/systemsharedmemory/region/r/register", ApiCategory.SHARED_MEMORY),
        ("/api/chat", ApiCategory.INFERENCE),
        ("/api/tags", ApiCategory.METADATA),
        ("/api/pull", ApiCategory.MODEL_REPOSITORY),
        ("/docs", None),
        ("/metrics", None),
    ],
)
def test_which_part_a_path_belongs_to(path: str, api: ApiCategory | None) -> None:
    assert find_api_category(path) is api


def test_every_method_of_the_service_belongs_to_a_part() -> None:
    from tritonclient.grpc import service_pb2

    [service] = service_pb2.DESCRIPTOR.services_by_name.values()
    assert {method.name for method in service.methods} == API_CATEGORIES.keys()
