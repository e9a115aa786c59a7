"""`python -m sluice.gateway.workers LINK LISTENER`: a worker, which the host starts with these two descriptors."""

import asyncio
import gc
import pickle
import signal
import socket
import sys

import msgspec
import uvloop

from sluice.gateway.options.config import ServeConfig
from sluice.gateway.process_settings import raise_file_limit
from sluice.gateway.telemetry.logs import configure_logging, current_request_id
from sluice.gateway.workers.messages import ToWorker, Welcome
from sluice.gateway.workers.wire import Wire
from sluice.gateway.workers.worker import Worker
from sluice.log_lines import JSON
from sluice.log_relay import LogRelay


async def _run(link_socket: socket.socket, listener: socket.socket) -> None:
    decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
    loop = asyncio.get_running_loop()
    _, link = await loop.create_connection(lambda: Wire[ToWorker](decoder), sock=link_socket)
    welcome = await link.read()
    if not isinstance(welcome, Welcome):
        return  # the host has ended
    config: ServeConfig = pickle.loads(welcome.config)
    name = f"worker-{welcome.number}"
    current_request_id.set(name)  # in all lines that are about no request
    relay = LogRelay(welcome.log_socket, name, current_request_id.get) if welcome.log_socket else None
    configure_logging(config.logging.lowest_level, is_json=config.logging.time_format == JSON, relay=relay)
    await Worker(link, welcome.number, config, welcome.socket).run(listener)


def main() -> None:
    """Serve until the host says otherwise: signals of a terminal are the host's."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raise_file_limit()
    link, listener = (socket.socket(fileno=int(each)) for each in sys.argv[1:3])
    listener.setblocking(False)
    link.setblocking(False)
    gc.enable()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(link, listener))


if __name__ == "__main__":
    main()
