from collections.abc import Callable

import pytest

from sluice.gateway.options.command_line import ACCEPTED_FLAGS, TRACE_FLAGS, check_accepted_flags, parse_flags
from sluice.gateway.options.config import GROUPS, ServeConfig, list_options, read_config
from sluice.gateway.options.option import OptionError
from tests.paths import DATA


def test_flags_without_a_meaning_here_are_taken_with_advice() -> None:
    flags = parse_flags(["--pinned-memory-pool-byte-size=268435456", "--http-thread-count", "8", "--allow-http=true"])
    assert [each.partition(":")[0] for each in check_accepted_flags(flags)] == [
        "--allow-http has no effect",
        "--http-thread-count has no effect",
        "--pinned-memory-pool-byte-size has no effect",
    ]
    assert read_config(flags, {}) == read_config({}, {})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--allow-sagemaker=1"], "--allow-sagemaker 1: there is no SageMaker endpoint"),
        (["--allow-vertex-ai", "true"], "--allow-vertex-ai true: there is no Vertex AI endpoint"),
        (["--allow-http=false"], "--allow-http false: HTTP has the health probes"),
        (["--allow-sagemaker=x"], "--allow-sagemaker must be 1, true, yes, on, 0, false, no or off, got 'x'"),
    ],
)
def test_what_asks_for_what_there_is_not_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_accepted_flags(parse_flags(arguments))
    assert str(caught.value).startswith(said)


def test_none_of_them_is_an_option_too() -> None:
    declared = {each.flag for group in GROUPS.values() for _, _, each in list_options(group)}
    assert not declared & {each.flag for each in ACCEPTED_FLAGS}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--strict-readiness=false"], False),
        (["--strict-readiness", "false"], False),
        (["--no-strict-readiness"], False),
        (["--strict-readiness", "--exit-on-error"], True),
        (["--strict-readiness=TRUE"], True),
    ],
)
def test_switches_take_a_value(arguments: list[str], expected: bool) -> None:
    assert read_config(parse_flags(arguments), {}).repository.is_strictly_ready is expected


def test_a_switch_leaves_a_model_alone() -> None:
    assert read_config(parse_flags(["--exit-on-error", "/models/x"]), {}).model.path == "/models/x"


def test_a_switch_that_is_neither_is_refused() -> None:
    with pytest.raises(OptionError, match="--exit-on-error must be 1, true"):
        read_config(parse_flags(["--exit-on-error=maybe"]), {})


@pytest.mark.parametrize(
    ("arguments", "read", "expected"),
    [
        (["--model-control-mode=EXPLICIT", "--model-repository=/r"], lambda c: c.repository.control_mode, "explicit"),
        (["--model-control-mode=Poll", "--model-repository=/r"], lambda c: c.repository.control_mode, "poll"),
        (["--rate-limit", "Execution_Count"], lambda c: c.instances.rate_limit, "execution_count"),
        (["--grpc-infer-response-compression-level=HIGH"], lambda c: c.grpc.compression_level, "high"),
        (["--log-format=iso8601"], lambda c: c.logging.time_format, "ISO8601"),
        (["--trace-config=level=timestamps"], lambda c: c.trace.levels, {"TIMESTAMPS"}),
    ],
)
def test_words_of_a_choice_are_taken_in_any_case(
    arguments: list[str], read: Callable[[ServeConfig], object], expected: object
) -> None:
    assert read(read_config(parse_flags(arguments), {})) == expected


@pytest.mark.parametrize(("text", "level"), [("true", 1), ("FALSE", 0), ("3", 3)])
def test_verbose_logging_takes_a_level_or_whether_there_is_any(text: str, level: int) -> None:
    assert read_config(parse_flags([f"--log-verbose={text}"]), {}).logging.verbose == level


def test_trace_flags_of_older_releases_are_settings_of_the_trace() -> None:
    old = ["--trace-file=f", "--trace-level", "MAX", "--trace-level=TENSORS", "--trace-rate=5", "--trace-count=-1"]
    trace = read_config(parse_flags([*old, "--trace-config=rate=9", "--trace-log-frequency=2"]), {}).trace
    assert (trace.file, trace.levels) == ("f", frozenset({"TIMESTAMPS", "TENSORS"}))
    assert (trace.rate, trace.count, trace.log_frequency) == (5, -1, 2)


@pytest.mark.parametrize(("argument", "expected"), [("", True), ("=true", True), ("=false", False)])
def test_the_strict_configuration_of_older_releases_completes_nothing(argument: str, expected: bool) -> None:
    config = read_config(parse_flags([f"--strict-model-config{argument}"]), {})
    assert config.repository.is_strict_config is expected


def test_every_flag_of_the_newest_triton_is_taken() -> None:
    declared = {
        name for group in GROUPS.values() for _, _, each in list_options(group) for name in (each.flag, *each.aliases)
    }
    known = declared | {each.flag for each in ACCEPTED_FLAGS} | TRACE_FLAGS.keys() | {"--strict-model-config"}
    assert set((DATA / "triton" / "flags.txt").read_text(encoding="utf-8").split()) <= known


def test_a_typing_error_is_refused_with_the_nearest_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_flags(["--allow-client-shn=true"])
    assert "did you mean --allow-client-shm?" in capsys.readouterr().err


def test_a_flag_may_be_shortened_to_where_no_other_begins_so() -> None:
    assert parse_flags(["--log-warn=false", "--strict-read", "false"]) == parse_flags(
        ["--log-warning=false", "--strict-readiness=false"]
    )


@pytest.mark.parametrize("flag", ["--grpc", "--model-c", "--"])
def test_a_flag_that_several_begin_with_is_not_guessed(flag: str) -> None:
    with pytest.raises(SystemExit):
        parse_flags([f"{flag}=1", "one", "two"])
