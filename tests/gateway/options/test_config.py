import pytest

from sluice.engine.config import EngineConfig, SchedulerPolicy, Speculation
from sluice.engine.scheduling.planner import LARGEST_CHUNK
from sluice.gateway.options.command_line import parse_flags
from sluice.gateway.options.config import GROUPS, ServeConfig, find_unknown_variables, list_options, read_config
from sluice.gateway.options.option import OptionError

DECLARED = [(group, name, declared) for group in GROUPS.values() for name, _, declared in list_options(group)]


def test_defaults() -> None:
    config = read_config({}, {})
    assert config == ServeConfig()
    assert (config.http.host, config.http.port, config.metrics.port) == ("127.0.0.1", 8000, 8002)
    assert config.http.max_input_bytes == 64 << 20
    assert config.shutdown.exit_timeout_s == 30


def test_a_flag_wins_over_its_variable() -> None:
    environ = {"SLUICE_HTTP_PORT": "9000", "SLUICE_METRICS_PORT": "9002"}
    config = read_config({"--http-port": "9100"}, environ)
    assert (config.http.port, config.metrics.port) == (9100, 9002)


@pytest.mark.parametrize(
    ("given", "environ", "said"),
    [
        ({"--http-port": "70000"}, {}, "--http-port must be a whole number from 0 to 65535, got '70000'"),
        ({}, {"SLUICE_HTTP_PORT": "tcp://10.0.0.1"}, "SLUICE_HTTP_PORT must be a whole number from 0 to 65535"),
        (
            {"--replicas": "2", "--prefill-replicas": "2"},
            {},
            "--prefill-replicas must be fewer than --replicas, so that some generate, got 2 of 2",
        ),
        (
            {"--engines": "e.yaml", "--prefill-replicas": "1"},
            {},
            "an engine of --engines is started with --role prefill",
        ),
        (
            {"--replicas": "2", "--prefill-replicas": "1", "--enable-prefix-caching": False},
            {},
            "--prefill-replicas hand over blocks of the prefix cache",
        ),
        ({"--dtype": "fp8"}, {}, "--dtype must be one of auto, bf16, f32, float16, got 'fp8'"),
        (
            {"--kv-cache-dtype": "int3"},
            {},
            "--kv-cache-dtype must be one of auto, bf16, f32, u8, ",
        ),
        ({"--max-num-batched-tokens": "32"}, {}, r"--max-num-batched-tokens must be at least --max-num-seqs \(64\)"),
        (
            {"--scheduler-policy": "fifo"},
            {},
            "--scheduler-policy must be one of guaranteed_no_evict, max_utilization, ",
        ),
        (
            {"--num-blocks": "9", "--kv-cache-memory": "1G"},
            {},
            "--kv-cache-memory and --num-blocks are two sizes for one KV cache; give one of them",
        ),
        (
            {"--kv-cache-memory-fraction": "0.5"},
            {"SLUICE_KV_CACHE_MEMORY": "1G"},
            "--kv-cache-memory and --kv-cache-memory-fraction are two sizes",
        ),
        (
            {"--kv-host-cache-bytes": "1G", "--enable-prefix-caching": False},
            {},
            "--kv-host-cache-bytes keeps blocks of the prefix cache, which --no-enable-prefix-caching turns off",
        ),
        (
            {"--kv-disk-cache": "/blocks", "--enable-prefix-caching": False},
            {},
            "--kv-disk-cache keeps blocks of the prefix cache",
        ),
        (
            {"--kv-disk-cache-bytes": "12"},
            {},
            "--kv-disk-cache-bytes must be a size of at least 1048576 bytes, such as 1048576, 256M or 2G, got '12'",
        ),
        ({"--speculation": "draft_model"}, {}, "--speculation draft_model needs --draft-model"),
        ({"--draft-model": "/m"}, {}, "--draft-model needs --speculation draft_model"),
        ({"--draft-model": "/m", "--speculation": "ngram"}, {}, "--draft-model needs --speculation draft_model"),
        (
            {"--request-timeout-secs": "5", "--queue-timeout-secs": "6"},
            {},
            r"--queue-timeout-secs must be at most --request-timeout-secs \(5\), which counts the wait too, got 6",
        ),
        ({"--http-port": "8002"}, {}, "--metrics-port must differ from --http-port, got 8002 for both"),
    ],
)
def test_refuses(given: dict[str, str | bool], environ: dict[str, str], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        read_config(given, environ)


@pytest.mark.parametrize(
    ("word", "dtype"),
    [("bfloat16", "bf16"), ("float32", "f32"), ("FLOAT", "f32"), ("half", "float16"), ("float16", "float16")],
)
def test_dtypes_have_vllms_words_too(word: str, dtype: str) -> None:
    assert read_config({"--dtype": word}, {}).engine("x").dtype == dtype
    if dtype != "float16":
        assert read_config({"--kv-cache-dtype": word}, {}).engine("x").kv_cache_dtype == dtype


def test_every_engine_option_arrives() -> None:
    given = {
        "--quantization": "int8",
        "--scheduler-policy": "max_utilization",
        "--kv-cache-dtype": "u8",
        "--kv-cache-memory-fraction": "0.5",
        "--max-queue-tokens": "9000",
        "--tenant-weights": "a=2, b=0.5",
        "--speculation": "draft_model",
        "--num-speculative-tokens": "7",
        "--draft-model": "/models/small",
    }
    environ = {"SLUICE_ENABLE_PREFIX_CACHING": "off"}
    assert read_config(given, environ).engine("/models/x") == EngineConfig(
        model_path="/models/x",
        max_num_batched_tokens=LARGEST_CHUNK,
        chooses_chunk=True,
        quantization="int8",
        scheduler_policy=SchedulerPolicy.MAX_UTILIZATION,
        enable_prefix_caching=False,
        kv_cache_dtype="u8",
        kv_cache_memory_fraction=0.5,
        max_queued_tokens=9000,
        tenant_weights={"a": 2.0, "b": 0.5},
        speculation=Speculation.DRAFT_MODEL,
        num_speculative_tokens=7,
        draft_model_path="/models/small",
    )


def test_a_switch_that_is_on_can_be_switched_off() -> None:
    assert parse_flags(["--no-enable-prefix-caching"]) == {"--enable-prefix-caching": False}
    assert parse_flags(["--enable-prefix-caching"]) == {"--enable-prefix-caching": True}
    off = read_config(parse_flags(["--no-enable-prefix-caching"]), {"SLUICE_ENABLE_PREFIX_CACHING": "1"})
    assert not off.cache.enable_prefix_caching
    assert ServeConfig().cache.enable_prefix_caching


def test_a_size_of_a_step_that_is_given_is_no_ceiling_but_fixed() -> None:
    engine = read_config({"--max-num-batched-tokens": "700"}, {}).engine("x")
    assert (engine.max_num_batched_tokens, engine.chooses_chunk) == (700, False)


def test_flags_and_variables_are_unique() -> None:
    flags = [flag for _, _, declared in DECLARED for flag in (declared.flag, *declared.aliases)]
    assert len(set(flags)) == len(flags)


def test_variables_that_are_no_options_are_found() -> None:
    environ = {"SLUICE_HTTP_PORT": "1", "SLUICE_HTTP_PROT": "2", "HOME": "/"}
    assert find_unknown_variables(environ) == ["SLUICE_HTTP_PROT"]


def test_the_log_as_tritonserver_s_flags_have_it() -> None:
    given = {"--log-verbose": "2", "--log-info": "false", "--log-format": "ISO8601", "--log-file": "/var/log/sluice"}
    logging = read_config(given, {}).logging
    assert (logging.lowest_level, logging.file) == ("debug", "/var/log/sluice")
    assert logging.settings() == {"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"}
    assert read_config({}, {}).logging.settings() == {}
