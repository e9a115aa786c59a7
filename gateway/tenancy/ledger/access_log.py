"""The access log: one line for each request of a client, as text or as JSON."""

import json
import re
from datetime import UTC, datetime
from typing import Any

import orjson

from sluice.gateway.calls import Call, CallObserver
from sluice.gateway.tenancy.ledger.lines import LineWriter, Sink

_PLAIN = re.compile(r"[!#-\[\]-~]+")


class AccessLog(LineWriter[Call], CallObserver):
    """Writes a line for each call that ends, those that were refused too."""

    def __init__(self, sink: Sink, *, is_json: bool) -> None:
        super().__init__("access", sink, _format_json if is_json else _format_text)

    def end(self, call: Call) -> None:
        """Have the line of a call written soon."""
        self.put(call)


def describe_call(call: Call) -> dict[str, Any]:
    """Return what an ended call was and used, without anything that was said."""
    started = call.started
    fields = {
        "time": datetime.fromtimestamp(call.arrived_at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "source": call.source,
        "key": "" if call.identity is None else call.identity.name,
        "tenant": call.tenant,
        "protocol": call.protocol,
        "operation": call.operation,
        "status": call.status,
        "bytes_in": call.bytes_in,
        "bytes_out": call.bytes_out,
        "duration_s": round(call.ended - started, 6),
        "request_id": call.request_id,
    }
    if call.model:
        fields |= {
            "ttft_s": round(call.first_token - started, 6) if call.first_token else None,
            "model": call.model,
            "adapter": call.adapter,
            "prompt_tokens": call.prompt_tokens,
            "cached_tokens": call.cached_tokens,
            "generated_tokens": call.generated_tokens,
            "finish": call.finish,
        }
    if call.route:
        fields["route"] = call.route
    return fields


def _format_json(call: Call) -> str:
    fields = describe_call(call)
    line = orjson.dumps(fields).decode()
    return line if line.isascii() else json.dumps(fields)  # terminals obey some characters beyond ASCII


def _format_text(call: Call) -> str:
    """Return nginx' first words in its order, then what it has no word for as NAME=VALUE."""
    fields = describe_call(call)
    status = "-" if call.status is None else call.status
    asked = orjson.dumps(f"{call.protocol} {call.operation}").decode()
    line = f"{call.source or '-'} {_word(fields['key'])} [{fields['time']}] {_escaped(asked)} {status}"
    line += f" {call.bytes_in} {call.bytes_out} {fields['duration_s']:.6f} id={_word(call.request_id)}"
    if not call.model:
        return line
    ttft = "-" if fields["ttft_s"] is None else f"{fields['ttft_s']:.6f}"
    named = {"model": call.model, "adapter": call.adapter, "finish": call.finish}
    if call.route:
        named["route"] = call.route
    counts = f"prompt={call.prompt_tokens} cached={call.cached_tokens} generated={call.generated_tokens}"
    return f"{line} ttft={ttft} {counts} {' '.join(f'{name}={_word(text)}' for name, text in named.items())}"


def _word(text: str) -> str:
    """Return a text as one word: clients choose some of them, and must not write lines of their own."""
    if not text:
        return "-"
    return text if _PLAIN.fullmatch(text) else _escaped(orjson.dumps(text).decode())


def _escaped(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()
