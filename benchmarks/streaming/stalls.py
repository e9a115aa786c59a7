"""This benchmark measures what one long request does to the streams of others in the gateway: their longest gap. The
engine computes nothing, so that a gap is the gateway's own."""

import http.client
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.figures import BenchmarkError, Figure, ReportProgress, Target
from benchmarks.streaming.client import Client, chat_request, finish
from benchmarks.streaming.streams import cores, gateway_alone
from sluice.gateway.checkpoint import find_checkpoint, model_name

STREAMS, TOKENS, OFFERED = 8, 4000, 4000
"""The others' streams: a token each 2 ms, for eight seconds."""
COPIES, PAUSE_S, SETTLE_S = 5, 0.2, 0.5
TARGET = Target(20.0)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def _chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


LONG: Mapping[str, tuple[str, dict[str, Any], int]] = {
    "none": (CHAT, _chat("Hello"), 200),
    "prompt of 60,000 tokens, as ids": (COMPLETIONS, {"prompt": [300, 301] * 30_000}, 200),
    "prompt of 60,000 tokens, as text": (COMPLETIONS, {"prompt": "~ " * 30_000}, 200),
    "prompt of 60,000 tokens, as a chat": (CHAT, _chat("~ " * 29_900), 200),
    "body of 20 MB, a message": (CHAT, _chat("lorem ipsum " * (20_000_000 // 12)), 400),
    "body of 20 MB, a field that is not known": (CHAT, _chat("Hello", unknown=["lorem ipsum"] * 1_400_000), 400),
    "body of 20 MB, messages": (CHAT, {"messages": [{"role": "user", "content": "lorem"}] * 540_000}, 400),
}
"""Requests by name: path, body, and the status of the answer."""


def measure(num_repeats: int, folder: Path, only: str, report: ReportProgress) -> list[Figure]:
    """Send each request whose name has `only` in it, several times, beside the others' streams."""
    client = Client.build(folder, cores()[1])
    model = model_name(find_checkpoint(None))
    others = chat_request(model, TOKENS, seed=OFFERED)
    figures = []
    with gateway_alone(folder / "stalls.log") as server:
        port = urlsplit(server.url).port
        assert port is not None
        for name, (path, body, status) in LONG.items():
            if only not in name:
                continue
            content = json.dumps({"model": model, "max_tokens": 2, "seed": OFFERED, **body}).encode()
            samples = []
            for _ in range(num_repeats):
                streams = client.start(port, others, streams=STREAMS, requests=STREAMS, tokens=TOKENS)
                time.sleep(SETTLE_S)
                for _ in range(COPIES):
                    _send(port, path, content, status)
                    time.sleep(PAUSE_S)
                if streams.poll() is not None:
                    raise BenchmarkError(f"{name}: the other streams had ended before {COPIES} requests were answered")
                samples.append(finish(streams).gap_max / 1e3)
            report(f"{name}: " + " ".join(f"{sample:.1f}" for sample in samples) + " ms")
            figures.append(Figure("longest gap of other streams", name, "ms", tuple(samples), TARGET))
    return figures


def _send(port: int, path: str, content: bytes, status: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", path, content, {"content-type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    if response.status != status:
        raise BenchmarkError(f"{path} was answered by {response.status}, not {status}: {answer[:300]!r}")
