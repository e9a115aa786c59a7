import pytest

from sluice.addresses import host_and_port


@pytest.mark.parametrize(
    ("host", "written"),
    [("127.0.0.1", "127.0.0.1:8001"), ("localhost", "localhost:8001"), ("::", "[::]:8001"), ("[::1]", "[::1]:8001")],
)
def test_an_address_of_ipv6_is_in_brackets(host: str, written: str) -> None:
    assert host_and_port(host, 8001) == written
