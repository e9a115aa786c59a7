"""The metrics of OpenTelemetry's GenAI conventions, from the gateway's tallies."""

from collections.abc import Iterable, Iterator, Mapping
from operator import sub
from typing import NamedTuple

from sluice.gateway.telemetry.tallies import RequestTally
from sluice.record.histogram import Histogram

Tallies = Mapping[tuple[str, str], RequestTally]
"""Tallies by model and protocol."""
Attributes = dict[str, str]
_PROVIDER = "sluice"
_CHATS = ("openai_chat", "anthropic_messages", "ollama_chat", "rag")
"""Protocols whose operation is a chat; that of others is the completion of a text."""


class GenAiFamily(NamedTuple):
    """A histogram of the conventions, with its series."""

    name: str
    text: str
    unit: str
    series: list[tuple[Attributes, Histogram]]


def genai_families(tallies: Tallies) -> Iterator[GenAiFamily]:
    """Yield the histograms of what the gateway has counted; their buckets are those of `sluice_*`."""
    found = {_attributes(*key): tally for key, tally in tallies.items()}
    yield GenAiFamily(
        "gen_ai.server.request.duration",
        "Generative AI server request duration such as time-to-last byte or last output token.",
        "s",
        [series for key, tally in found.items() for series in _durations(dict(key), tally)],
    )
    yield GenAiFamily(
        "gen_ai.server.time_to_first_token",
        "Time to generate first token for successful responses.",
        "s",
        [(dict(key), tally.time_to_first_token) for key, tally in found.items()],
    )
    yield GenAiFamily(
        "gen_ai.server.time_per_output_token",
        "Time per output token generated after the first token for successful responses.",
        "s",
        [(dict(key), tally.time_per_output_token) for key, tally in found.items()],
    )
    yield GenAiFamily(
        "gen_ai.client.token.usage",
        "Number of input and output tokens used.",
        "{token}",
        [series for key, tally in found.items() for series in _usage(dict(key), tally)],
    )


def _attributes(model: str, protocol: str) -> tuple[tuple[str, str], ...]:
    operation = "chat" if protocol in _CHATS else "text_completion"
    return (
        ("gen_ai.operation.name", operation),
        ("gen_ai.provider.name", _PROVIDER),
        ("gen_ai.request.model", model),
        ("gen_ai.response.model", model),
        ("sluice.protocol", protocol),
    )


def _durations(attributes: Attributes, tally: RequestTally) -> Iterable[tuple[Attributes, Histogram]]:
    """Yield the durations of requests that succeeded, and by error those of requests that did not."""
    succeeded = tally.request_duration.merged(())
    for failed in tally.failed_durations.values():
        succeeded.counts = list(map(sub, succeeded.counts, failed.counts))
        succeeded.total -= failed.total
    yield attributes, succeeded
    for outcome, failed in tally.failed_durations.items():
        yield {**attributes, "error.type": outcome}, failed


def _usage(attributes: Attributes, tally: RequestTally) -> Iterable[tuple[Attributes, Histogram]]:
    yield {**attributes, "gen_ai.token.type": "input"}, tally.prompt_length
    yield {**attributes, "gen_ai.token.type": "output"}, tally.output_length
