"""Measures what traces and timelines cost the gateway: microseconds a token, on its event loop and in its threads.

    python -m benchmarks.tracing [--requests 2000] [--tokens 128] [--repeats 7]

A request is what the gateway does for one streamed chat, without HTTP, tokenizer and engine: the guard of the protocol,
the record of the metrics, a detokenizer and a frame of events for each token. With traces, spans are converted and
encoded by OpenTelemetry's SDK, and thrown away in place of being sent. Processor time of the whole process, in turns.
"""

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from time import process_time

import uvloop
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from starlette.types import Message, Receive, Scope, Send

from sluice.engine.client.stream import GenerationStream
from sluice.engine.types import EventDetail, FinishReason, GenerateRequest, SamplingParams, SequenceTiming, TokenEvent
from sluice.gateway.calls import CallLog
from sluice.gateway.front.http.guard import Guard, GuardMiddleware, RequestTracing
from sluice.gateway.telemetry.metrics import GatewayMetrics
from sluice.gateway.telemetry.tracer import Tracer
from sluice.pipelines.text.stream import timed_feed
from sluice.pipelines.text.types import TextEvent
from sluice.record.otel import ExportSettings, TraceExport, make_resource
from sluice.record.spans import TimelineRing, current_span, span

KINDS = ("off", "timelines", "timelines and traces, 1 % of them kept", "timelines and all traces")
REQUEST = GenerateRequest(request_id="r", prompt_token_ids=[1] * 100, sampling=SamplingParams())
TIMING = SequenceTiming(0.01, 0.002, [(0.002, 0.01, 100)])


class Encoder(SpanExporter):
    """Encodes spans as they would be sent."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        encode_spans(spans).SerializeToString()
        return SpanExportResult.SUCCESS


def make_tracer(kind: str) -> Tracer:
    """Return the tracer of a server of that kind."""
    if kind == "off":
        return Tracer()
    settings = ExportSettings(max_queue_spans=1_000_000)
    sink = TraceExport(Encoder(), make_resource(), settings) if "traces" in kind else None
    return Tracer(TimelineRing(256), sink, 0.01 if "1 %" in kind else 1.0)


class Application:
    """Answers with so many tokens."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._metrics = GatewayMetrics()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        record = self._metrics.open_request("model", "openai_chat")
        with span("tokenize"):
            pass
        stream = GenerationStream(1, REQUEST, lambda number: None)
        feed = timed_feed(_feed)
        for number in range(1, self._num_tokens + 1):
            reason = FinishReason.LENGTH if number == self._num_tokens else None
            timing = TIMING if number == 1 and current_span.get() is not None else None
            detail = EventDetail(num_cached_tokens=0, timing=timing) if number == 1 else None
            stream.push(TokenEvent(1, [5], reason, detail))
            text = feed(await anext(stream))
            assert text is not None
            record.observe(text)
        record.close()
        await send({"type": "http.response.start", "status": 200, "headers": []})


def _feed(event: TokenEvent) -> TextEvent:
    return TextEvent("x", 1, 100, 1, event.finish_reason)


async def measure(kind: str, num_requests: int, num_tokens: int) -> float:
    """Return the microseconds of a token."""
    tracer, own = make_tracer(kind), Application(num_tokens)
    tracing = RequestTracing(tracer, lambda name: ()) if tracer.is_active else None
    guard = Guard(CallLog(), lambda path, status: None, lambda path: "openai", tracing=tracing)
    app = own if tracing is None else GuardMiddleware(own, guard)
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "client": ("10.0.0.1", 5), "headers": []}

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Message) -> None: ...

    began = process_time()
    for number in range(num_requests):
        await app({**scope, "state": {"request_id": f"r{number}"}}, receive, send)
    await tracer.close()
    return (process_time() - began) * 1e6 / (num_requests * num_tokens)


async def run(options: argparse.Namespace) -> None:
    """Measure all kinds in turns, and print the medians."""
    samples: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(options.repeats):
        for kind, values in samples.items():
            values.append(await measure(kind, options.requests, options.tokens))
    base = statistics.median(samples[KINDS[0]])
    for kind, values in samples.items():
        median, spread = statistics.median(values), f"({min(values):.2f} to {max(values):.2f})"
        print(f"{kind:<40} {median:6.2f} us a token  {median - base:+6.2f}  {spread}")


def main() -> None:
    """Measure on the event loop that the gateway has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
