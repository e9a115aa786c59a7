from dataclasses import fields
from typing import Any

import pytest

from sluice.gateway.options.grpc import GrpcOptions
from sluice.gateway.options.option import OptionError, declared_option

OPTIONS = {declared_option(each).flag: (each.name, declared_option(each)) for each in fields(GrpcOptions)}


@pytest.mark.parametrize(
    ("flag", "text", "name", "value"),
    [
        ("--allow-grpc", "false", "is_allowed", False),
        ("--grpc-port", "0", "port", 0),
        ("--grpc-address", "::1", "host", "::1"),
        ("--reuse-grpc-port", "1", "shares_port", True),
        ("--grpc-max-input-size", "16M", "max_input_bytes", 16 << 20),
        ("--grpc-header-forward-pattern", "x-.*", "header_forward_pattern", "x-.*"),
        ("--grpc-infer-response-compression-level", "high", "compression_level", "high"),
        ("--grpc-use-ssl", "true", "uses_ssl", True),
        ("--grpc-use-ssl-mutual", "1", "uses_mutual_ssl", True),
        ("--grpc-keepalive-permit-without-calls", "0", "keepalive_permit_without_calls", False),
        ("--grpc-max-connection-age", "60000", "max_connection_age_ms", 60000),
    ],
)
def test_flags_of_tritonserver(flag: str, text: str, name: str, value: object) -> None:
    field, declared = OPTIONS[flag]
    assert field == name
    assert declared.read(text, flag) == value


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--allow-grpc", "perhaps"),
        ("--grpc-port", "65536"),
        ("--grpc-header-forward-pattern", "("),
        ("--grpc-infer-response-compression-level", "best"),
        ("--grpc-keepalive-time", "-1"),
        ("--grpc-max-input-size", "0"),
    ],
)
def test_what_an_option_does_not_take(flag: str, text: str) -> None:
    with pytest.raises(OptionError, match=flag):
        OPTIONS[flag][1].read(text, flag)


def test_tls_needs_its_files() -> None:
    with pytest.raises(OptionError, match="--grpc-use-ssl needs --grpc-server-cert"):
        GrpcOptions(uses_ssl=True)
    with pytest.raises(OptionError, match="--grpc-use-ssl needs --grpc-server-key"):
        GrpcOptions(uses_ssl=True, server_cert_path="c")
    with pytest.raises(OptionError, match="--grpc-use-ssl-mutual needs --grpc-root-cert"):
        GrpcOptions(uses_mutual_ssl=True, server_cert_path="c", server_key_path="k")


@pytest.mark.parametrize(
    "asked", [{"compression_level": "low"}, {"keepalive_time_ms": 5}, {"max_connection_age_ms": 5}]
)
def test_the_server_for_comparison_is_plain(asked: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="--grpc-server grpcio has no --grpc-"):
        GrpcOptions(server="grpcio", **asked)
