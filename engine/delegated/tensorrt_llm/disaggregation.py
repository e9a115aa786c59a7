"""Context and generation servers: one engine computes a prompt and its first token, another one goes on from there.

TensorRT-LLM moves the blocks itself. The context server's answer has `DisaggregatedParams`, which say where they are;
they are good for one request, and the blocks are held until it has fetched them or `kv_transfer_timeout_ms` are over:
an answer cannot be aborted any more. The generation server's output begins with the first token.
"""

import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import fields
from hashlib import blake2b
from importlib.metadata import version
from time import monotonic
from typing import Any, NamedTuple

import msgspec

from sluice.engine.config import EngineRole
from sluice.engine.delegated.interface import ResponseDelta
from sluice.engine.delegated.tensorrt_llm.configuration.arguments import Resolution
from sluice.engine.delegated.tensorrt_llm.library import TensorRtLlmLibrary, field_names
from sluice.engine.delegated.tensorrt_llm.responses import LlmRequestHandle, classify
from sluice.engine.delegated.watchdog import stall_timeout_s
from sluice.engine.kv_tiers.identity import content_digest
from sluice.engine.statistics import HandoverStats
from sluice.engine.types import EventDetail, FinishReason, GenerateRequest
from sluice.errors import invalid
from sluice.log_relay import about

log = logging.getLogger(__name__)

TRANSCEIVER = "cache_transceiver_config"
"""The argument of the part that carries KV blocks from a context server to a generation server."""
_TIMEOUT_SHARE = 0.5
"""Share of the time without output after which an engine counts as hung: a transfer that fails ends before it."""
_NO_LIMIT_S = 30.0
"""How long a transfer may take to begin where the transceiver has no limit."""
_WORTH = 0.5
"""The share of the transceiver's limit after which a request that still waits computes its prompt: blocks that are gone
would be waited for as long again."""
_FIRST_GLOBAL_ID = 1 << 40
"""Below it are the ids that an engine gives its own requests (NVIDIA's disagg_utils)."""
_ID_BITS = 62
_LOGPROBS = "first_gen_log_probs"
"""The field with the first token's log probability. Versions without it leave it out of the answer (pull 11727)."""
# fmt: off
_FIELDS = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "stop_token_ids", "ignore_eos", "logit_bias",
           "allowed_token_ids", "bad_words", "grammar")
# fmt: on
"""Sampling parameters whose effect on a token does not depend on what a sampler keeps of those before it, and grammars,
whose matcher the generation server leads over the first token. Penalties, seeds and the like begin anew there."""


def resolve_transceiver(resolution: Resolution) -> None:
    """Add the transceiver's defaults where prompts are handed over. Without a limit of time, blocks that nobody fetches
    would be held for good. Raises INVALID for a compiled engine that is to hand over prompts."""
    arguments, config = resolution.arguments, resolution.config
    is_context = config.role is EngineRole.PREFILL
    if resolution.is_engine:
        if is_context:
            raise invalid("role", "role prefill is for models on the PyTorch backend, and this one runs compiled")
        return
    if is_context:
        # NVIDIA's documentation: context servers cannot overlap iterations yet.
        arguments.add_default("disable_overlap_scheduler", True)
    if is_context or config.has_prefill_replicas:
        arguments.add_default(f"{TRANSCEIVER}.backend", "DEFAULT")
    if arguments.within(TRANSCEIVER):
        limit_ms = int(stall_timeout_s(config.runtime_settings) * _TIMEOUT_SHARE * 1000)
        arguments.add_default(f"{TRANSCEIVER}.kv_transfer_timeout_ms", limit_ms)


class PendingBlocks(NamedTuple):
    """Blocks at a context server, for one request of this engine."""

    params: Any
    """The library's `DisaggregatedParams`."""
    due: float
    """The time of `monotonic` by which fetching them must have begun."""


class Disaggregation:
    """The part of one engine in handing requests over."""

    def __init__(self, arguments: Mapping[str, Any], library: TensorRtLlmLibrary, identity: str) -> None:
        """`arguments` are those of the LLM. `identity` is "" for an engine that hands over nothing."""
        self._class: Any = library.find("DisaggregatedParams") if identity else None
        self._known = field_names(self._class) if identity else frozenset()
        limit_ms = getattr(arguments.get(TRANSCEIVER), "kv_transfer_timeout_ms", None)
        self._limit_s = _NO_LIMIT_S if limit_ms is None else limit_ms / 1000
        self.identity = identity
        """`EngineInfo.block_identity`."""
        fields = (*_FIELDS, "logprobs") if _LOGPROBS in self._known else _FIELDS
        self.fields = fields if identity else ()
        """`EngineInfo.handover_fields`."""
        self._logprob = library.logprob
        self.num_moved_tokens = self.num_late = 0
        """Tokens of prompts that came from context servers, and prompts that did not come in time."""

    def stats(self, block_size: int) -> HandoverStats | None:
        """Return what was taken over; None for nothing."""
        num_blocks, num_late = self.num_moved_tokens // block_size, self.num_late
        return HandoverStats(received_blocks_total=num_blocks, late_total=num_late) if num_blocks or num_late else None

    def context_params(self) -> Any:
        """Return what makes a request one of a context server. Versions that have an id for both servers need it."""
        has_id = "disagg_request_id" in self._known
        own = {"disagg_request_id": _FIRST_GLOBAL_ID + secrets.randbits(_ID_BITS)} if has_id else {}
        return self._class(request_type="context_only", **own)

    def read(self, handover: bytes) -> PendingBlocks | None:
        """Return what a context server has handed over; None for what cannot be read."""
        try:
            told = msgspec.msgpack.decode(handover, type=dict[str, Any])
            if entries := told.get(_LOGPROBS):
                told[_LOGPROBS] = [self._read_logprobs(entry) for entry in entries]
            params = self._class(**{**told, "request_type": "generation_only"})
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            log.warning("what a prefill engine has handed over cannot be read, and the prompt is computed: %s", error)
            return None
        return PendingBlocks(params, monotonic() + self._limit_s * _WORTH)

    def _read_logprobs(self, entry: Any) -> Any:
        if not isinstance(entry, dict):
            return entry
        return {token_id: self._logprob(*value) for token_id, value in entry.items()}


