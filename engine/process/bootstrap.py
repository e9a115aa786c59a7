"""What every engine process begins and ends with."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.process.process_group import end_with
from engine.process.transport import Transport


@contextmanager
def bootstrap(argv: list[str]) -> Iterator[tuple[EngineConfig, Transport]]:
    """The configuration and the socket of ENDPOINT PARENT_PID LOG_LEVEL CONFIG_FILE, with the first client there.

    The configuration is in a file, which is removed, since every user of the machine can read a command line.

    The process never outlives the gateway: an engine without one would keep its memory and its cores for nobody.
    """
    endpoint, parent, log_level, config_file = argv
    logging.basicConfig(level=log_level, format="%(asctime)s %(levelname)s %(name)s [engine] %(message)s")
    # The gateway decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with(int(parent), lambda: _remove(Path(endpoint.removeprefix("ipc://"))))
    config = msgspec.json.decode(Path(config_file).read_bytes(), type=EngineConfig)
    Path(config_file).unlink()
    transport = Transport(endpoint)
    try:
        transport.await_client()
        yield config, transport
    finally:
        transport.close()


def _remove(socket_file: Path) -> None:
    """The socket and its folder, which the gateway would have removed."""
    with suppress(OSError):
        socket_file.unlink(missing_ok=True)
        socket_file.parent.rmdir()
