"""The options of `sluice serve` for responses that are kept (`response_cache` of config.pbtxt)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.options.option import ConfigError, option, size, text_of
from sluice.errors import SluiceError

if TYPE_CHECKING:
    from serving.caching.settings import CacheSettings


@dataclass(frozen=True, slots=True)
class ResponseCacheOptions:
    """Response cache: answers of models with response_cache, for equal requests. Default: 16M for each such model"""

    settings: tuple[str, ...] = option(
        "--cache-config",
        (),
        text_of("CACHE,KEY=VALUE, such as local,size=1048576"),
        "CACHE,KEY=VALUE",
        "one cache for all models. local,size=BYTES; or redis,host=NAME redis,port=N and more (user, db, ttl, "
        "tls_enabled ...), shared by servers. May be given several times",
        secret=True,
        is_many=True,
        separator=";",
    )
    byte_size: int | None = option(
        "--response-cache-byte-size", None, size(0), "SIZE", "the old way to say --cache-config local,size=SIZE"
    )
    redis_user: str | None = option(
        "--cache-redis-username",
        None,
        text_of("a user's name"),
        "NAME",
        "the user of redis where --cache-config names none",
        variable="TRITONCACHE_REDIS_USERNAME",
    )
    redis_password: str | None = option(
        "--cache-redis-password",
        None,
        text_of("a password"),
        "PASSWORD",
        "the password of redis where --cache-config names none. Better set TRITONCACHE_REDIS_PASSWORD",
        secret=True,
        variable="TRITONCACHE_REDIS_PASSWORD",
    )

    def __post_init__(self) -> None:
        """Check what options say together. Raises ConfigError."""
        self.parsed()

    def parsed(self) -> "CacheSettings | None":
        """Which cache that is; None for one in each model's own memory. Raises ConfigError."""
        from serving.caching.settings import PASSWORD_VARIABLE, USER_VARIABLE, parse_cache_settings

        credentials = {USER_VARIABLE: self.redis_user, PASSWORD_VARIABLE: self.redis_password}
        given = {name: value for name, value in credentials.items() if value is not None}
        try:
            return parse_cache_settings(self.settings, self.byte_size, given)
        except SluiceError as error:
            raise ConfigError(error.message) from None
