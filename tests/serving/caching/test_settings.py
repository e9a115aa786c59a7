import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.caching.settings import LocalCacheSettings, RedisCacheSettings, RedisTls, parse_cache_settings


def test_nothing_said_is_no_cache() -> None:
    assert parse_cache_settings([]) is None
    assert parse_cache_settings([], byte_size=0) is None


def test_the_local_cache_in_both_spellings() -> None:
    assert (
        parse_cache_settings(["local,size=1048576"]) == LocalCacheSettings(1 << 20) == parse_cache_settings([], 1 << 20)
    )


def test_redis_as_triton_spells_it() -> None:
    texts = ["host=cache.local", "port=6380", "user=u", "password=a=b,c", "db=3", "connect_timeout=20", "ttl=60"]
    settings = parse_cache_settings([f"redis,{text}" for text in texts])
    assert settings == RedisCacheSettings(
        "cache.local", 6380, "u", "a=b,c", db=3, connect_timeout_s=0.02, ttl_s=60, tls=None
    )
    assert "a=b,c" not in repr(settings)


def test_credentials_may_come_from_the_environment() -> None:
    texts = ["redis,host=h", "redis,port=1", "redis,user=given"]
    environ = {"TRITONCACHE_REDIS_USERNAME": "e", "TRITONCACHE_REDIS_PASSWORD": "secret"}
    assert parse_cache_settings(texts, environ=environ) == RedisCacheSettings("h", 1, "given", "secret")


def test_tls() -> None:
    texts = ["redis,host=h", "redis,port=1", "redis,tls_enabled=true", "redis,cacert=/ca.pem"]
    assert parse_cache_settings(texts) == RedisCacheSettings("h", 1, tls=RedisTls(cacert="/ca.pem"))


REDIS = ["redis,host=h", "redis,port=1"]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["local"], "must be CACHE,KEY=VALUE"),
        (["size=1"], "must be CACHE,KEY=VALUE"),
        (["local,size="], "must be CACHE,KEY=VALUE"),
        (["memcached,host=h"], "knows the caches local and redis, got 'memcached'"),
        (["local,size=12"], "local,size must be a whole number of at least 1024, got '12'"),
        (["local,size=1M"], "got '1M'"),
        (["local,bytes=4096"], "local has no setting 'bytes'; it has size"),
        (["local,size=4096", *REDIS], "must be about one cache, got local and redis"),
        (["redis,host=h"], "redis needs port"),
        ([*REDIS, "redis,hots=h"], "redis has no setting 'hots'; it has cacert, "),
        (["redis,host=h", "redis,port=70000"], "from 1 to 65535, got '70000'"),
        ([*REDIS, "redis,socket_timeout=0"], "socket_timeout must be a whole number of at least 1, got '0'"),
        ([*REDIS, "redis,tls_enabled=yes"], "tls_enabled must be true or false, got 'yes'"),
        ([*REDIS, "redis,cert=/c.pem"], "redis,cert needs redis,tls_enabled=true"),
        ([*REDIS, "redis,sni=h"], "redis,sni is not supported"),
    ],
)
def test_what_makes_no_sense_is_named(texts: list[str], words: str) -> None:
    with pytest.raises(SluiceError, match="--cache-config") as caught:
        parse_cache_settings(texts)
    assert caught.value.code is ErrorCode.INVALID
    assert words in caught.value.message


def test_both_flags_are_one_too_many() -> None:
    with pytest.raises(SluiceError, match="Incompatible flags --response-cache-byte-size and --cache-config"):
        parse_cache_settings(["local,size=4096"], byte_size=4096)
