"""Options of gRPC, under tritonserver's names."""

from dataclasses import dataclass, fields

from sluice.gateway.front.restrictions import Restriction, find_repeated_category, parse_restriction
from sluice.gateway.options.option import (
    OptionError,
    choice,
    declared_option,
    integer,
    option,
    pattern,
    printable_text,
    size,
    truth,
)

_COMPRESSION_LEVELS = ("none", "low", "medium", "high")
_SERVERS = ("sluice", "grpcio")
_NOT_IN_GRPCIO = ("uses_", "compression_", "keepalive_", "http2_", "max_connection_age_")
_BOOL = "BOOL"
_MILLISECONDS = integer(0, 2**31 - 1)
_COUNT = integer(0, 2**31 - 1)
_PEM = printable_text("the path of a PEM file")


@dataclass(frozen=True, slots=True)
class GrpcOptions:
    """gRPC: Triton's protocol as inference.GRPCInferenceService"""

    is_allowed: bool = option("--allow-grpc", True, truth, _BOOL, "serve gRPC at all")
    server: str = option(
        "--grpc-server",
        "sluice",
        choice(*_SERVERS),
        "NAME",
        "sluice, or grpcio: the plain server of the grpc package, which takes several times the CPU time of a call. "
        "For comparison, without TLS, compression or settings of connections",
    )
    host: str | None = option(
        "--grpc-address",
        None,
        printable_text("a host name or address"),
        "ADDRESS",
        "address to listen on for gRPC. Default: that of --host",
    )
    port: int = option("--grpc-port", 8001, integer(0, 65535), "PORT", "port of gRPC; 0 takes a free one")
    shares_port: bool = option(
        "--reuse-grpc-port",
        False,
        truth,
        _BOOL,
        "let several servers listen on the same port, each taking some of the connections; all need this option",
    )
    max_input_bytes: int = option(
        "--grpc-max-input-size",
        64 << 20,
        size(1),
        "SIZE",
        "longest request message: bytes, or 64M; at most 2 GiB, which is protobuf's own limit. Each request may take "
        "several times this in memory while it is read",
    )
    header_forward_pattern: str | None = option(
        "--grpc-header-forward-pattern",
        None,
        pattern,
        "REGEX",
        "metadata becomes request parameters where REGEX (of RE2) matches in its key, in any case. Default: none does",
    )
    compression_level: str = option(
        "--grpc-infer-response-compression-level",
        "none",
        choice(*_COMPRESSION_LEVELS),
        "LEVEL",
        "none, low, medium or high, as far as the client takes it. Costs CPU time, and pays on slow networks",
    )
    uses_ssl: bool = option("--grpc-use-ssl", False, truth, _BOOL, "take TLS connections only")
    uses_mutual_ssl: bool = option(
        "--grpc-use-ssl-mutual",
        False,
        truth,
        _BOOL,
        "TLS, and clients must show a certificate that --grpc-root-cert has signed",
    )
    server_cert_path: str | None = option(
        "--grpc-server-cert", None, _PEM, "PATH", "the server's certificate chain, PEM; for TLS"
    )
    server_key_path: str | None = option(
        "--grpc-server-key", None, _PEM, "PATH", "the key of --grpc-server-cert, PEM; for TLS"
    )
    root_cert_path: str | None = option(
        "--grpc-root-cert",
        None,
        _PEM,
        "PATH",
        "certificates that clients' own must come from, PEM; for mutual TLS",
    )
    keepalive_time_ms: int = option(
        "--grpc-keepalive-time",
        7_200_000,
        _MILLISECONDS,
        "MILLISECONDS",
        "seconds of silence after which a connection is probed with a ping",
    )
    keepalive_timeout_ms: int = option(
        "--grpc-keepalive-timeout",
        20_000,
        _MILLISECONDS,
        "MILLISECONDS",
        "timeout of the answer to such a ping; then the connection is closed",
    )
    keepalive_permit_without_calls: bool = option(
        "--grpc-keepalive-permit-without-calls", False, truth, _BOOL, "probe connections without a call under way too"
    )
    http2_max_pings_without_data: int = option(
        "--grpc-http2-max-pings-without-data",
        2,
        _COUNT,
        "COUNT",
        "most pings while there is nothing to send; 0 is no limit",
    )
    http2_min_recv_ping_interval_ms: int = option(
        "--grpc-http2-min-recv-ping-interval-without-data",
        300_000,
        _MILLISECONDS,
        "MILLISECONDS",
        "a client's ping that follows another sooner than this, with no data between, counts as a strike",
    )
    http2_max_ping_strikes: int = option(
        "--grpc-http2-max-ping-strikes",
        2,
        _COUNT,
        "COUNT",
        "strikes before the connection is closed; 0 is no limit",
    )
    max_connection_age_ms: int | None = option(
        "--grpc-max-connection-age",
        None,
        _MILLISECONDS,
        "MILLISECONDS",
        "longest life of a connection, so that clients spread over new servers. Default: no limit",
    )
    max_connection_age_grace_ms: int | None = option(
        "--grpc-max-connection-age-grace",
        None,
        _MILLISECONDS,
        "MILLISECONDS",
        "time for which the calls of such a connection may go on. Default: no limit",
    )

    restrictions: tuple[Restriction, ...] = option(
        "--grpc-restricted-protocol",
        (),
        parse_restriction,
        "APIS:KEY=VALUE",
        "parts of the protocol, as --http-restricted-api, for calls whose metadata have triton-grpc-protocol-KEY: "
        "VALUE. May be given several times",
        secret=True,
        is_many=True,
        separator=";",
    )

    def __post_init__(self) -> None:
        """Check options against each other. Raises OptionError."""
        if (api := find_repeated_category(self.restrictions)) is not None:
            raise OptionError(f"--grpc-restricted-protocol names '{api}' more than once; give it one key")
        if self.server == "grpcio":
            self._check_plain()
        if not (self.uses_ssl or self.uses_mutual_ssl):
            return
        needed = {"--grpc-server-cert": self.server_cert_path, "--grpc-server-key": self.server_key_path}
        if self.uses_mutual_ssl:
            needed["--grpc-root-cert"] = self.root_cert_path
        for flag, path in needed.items():
            if path is None:
                needing = "--grpc-use-ssl-mutual" if self.uses_mutual_ssl else "--grpc-use-ssl"
                raise OptionError(f"{needing} needs {flag}")

    def _check_plain(self) -> None:
        for each in fields(self):
            if each.name.startswith(_NOT_IN_GRPCIO) and getattr(self, each.name) != each.default:
                raise OptionError(f"--grpc-server grpcio has no {declared_option(each).flag}; it is for comparison")
