"""A loop of tool calls over HTTP and over WebSocket, of one gateway whose engine computes nothing, as where the whole
prompt but its end is in the prefix cache.

    python -m benchmarks.streaming.tool_loop [--calls 20] [--output-chars 4000] [--tokens 32] [--rate 1000000]

Nothing is stored. Over HTTP each turn sends the conversation in full, on one connection; over WebSocket it sends what
is new, and the response that this follows. The two take turns. Medians are printed, and the best of all rounds, which
tells more where the machine has other work.
"""

import argparse
import http.client
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import orjson
from websockets.sync.client import connect

from benchmarks.server import Server
from benchmarks.streaming.streams import gateway_alone
from sluice.gateway.checkpoint import find_checkpoint, model_name

PATH = "/v1/responses"
_WORDS = "the cache of blocks keeps what a prompt has in common with others; "
Item = dict[str, Any]
Send = Callable[[Item], Item]
"""Sends the fields of a turn, and returns its response."""


def _tool(number: int) -> Item:
    properties = {f"argument_{i}": {"type": "string", "description": _WORDS} for i in range(4)}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "name": f"tool_{number}", "description": _WORDS * 4, "parameters": parameters}


class Loop:
    """The turns of a loop: a question, and then what each call has returned."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._model = model_name(find_checkpoint(None))

    def turns(self) -> Iterator[list[Item]]:
        """Yield the new items of each turn."""
        yield [{"type": "message", "role": "user", "content": _WORDS}]
        text = (_WORDS * (self._options.output_chars // len(_WORDS) + 1))[: self._options.output_chars]
        for number in range(self._options.calls):
            call_id = f"call_{number}"
            arguments = orjson.dumps({"argument_0": f"file_{number}.py"}).decode()
            call = {"type": "function_call", "call_id": call_id, "name": "tool_1", "arguments": arguments}
            yield [call, {"type": "function_call_output", "call_id": call_id, "output": f"{number} {text}"}]

    def fields(self) -> Item:
        """Return what is equal in each turn."""
        options = self._options
        limits = {"max_output_tokens": options.tokens, "seed": options.rate}
        tools = [_tool(number) for number in range(options.tools)]
        return {"model": self._model, "instructions": _WORDS * 30, "tools": tools, "store": False, **limits}


def run_in_full(loop: Loop, send: Send) -> None:
    """Send the whole conversation in each turn."""
    fields, items = loop.fields(), []
    for new in loop.turns():
        items += new
        items += send({**fields, "input": items})["output"]


def run_in_parts(loop: Loop, send: Send) -> None:
    """Send what is new in each turn."""
    fields, previous = loop.fields(), None
    for new in loop.turns():
        previous = send({**fields, "input": new, "previous_response_id": previous})["id"]


@contextmanager
def over_http(server: Server) -> Iterator[Send]:
    """Send turns over a connection of HTTP."""
    address = urlsplit(server.url)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port)

    def send(fields: Item) -> Item:
        connection.request("POST", PATH, orjson.dumps({**fields, "stream": True}))
        answer = connection.getresponse()
        last: Item = {}
        for line in answer:
            if line.startswith(b"data: "):
                last = orjson.loads(line[6:])
        assert answer.status == 200 and last["type"] == "response.incomplete", last
        return dict(last["response"])

    yield send
    connection.close()


@contextmanager
def over_socket(server: Server) -> Iterator[Send]:
    """Send turns over a WebSocket."""
    with connect(f"ws{server.url.removeprefix('http')}{PATH}", compression=None, max_size=None) as socket:

        def send(fields: Item) -> Item:
            socket.send(orjson.dumps({"type": "response.create", **fields}), text=True)
            while True:
                event = orjson.loads(socket.recv())
                assert event["type"] != "error", event
                if event["type"] == "response.incomplete":
                    return dict(event["response"])

        yield send


KINDS = {"HTTP": (over_http, run_in_full), "WebSocket": (over_socket, run_in_parts)}


def _measure(server: Server, options: argparse.Namespace) -> None:
    loop = Loop(options)
    times: dict[str, list[float]] = defaultdict(list)
    cpu: dict[str, list[float]] = defaultdict(list)
    for number in range(options.rounds + 1):
        for kind, (open_, run) in KINDS.items():
            before, began = server.gateway_cpu_s(), perf_counter()
            with open_(server) as send:
                run(loop, send)
            if number:  # the first round is to warm up
                times[kind].append(perf_counter() - began)
                cpu[kind].append(server.gateway_cpu_s() - before)
    for kind in KINDS:
        latency, best, spent = statistics.median(times[kind]), min(times[kind]), statistics.median(cpu[kind])
        values = f"{latency * 1e3:8.1f} ms, best {best * 1e3:.1f} ms, {spent * 1e3:.1f} ms of the gateway's CPU"
        print(f"{kind:<9} {options.calls} calls {values}")
    for name, choose, found in (
        ("time", statistics.median, times),
        ("best", min, times),
        ("CPU", statistics.median, cpu),
    ):
        print(f"{name}: {choose(found['HTTP']) / choose(found['WebSocket']):.2f} times as fast")


def main() -> None:
    """Measure with the bundled model's tokenizer and chat template."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, default=1_000_000, help="tokens that the engine makes in a second")
    for name, default in (("calls", 20), ("output-chars", 4000), ("tokens", 32), ("tools", 8), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, gateway_alone(Path(folder) / "log") as server:
        _measure(server, options)


if __name__ == "__main__":
    main()
