"""The bootstrap of every engine process: arguments, signals, and the socket to its clients."""

import gc
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from sluice.engine.config import EngineConfig
from sluice.engine.process.process_group import end_with
from sluice.engine.process.transport import Transport
from sluice.log_lines import JsonFormatter, TextFormatter
from sluice.log_relay import LogRelay, ProcessLog
from sluice.log_repeats import LimitedHandler
from sluice.run_folder import remove_left_over

log = logging.getLogger(__name__)

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s"

_COLLECTED_OBJECTS = 50_000
"""A collection of as many new objects takes about a millisecond."""


@contextmanager
def bootstrap(argv: list[str]) -> Iterator[tuple[EngineConfig, Transport]]:
    """Yield the configuration and the transport for ENDPOINT PARENT_PID LOG CONFIG_FILE, with a client connected. LOG
    is a `ProcessLog`. The configuration is in a file, which is removed, because every user of the machine can read a
    command line. The process never outlives the gateway, because an orphaned engine would keep its memory and cores for
    no use."""
    endpoint, parent, process_log, config_file = argv
    configure_logging(ProcessLog.from_argument(process_log))
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


def configure_logging(process_log: ProcessLog) -> None:
    """Log to standard error, and to the process that collects lines where there is one."""
    handler = LimitedHandler()
    handler.setFormatter(JsonFormatter() if process_log.is_json else TextFormatter(_LOG_FORMAT))
    handler.addFilter(_name_request)
    logging.basicConfig(level=process_log.level, handlers=[handler])
    if process_log.socket_name:
        try:
            logging.root.addHandler(LogRelay(process_log.socket_name, f"engine-{os.getpid()}"))
        except OSError as error:
            log.warning("the lines of this engine are not shown by the gateway, whose socket refuses them: %s", error)


def _name_request(record: logging.LogRecord) -> bool:
    record.request_id = getattr(record, "own_request_id", None) or "engine"
    return True


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
    """Remove the socket and its folder, as the gateway would have done, and all that it has left beside them."""
    with suppress(OSError):
        socket_file.unlink(missing_ok=True)
        socket_file.parent.rmdir()
    remove_left_over(socket_file.parent.parent.parent)
