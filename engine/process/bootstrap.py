"""The bootstrap of every engine process: arguments, signals, and the socket to its clients."""

import gc
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.process.process_group import end_with
from engine.process.transport import Transport
from sluice.log_lines import JSON, JsonFormatter, TextFormatter
from sluice.log_repeats import LimitedHandler

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s [engine] %(message)s"

_COLLECTED_OBJECTS = 50_000
"""A collection of as many new objects takes about a millisecond."""


@contextmanager
def bootstrap(argv: list[str]) -> Iterator[tuple[EngineConfig, Transport]]:
    """Yield the configuration and the transport for ENDPOINT PARENT_PID LOG_LEVEL CONFIG_FILE, with a client connected.
    `/json` after the level asks for lines of JSON. The configuration is in a file, which is removed, because every user
    of the machine can read a command line. The process never outlives the gateway, because an orphaned engine would
    keep its memory and cores for no use."""
    endpoint, parent, log_level, config_file = argv
    level, _, log_format = log_level.partition("/")
    logging.basicConfig(level=level, handlers=[LimitedHandler()])
    logging.root.handlers[0].setFormatter(JsonFormatter("engine") if log_format == JSON else TextFormatter(_LOG_FORMAT))
    # Only the gateway ends the engine.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with(int(parent), lambda: _remove_socket(Path(endpoint.removeprefix("ipc://"))))
    config = msgspec.json.decode(Path(config_file).read_bytes(), type=EngineConfig)
    Path(config_file).unlink()
    transport = Transport(endpoint)
    try:
        transport.await_launcher()
        yield config, transport
    finally:
        transport.close()


def collect_rarely() -> None:
    """Collect garbage when the number of objects has grown by many, not by those of a step. The executor's own objects
    are in no cycles; with a thousand sequences, Python's default of 700 makes collections in each step."""
    gc.set_threshold(_COLLECTED_OBJECTS)


def freeze_heap() -> None:
    """Leave the objects of the start out of garbage collections: a full one over vLLM's 600,000 stops the event loop,
    and with it every stream, for 0.3 seconds."""
    gc.collect()
    gc.freeze()


def _remove_socket(socket_file: Path) -> None:
    """Remove the socket and its folder, as the gateway would have done."""
    with suppress(OSError):
        socket_file.unlink(missing_ok=True)
        socket_file.parent.rmdir()
