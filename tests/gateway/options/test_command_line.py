import pytest

from gateway.options.command_line import ACCEPTED_FLAGS, check_accepted_flags, parse_flags
from gateway.options.config import GROUPS, list_options, read_config
from gateway.options.option import OptionError


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
        (["--strict-model-config"], "--strict-model-config true: that was replaced by --disable-auto-complete-config"),
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
