"""Compares what the gateways' ledgers and counters say with what the clients got."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from sluice.load.chaos.fleet import ENCODER, Fleet, Gateway
from sluice.load.chaos.traffic import Completion

FLUSH_S = 2.5
"""A row is written within a second; a kill costs those of the last one. The machine may be slow."""
_MAX_NAMED = 5
_GENERATED, _PROMPT = "generated_tokens", "prompt_tokens"


@dataclass(slots=True)
class Ledger:
    """The rows of one gateway's ledger: how many there are, and what each request id has."""

    num_rows: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    """Sums of the columns of tokens, of language models."""
    generated: dict[str, int] = field(default_factory=dict)
    """Generated tokens, by request id."""
    twice: list[str] = field(default_factory=list)


async def read_ledger(fleet: Fleet, gateway: Gateway) -> Ledger:
    """Read all rows of a gateway's ledger, through its API."""
    ledger = Ledger()
    async with fleet.client.stream("GET", f"{gateway.url}/v1/usage/requests") as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            row = json.loads(line)
            ledger.num_rows += 1
            if row["model"] != ENCODER:  # whose tokens are in no counter
                ledger.tokens.update({name: row[name] for name in (_GENERATED, _PROMPT)})
            if row["request_id"] in ledger.generated:
                ledger.twice.append(row["request_id"])
            ledger.generated[row["request_id"]] = row[_GENERATED]
    return ledger


def compare_completions(gateway: Gateway, ledger: Ledger, completions: Mapping[str, Completion]) -> list[str]:
    """Return the differences between the ledger and the clients' answers. Pure.

    Rows may be missing that a kill of the gateway's processes took before they were written.
    """
    own = {key: each for key, each in completions.items() if each.gateway == gateway.name}
    missing = [k for k, each in own.items() if k not in ledger.generated and not _may_be_missing(gateway, each)]
    other = [
        f"{key} has {ledger.generated[key]} tokens in place of {each.output_tokens}"
        for key, each in own.items()
        if each.output_tokens is not None and ledger.generated.get(key, each.output_tokens) != each.output_tokens
    ]
    findings = {"answered requests without a row": missing, "rows of other tokens than were answered": other}
    findings["requests with two rows"] = ledger.twice
    return [
        f"ledger of {gateway.name}: {len(found)} {what}, such as {', '.join(found[:_MAX_NAMED])}"
        for what, found in findings.items()
        if found
    ]


def count_excused(gateway: Gateway, ledger: Ledger, completions: Mapping[str, Completion]) -> int:
    """Count the answered requests whose row a kill took."""
    own = (key for key, each in completions.items() if each.gateway == gateway.name)
    return sum(key not in ledger.generated for key in own)


def _may_be_missing(gateway: Gateway, completion: Completion) -> bool:
    """Whether a kill came after this completion and before its row was written."""
    return any(
        completion.ended_at - FLUSH_S <= cut.begun_at <= _written_by(gateway, completion.ended_at)
        or cut.touches(completion.ended_at, completion.ended_at)
        for cut in gateway.cuts
    )


def _written_by(gateway: Gateway, ended_at: float) -> float:
    """Return when the row of a request that ended then was written at the latest, outages of the ledger included."""
    written_at = ended_at + FLUSH_S
    for outage in sorted(gateway.outages, key=lambda each: each.begun_at):
        if outage.touches(written_at - FLUSH_S, written_at):
            written_at = max(written_at, (outage.ended_at or written_at) + 2 * FLUSH_S)
    return written_at


def tokens_of_counters(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the sums of prompt and generated tokens that a gateway's counters have. Pure."""
    kinds = {_PROMPT: 'kind="prompt"', _GENERATED: 'kind="generation"'}
    return {
        name: sum(value for key, value in metrics.items() if key.startswith("sluice_tokens_total{") and kind in key)
        for name, kind in kinds.items()
    }
