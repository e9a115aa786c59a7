import socket

import pytest

from sluice.gateway.front.listeners import ListenError, is_loopback, listen, listener_url


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "http://127.0.0.1:"), ("::1", "http://[::1]:")])
def test_listens_and_says_where(host: str, shown: str) -> None:
    with listen(host, 0, "--http-port") as listener:
        assert listener_url(listener) == f"{shown}{listener.getsockname()[1]}"
        assert is_loopback(listener)
        socket.create_connection(listener.getsockname()[:2], 5).close()


def test_all_addresses_are_wider_than_loopback() -> None:
    with listen("0.0.0.0", 0, "--http-port") as listener:
        assert not is_loopback(listener)


def test_a_taken_port_is_named_with_the_way_out() -> None:
    with listen("127.0.0.1", 0, "--http-port") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ListenError) as caught:
            listen("127.0.0.1", port, "--http-port")
    said = f"port {port} on 127.0.0.1 is taken; choose another with --http-port (0 takes a free one)"
    assert str(caught.value) == said


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_an_address_of_another_machine(host: str) -> None:
    with pytest.raises(ListenError, match=host):
        listen(host, 0, "--http-port")
