"""Exchanges recorded from the real tritonserver: one JSON object a line.

`http`: `request` holds method, path, headers, `body_b64` or `body_gen`; `response` status, reason, headers, `body_b64`
and, where the server sent chunks, `chunks_b64`. `grpc`: protobuf JSON and the status. `local`: a step on this machine
between two exchanges (shared memory made or read, a pause).
"""

import json
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question and, unless it is still to be asked, the real server's answer."""

    name: str
    protocol: str
    request: Any
    rpc: str = ""
    metadata: tuple[tuple[str, str], ...] = ()
    status_only: bool = False
    response: Json | None = None

    @classmethod
    def from_json(cls, record: Json) -> Self:
        return cls(
            name=record["name"],
            protocol=record["protocol"],
            request=record["request"],
            rpc=record.get("rpc", ""),
            metadata=tuple((key, value) for key, value in record.get("metadata", ())),
            status_only=record.get("cmp") == "status_only",
            response=record.get("response"),
        )

    def to_json(self) -> Json:
        optional = {"rpc": self.rpc, "metadata": [list(pair) for pair in self.metadata]}
        record = {"name": self.name, "protocol": self.protocol} | {
            key: value for key, value in optional.items() if value
        }
        if self.status_only:
            record["cmp"] = "status_only"
        return record | {"request": self.request, "response": self.response}


def read_exchanges(path: Path) -> Iterator[Exchange]:
    with path.open() as lines:
        for line in lines:
            yield Exchange.from_json(json.loads(line))


def http_body(request: Json) -> bytes:
    """The body to send: recorded whole, or generated as prefix, `count` times fill, suffix."""
    if "body_gen" not in request:
        return b64decode(request.get("body_b64", ""))
    generated = request["body_gen"]
    prefix, fill, suffix = (b64decode(generated[f"{part}_b64"]) for part in ("prefix", "fill", "suffix"))
    return prefix + fill * int(generated["count"]) + suffix
