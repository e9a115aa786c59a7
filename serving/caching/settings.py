"""Settings of the response cache: `--cache-config` as tritonserver has it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sluice.addresses import host_and_port
from sluice.errors import invalid

FLAG = "--cache-config"
_MIN_LOCAL_BYTES = 1024
_MAX_PORT = 65535
USER_VARIABLE, PASSWORD_VARIABLE = "TRITONCACHE_REDIS_USERNAME", "TRITONCACHE_REDIS_PASSWORD"
"""Environment variables with credentials that the command line leaves out, as in Triton's Redis cache."""


@dataclass(frozen=True, slots=True)
class LocalCacheSettings:
    """A cache in the process's memory for all models. It grows up to `size_bytes`."""

    size_bytes: int


@dataclass(frozen=True, slots=True)
class RedisTls:
    """Paths of PEM files. None stands for the system's authorities, and for no client certificate."""

    cert: str | None = None
    key: str | None = None
    cacert: str | None = None
    cacert_dir: str | None = None


@dataclass(frozen=True, slots=True)
class RedisCacheSettings:
    """A Redis server, which many gateways may share.

    The timeouts bound the delay that a slow Redis can add to a request: `wait_timeout_s` until its look-up is sent, and
    `socket_timeout_s` until the answer. A Redis that is away is pinged every `retry_s`.
    """

    host: str
    port: int
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    db: int = 0
    connect_timeout_s: float = 0.1
    socket_timeout_s: float = 0.1
    wait_timeout_s: float = 0.1
    pool_size: int = 2
    """Connections for look-ups. One more carries insertions."""
    ttl_s: int | None = None
    """Time for which a response is kept; None: until Redis evicts it."""
    max_value_bytes: int = 1 << 20
    """Largest response that is kept: 32 of them may have to arrive within `socket_timeout_s`."""
    retry_s: float = 2.0
    tls: RedisTls | None = None

    @property
    def address(self) -> str:
        return host_and_port(self.host, self.port)


CacheSettings = LocalCacheSettings | RedisCacheSettings


def parse_cache_settings(
    texts: Iterable[str], byte_size: int | None = None, environ: Mapping[str, str] | None = None
) -> CacheSettings | None:
    """Return the cache's settings, None for no cache. `environ` may have Redis credentials. Raises INVALID."""
    given = [_parse_setting(text) for text in texts]
    if byte_size is not None and given:
        raise invalid(
            FLAG,
            "Incompatible flags --response-cache-byte-size and --cache-config both provided. Please provide one or the "
            "other.",
        )
    if byte_size is not None:
        return _local_settings({"size": str(byte_size)}) if byte_size else None
    kinds = {kind for kind, _, _ in given}
    if not kinds:
        return None
    if len(kinds) > 1:
        raise invalid(FLAG, f"{FLAG} must be about one cache, got {' and '.join(sorted(kinds))}")
    kind, values = kinds.pop(), {key: value for _, key, value in given}
    if kind == "local":
        return _local_settings(values)
    if kind == "redis":
        return _redis_settings(values, environ or {})
    raise invalid(FLAG, f"{FLAG} knows the caches local and redis, got {kind!r}")


def _parse_setting(text: str) -> tuple[str, str, str]:
    kind, comma, setting = text.partition(",")
    key, equals, value = setting.partition("=")
    if not (kind and comma and key and equals and value):
        raise invalid(FLAG, f"{FLAG} must be CACHE,KEY=VALUE, such as local,size=1048576, got {text!r}")
    return kind.strip(), key.strip(), value


def _local_settings(values: dict[str, str]) -> LocalCacheSettings:
    _check_keys("local", values, {"size"})
    if "size" not in values:
        raise invalid(FLAG, f"{FLAG} local needs its size in bytes, such as local,size=1048576")
    return LocalCacheSettings(_integer("local", "size", values["size"], _MIN_LOCAL_BYTES))


ReadSetting = Callable[[str, str], Any]


def _count(low: int, high: int | None = None) -> ReadSetting:
    return lambda key, text: _integer("redis", key, text, low, high)


def _milliseconds(key: str, text: str) -> float:
    return _integer("redis", key, text, 1) / 1000


def _text(key: str, text: str) -> str:
    return text


_REDIS_FIELDS: dict[str, tuple[str, ReadSetting]] = {
    "host": ("host", _text),
    "port": ("port", _count(1, _MAX_PORT)),
    "user": ("user", _text),
    "password": ("password", _text),
    "db": ("db", _count(0)),
    "connect_timeout": ("connect_timeout_s", _milliseconds),
    "socket_timeout": ("socket_timeout_s", _milliseconds),
    "wait_timeout": ("wait_timeout_s", _milliseconds),
    "pool_size": ("pool_size", _count(1)),
    "ttl": ("ttl_s", _count(1)),
    "max_value_size": ("max_value_bytes", _count(1)),
    "retry_interval": ("retry_s", _milliseconds),
}
"""The field of each key and its reader. Triton's keys come first, ours after `pool_size`. `ttl` is in seconds, other
times are in milliseconds. 0, which Triton takes for no limit, is invalid: a request must not wait for a cache."""

_TLS_KEYS = {"cert", "key", "cacert", "cacert_dir"}


def _redis_settings(values: dict[str, str], environ: Mapping[str, str]) -> RedisCacheSettings:
    if "sni" in values:
        raise invalid(FLAG, f"{FLAG} redis,sni is not supported: give as host the name that the certificate is for")
    _check_keys("redis", values, {*_REDIS_FIELDS, *_TLS_KEYS, "tls_enabled"})
    if missing := sorted({"host", "port"} - values.keys()):
        raise invalid(
            FLAG, f"{FLAG} redis needs {' and '.join(missing)}, such as redis,host=cache.local and redis,port=6379"
        )
    credentials = {"user": environ.get(USER_VARIABLE), "password": environ.get(PASSWORD_VARIABLE)}
    merged = {key: text for key, text in credentials.items() if text} | values
    fields = {name: read(key, merged[key]) for key, (name, read) in _REDIS_FIELDS.items() if key in merged}
    return RedisCacheSettings(**fields, tls=_tls_settings(values))


def _tls_settings(values: dict[str, str]) -> RedisTls | None:
    files = {key: values[key] for key in _TLS_KEYS if key in values}
    enabled = values.get("tls_enabled", "false")
    if enabled not in ("true", "false"):
        raise invalid(FLAG, f"{FLAG} redis,tls_enabled must be true or false, got {enabled!r}")
    if enabled == "false":
        if files:
            raise invalid(FLAG, f"{FLAG} redis,{min(files)} needs redis,tls_enabled=true")
        return None
    return RedisTls(**files)


def _check_keys(kind: str, values: Mapping[str, str], known: set[str]) -> None:
    unknown = sorted(values.keys() - known)
    if unknown:
        raise invalid(FLAG, f"{FLAG} {kind} has no setting {unknown[0]!r}; it has {', '.join(sorted(known))}")


def _integer(kind: str, key: str, text: str, low: int, high: int | None = None) -> int:
    number = int(text) if text.isdecimal() else -1
    if number < low or (high is not None and number > high):
        bounds = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise invalid(FLAG, f"{FLAG} {kind},{key} must be a whole number {bounds}, got {text!r}")
    return number
