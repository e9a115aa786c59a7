"""Addresses as they are written, and those of this machine."""

import pytest

from sluice.addresses import host_and_port, is_loopback


@pytest.mark.parametrize(
    ("host", "written"),
    [("127.0.0.1", "127.0.0.1:8001"), ("localhost", "localhost:8001"), ("::", "[::]:8001"), ("[::1]", "[::1]:8001")],
)
def test_an_address_of_ipv6_is_in_brackets(host: str, written: str) -> None:
    assert host_and_port(host, 8001) == written


OWN = {
    *(
        "http://127.0.0.1:8000",
        "http://127.8.8.8",
        "https://localhost:8000/v1",
        "http://LOCALHOST",
        "http://a.localhost",
    ),
    *("http://[::1]:8000", "http://0.0.0.0:8000", "127.0.0.1:8001", "[::1]:8001", "localhost:8001"),
}
OTHERS = {"http://10.0.0.1", "http://llm.example.com", "http://localhost.example.com", "a:1", ""}


@pytest.mark.parametrize("url", sorted(OWN | OTHERS))
def test_which_addresses_are_of_this_machine(url: str) -> None:
    assert is_loopback(url) is (url in OWN)
