"""Generates docs/openai-compatibility.md: for every field of the peers' APIs, what Sluice does with it.

The peers' fields are in tests/data/api_fields.json: of OpenAI and Anthropic those of their Python packages' types
(openai 3.54, anthropic 2.12), of vLLM those of its request classes (0.33). What Sluice does comes from the schemas of
its routes and from `sluice.gateway.front.http.parsing.NEUTRAL_VALUES`.
"""

import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple

from pydantic import BaseModel

from sluice.gateway.api.anthropic.schemas import CountTokensRequest, MessagesRequest
from sluice.gateway.api.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest
from sluice.gateway.api.openai.encoders import EmbeddingRequest
from sluice.gateway.api.openai.responses.schemas import CreateResponseRequest
from sluice.gateway.api.openai.schemas import ChatCompletionRequest, CompletionRequest
from sluice.gateway.api.openai.vllm import (
    DetokenizeRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from sluice.gateway.front.http.parsing import NEUTRAL_VALUES
from tests.paths import DATA
from tests.tools.markdown import code, codes, plain, table

PEERS: Mapping[str, Mapping[str, list[str]]] = json.loads((DATA / "api_fields.json").read_text())
"""Fields by route and by whose they are."""
SCHEMAS: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": CreateResponseRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/load_lora_adapter": LoadAdapterRequest,
    "/v1/unload_lora_adapter": UnloadAdapterRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
}


class Treatment(StrEnum):
    """What becomes of a field."""

    OBEYED = "obeyed"
    ACCEPTED = "accepted"
    IGNORED = "ignored"
    REFUSED = "refused"


class FieldRow(NamedTuple):
    """One field of a route. `owners` are the APIs that have it; it is Sluice's own where none does."""

    route: str
    name: str
    owners: tuple[str, ...]
    treatment: Treatment
    note: str


def rows() -> Iterator[FieldRow]:
    """Yield every field of every route: those of the peers, and our own."""
    for route, schema in SCHEMAS.items():
        peers = PEERS[route]
        declared = {field.alias or name: field for name, field in schema.model_fields.items()}
        for name in sorted({*declared, *(each for fields in peers.values() for each in fields)}):
            owners = tuple(owner for owner, fields in peers.items() if name in fields)
            if name in declared:
                yield FieldRow(route, name, owners, *_declared(declared[name].description or ""))
            elif name in NEUTRAL_VALUES:
                yield FieldRow(route, name, owners, Treatment.REFUSED, _neutral(name))
            else:
                yield FieldRow(route, name, owners, Treatment.IGNORED, "")


def _declared(description: str) -> tuple[Treatment, str]:
    if description.startswith("Accepted"):
        note = description.removeprefix("Accepted and not used").removeprefix("Accepted").lstrip(".: ")
        return Treatment.ACCEPTED, note
    if description.startswith("Refused"):
        return Treatment.REFUSED, description.removeprefix("Refused").lstrip(".,: ")
    return Treatment.OBEYED, description


def _neutral(name: str) -> str:
    """Return the values that are accepted because they change nothing."""
    values = codes(json.dumps(value) for value in NEUTRAL_VALUES[name])
    return f"except {values}" if values else ""


def _table(route: str) -> str:
    cells = (
        [code(row.name), ", ".join(row.owners) or "Sluice", row.treatment.value, plain(row.note)]
        for row in rows()
        if row.route == route
    )
    return table(("Field", "Whose", "Here", "Notes"), cells)


def _fields() -> str:
    return "\n\n".join(f"## POST {route}\n\n{_table(route)}" for route in SCHEMAS)


TABLES = {"api-fields": _fields}
