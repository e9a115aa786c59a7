import pytest

from sluice.load.config import LoadConfigError, RequestPace, Slo, TokenRange


@pytest.mark.parametrize(("text", "low", "high"), [("128", 128, 128), ("32..256", 32, 256), ("1..1", 1, 1)])
def test_token_range_reads_what_it_writes(text: str, low: int, high: int) -> None:
    assert TokenRange.parse(text) == TokenRange(low, high)
    assert TokenRange.parse(str(TokenRange(low, high))) == TokenRange(low, high)


@pytest.mark.parametrize("text", ["", "0", "9..3", "a..b", "1..", "1.5", "-4"])
def test_token_range_refuses(text: str) -> None:
    with pytest.raises(LoadConfigError):
        TokenRange.parse(text)


def test_slo_names_its_targets() -> None:
    assert Slo.parse("ttft=200, itl=50.5") == Slo(ttft_ms=200.0, itl_ms=50.5)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=fast", "speed=3"])
def test_slo_refuses(text: str) -> None:
    with pytest.raises(LoadConfigError):
        Slo.parse(text)


def test_a_run_needs_a_pace_and_an_end() -> None:
    with pytest.raises(LoadConfigError, match="request_rate"):
        RequestPace(num_requests=1)
    with pytest.raises(LoadConfigError, match="duration_s"):
        RequestPace(concurrency=1)
