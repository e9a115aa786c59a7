import pytest

from gateway.http.scheduling import scheduling_of
from gateway.options.config import RequestOptions
from sluice.errors import ErrorCode, SluiceError

NOTHING = RequestOptions()


def test_without_headers_the_body_and_the_server_s_defaults_hold() -> None:
    scheduling = scheduling_of({}, RequestOptions(timeout_s=5.0, queue_timeout_s=2.0))
    assert scheduling.fields(None) == {"tenant": "", "priority": 0, "timeout_s": 5.0, "queue_timeout_s": 2.0}
    assert scheduling.fields(7, 1.5) == {"tenant": "", "priority": 7, "timeout_s": 1.5, "queue_timeout_s": 2.0}


def test_headers_win() -> None:
    headers = {
        "x-sluice-tenant": "ada & sons",
        "x-sluice-priority": "-3",
        "x-sluice-timeout-ms": "1500",
        "x-sluice-queue-timeout-ms": "250",
    }
    scheduling = scheduling_of(headers, RequestOptions(timeout_s=5.0, queue_timeout_s=2.0))
    expected = {"tenant": "ada & sons", "priority": -3, "timeout_s": 1.5, "queue_timeout_s": 0.25}
    assert scheduling.fields(7, 9.0) == expected


def test_a_priority_of_0_in_a_header_is_one() -> None:
    assert scheduling_of({"x-sluice-priority": "0"}, NOTHING).fields(7)["priority"] == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-sluice-tenant", "a" * 129),
        ("x-sluice-tenant", "a\x7f"),
        ("x-sluice-priority", "high"),
        ("x-sluice-priority", "1.5"),
        ("x-sluice-priority", "2147483648"),
        ("x-sluice-timeout-ms", "0"),
        ("x-sluice-timeout-ms", "-1"),
        ("x-sluice-timeout-ms", "1s"),
        ("x-sluice-queue-timeout-ms", "99999999999"),
    ],
)
def test_refuses_and_names_the_header(name: str, value: str) -> None:
    with pytest.raises(SluiceError) as caught:
        scheduling_of({name: value}, NOTHING)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, name)
    assert name in caught.value.message
