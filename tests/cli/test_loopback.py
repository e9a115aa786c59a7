"""Which URLs are of this machine."""

import pytest

from sluice.cli.loopback import is_loopback

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