def block_identity(
    arguments: Mapping[str, Any], library: TensorRtLlmLibrary, model_path: str, sizes: tuple[object, ...]
) -> str:
    """Return a digest of what both servers must have alike, "" for an engine that hands over nothing. Their parallelism
    may differ: TensorRT-LLM converts the layout of blocks on their way. `sizes` are further facts of the blocks."""
    cache, transceiver = arguments.get("kv_cache_config"), arguments.get(TRANSCEIVER)
    if getattr(transceiver, "backend", None) is None:
        return ""
    parts = (
        version("sluice"),
        str(library.version),
        content_digest(model_path),
        (arguments.get("dtype"), *sizes),
        [str(getattr(cache, name, None)) for name in ("dtype", "max_attention_window")],
        [str(getattr(transceiver, name, None)) for name in ("backend", "transceiver_runtime")],
        type(arguments.get("speculative_config")).__name__,
    )
    return blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def _write(asked: Any, answered: Any) -> bytes:
    """Return the fields that are set, of the answer before the request, whose id for both servers need not be in it;
    empty where one of them is not for another process."""
    pairs = ((each.name, getattr(part, each.name)) for part in (asked, answered) for each in fields(part))
    told = {name: value for name, value in pairs if value is not None}
    if entries := told.get(_LOGPROBS):
        told[_LOGPROBS] = [_plain_logprobs(entry) for entry in entries]
    try:
        return msgspec.msgpack.encode(told)
    except TypeError as error:
        log.warning("TensorRT-LLM hands over what cannot be sent to another engine: %s", error)
        return b""


def _plain_logprobs(entry: Any) -> Any:
    """`entry` is a number, or has a Logprob by token id."""
    if not isinstance(entry, dict):
        return entry
    return {token_id: (each.logprob, each.rank) for token_id, each in entry.items()}


class ContextHandle(LlmRequestHandle):
    """A request for another engine, as `sluice.engine.delegated.interface.RequestHandle`."""

    def __init__(self, *of_output: Any, asked: Any) -> None:
        """`asked` are the `DisaggregatedParams` that the request was given."""
        super().__init__(*of_output)
        self._asked = asked

    def read(self, response: Any) -> ResponseDelta:
        """Return the first token, and what is handed over unless it ends the answer."""
        delta = super().read(response)
        params = response.outputs[0].disaggregated_params
        # Later versions have the request's own parameters here where nothing is handed over.
        goes_on = delta.finish_reason is FinishReason.LENGTH and getattr(params, "first_gen_tokens", None)
        handover = _write(self._asked, params) if goes_on else b""
        if not handover:
            return delta
        return delta._replace(detail=msgspec.structs.replace(delta.detail or EventDetail(), handover=handover))


class GenerationHandle:
    """A request from another engine, as `sluice.engine.delegated.interface.RequestHandle`. Where its blocks do not
    come, it begins anew, which no client can tell: it has brought nothing."""

    def __init__(
        self,
        counts: Disaggregation,
        first: LlmRequestHandle,
        request: GenerateRequest,
        num_moved: int,
        begin_anew: Callable[[], Any],
    ) -> None:
        """`num_moved` tokens of the prompt come from elsewhere. `begin_anew` hands the request over whole."""
        self._counts = counts
        self._part = first
        self._request = request
        self._num_moved = num_moved
        self._begin_anew = begin_anew
        self._has_begun = self._is_aborted = False

    async def __aiter__(self) -> AsyncIterator[Any]:
        problem = "it was cancelled there"
        try:
            async for response in self._part:
                best = response.outputs[0]
                self._has_begun |= bool(best.token_ids)
                if best.finish_reason != "cancelled" or self._is_settled:
                    yield response
        except Exception as error:
            if self._is_settled or classify(error, at_submit=False).is_fatal:
                raise
            problem = str(error)
        if self._is_settled:
            return
        id_ = self._request.request_id
        log.warning("the blocks of request %s have not come (%s): computing them", id_, problem, extra=about(id_))
        self._has_begun, self._num_moved = True, 0
        self._counts.num_late += 1
        self._part = self._begin_anew()
        async for response in self._part:
            yield response

    @property
    def _is_settled(self) -> bool:
        """Whether it is too late to begin anew."""
        return self._has_begun or self._is_aborted

    @property
    def is_finished(self) -> bool:
        return bool(self._part.is_finished)

    def read(self, response: Any) -> ResponseDelta:
        """Return what is new. With the first token, the prompt counts as cached as far as it came from elsewhere."""
        delta: ResponseDelta = self._part.read(response)
        num_moved, self._num_moved = self._num_moved, 0
        if not num_moved:
            return delta
        self._counts.num_moved_tokens += num_moved
        return delta._replace(
            detail=msgspec.structs.replace(delta.detail or EventDetail(), num_cached_tokens=num_moved)
        )

    def abort(self) -> None:
        self._is_aborted = True
        self._part.abort()
