"""The open generations of the server's language models, as an administrator sees and cancels them."""

import logging
from collections.abc import Iterator
from time import perf_counter
from typing import Protocol

import msgspec

from sluice.engine.client.stream import GenerationStream
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.llm.model import LlmModel, language_models
from sluice.serving.repository.repository import ModelRepository

log = logging.getLogger(__name__)

WAITING, RUNNING = "waiting", "running"


class LiveRequest(msgspec.Struct, frozen=True):
    """One generation that is open. A request that asks for several answers has as many, with one `request_id`."""

    id: str
    """Names this generation alone, of all processes of the server."""
    request_id: str
    """As in the log and in the answer's `x-request-id`. Clients may choose it, and use one twice."""
    model: str
    version: str
    adapter: str
    tenant: str
    priority: int
    state: str
    """`waiting`: it has no token yet, as it waits for admission or its prompt is computed; `running`: it has some."""
    age_s: float
    prompt_tokens: int
    generated_tokens: int
    max_tokens: int
    replica: str
    """Name of the model's replica that has it; "" for a model with one engine."""
    worker: int = 0
    """Number of the HTTP worker that answers it; 0 for the server's first process."""


class RequestsElsewhere(Protocol):
    """The open generations of the server's other processes."""

    async def list_requests(self) -> list[LiveRequest]:
        """Return them, those of a process that does not answer in time left out."""

    async def cancel_requests(self, id_: str) -> int:
        """End those of an id. Returns how many there were."""


class LiveRequests:
    """Lists the open generations, and ends them. Belongs to the event loop; costs nothing while nobody asks."""

    def __init__(self, repository: ModelRepository, elsewhere: RequestsElsewhere | None = None) -> None:
        """`repository` has the models of this process. `elsewhere` None: the server has one process."""
        self._repository = repository
        self._elsewhere = elsewhere

    async def list_all(self) -> list[LiveRequest]:
        """Return all open generations, the oldest first."""
        found = self.list_here()
        if self._elsewhere is not None:
            found += await self._elsewhere.list_requests()
        return sorted(found, key=lambda each: -each.age_s)

    async def cancel(self, id_: str) -> int:
        """End the generation of an id, or all generations of a request id, with an error that their clients see.

        Returns how many there were.
        """
        num_cancelled = self.cancel_here(id_)
        if self._elsewhere is not None:
            num_cancelled += await self._elsewhere.cancel_requests(id_)
        return num_cancelled

    def list_here(self) -> list[LiveRequest]:
        """Return those of this process."""
        now = perf_counter()
        return [
            _describe(model, number, stream, replicas, now)
            for model, replicas in self._served()
            for number, stream in model.text.activity.generations.items()
        ]

    def cancel_here(self, id_: str) -> int:
        """End those of this process. Returns how many there were."""
        found = [
            stream
            for model, _ in self._served()
            for number, stream in model.text.activity.generations.items()
            if id_ in (_format_id(number), stream.request.request_id)
        ]
        for stream in found:
            log.info("request %s is cancelled by an administrator", stream.request.request_id)
            stream.cancel()
            stream.fail(SluiceError(ErrorCode.CANCELLED, "the request was cancelled by an administrator"))
        return len(found)

    def _served(self) -> Iterator[tuple[LlmModel, dict[int, str]]]:
        """Yield each model, with the names of the replicas that have its streams, by the streams' numbers there."""
        for model in language_models(self._repository.models()):
            replicas = model.engine.replicas
            yield model, {each.stream_id: replica.name for replica in replicas for each in replica.engine.open_streams}


def _describe(
    model: LlmModel, number: int, stream: GenerationStream, replicas: dict[int, str], now: float
) -> LiveRequest:
    request = stream.request
    num_generated = len(request.resume_token_ids) + len(stream.output_token_ids)
    return LiveRequest(
        id=_format_id(number),
        request_id=request.request_id,
        model=model.name,
        version=model.text.version,
        adapter=request.adapter,
        tenant=request.tenant,
        priority=request.priority,
        state=RUNNING if num_generated else WAITING,
        age_s=round(now - stream.submitted_at, 3),
        prompt_tokens=len(request.prompt_token_ids),
        generated_tokens=num_generated,
        max_tokens=request.sampling.max_tokens,
        replica=replicas.get(stream.stream_id, ""),
    )


def _format_id(number: int) -> str:
    return f"gen-{number:016x}"
