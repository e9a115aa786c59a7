"""One loaded LLM of TensorRT-LLM: how a request is put to it and what else it is asked, in every version."""

import inspect
import logging
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.delegated.tensorrt_llm.configuration.arguments import LlmPlan
from engine.delegated.tensorrt_llm.folder import ModelFolder
from engine.delegated.tensorrt_llm.library import Library
from engine.delegated.tensorrt_llm.loop.events import is_replayed
from engine.delegated.tensorrt_llm.sampling.parameters import sampling_params
from engine.types import GenerateRequest
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)

STATS_TIMEOUT_S = 1.0
"""How long a stream of statistics or events waits for the next before it ends."""
_SALT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Call:
    """A request as `generate_async` takes it."""

    inputs: list[int]
    keywords: dict[str, Any]


class Llm:
    """Its methods are called on one thread; `generate` within a running event loop, where its output is read too."""

    def __init__(self, llm: Any, plan: LlmPlan, library: Library, folder: ModelFolder) -> None:
        self.plan = plan
        self.library = library
        self.folder = folder
        self._llm = llm
        self._adapters = {name: number for number, name in enumerate(sorted(plan.adapters), 1)}
        parameters = inspect.signature(llm.generate_async).parameters
        self._has_salt = "cache_salt" in parameters
        self._check_health = getattr(llm, "_check_health", None)

    @property
    def guided_decoding_backend(self) -> str | None:
        backend = self.plan.arguments.get("guided_decoding_backend")
        return None if backend is None else str(backend)

    def prepare(self, request: GenerateRequest) -> Call:
        """Raises SluiceError for what TensorRT-LLM, or this version of it, cannot do."""
        resumed = request.resume_token_ids
        if is_replayed(request):
            request, resumed = msgspec.structs.replace(request, resume_token_ids=[]), []
        params = sampling_params(
            self.library, request, self.folder, self.guided_decoding_backend, self.plan.ignored_sampling
        )
        # The tokens of a beam search may all change until its end.
        keywords: dict[str, Any] = {"sampling_params": params, "streaming": request.sampling.beam_width == 1}
        if request.adapter:
            keywords["lora_request"] = self._lora_request(request.adapter)
        if salt := self._salt(request):
            keywords["cache_salt"] = salt
        return Call([*request.prompt_token_ids, *resumed], keywords)

    def generate(self, call: Call) -> Any:
        """The RequestOutput. Raises what TensorRT-LLM raises."""
        return self._llm.generate_async(call.inputs, **call.keywords)

    def _lora_request(self, adapter: str) -> Any:
        return self.library.lora_request(adapter, self._adapters[adapter], self.plan.adapters[adapter])

    def _salt(self, request: GenerateRequest) -> str:
        """Prompt log probabilities are told of tokens alone that are computed: a salt of its own keeps all blocks away
        from a request that wants them."""
        wants_whole = request.sampling.prompt_logprobs is not None and not request.resume_token_ids
        salt = secrets.token_hex(_SALT_BYTES) if wants_whole else request.cache_salt
        if salt and not self._has_salt:
            raise SluiceError(
                ErrorCode.UNIMPLEMENTED,
                f"TensorRT-LLM {self.library.version} cannot keep KV blocks apart by cache_salt; version 1.2 can",
                param="cache_salt",
            )
        return salt

    # -- what it says of itself

    def is_healthy(self) -> bool:
        """Whether it says that it can go on; true where the version cannot be asked."""
        try:
            if self._check_health is not None:
                return bool(self._check_health())
            is_shut_down = getattr(getattr(self._llm, "_executor", None), "is_shutdown", None)
            return is_shut_down is None or not is_shut_down()
        except Exception as error:
            log.error("TensorRT-LLM's health check failed: %s", error)
            return False

    def statistics(self, timeout_s: float = STATS_TIMEOUT_S) -> AsyncIterator[dict[str, Any]]:
        """Of iterations, as they come; ends after a silence of `timeout_s`."""
        told: AsyncIterator[dict[str, Any]] = self._llm.get_stats_async(timeout=timeout_s)
        return told

    def kv_cache_events(self, timeout_s: float = STATS_TIMEOUT_S) -> AsyncIterator[dict[str, Any]]:
        """As they come; ends after a silence of `timeout_s`."""
        told: AsyncIterator[dict[str, Any]] = self._llm.get_kv_cache_events_async(timeout=timeout_s)
        return told

    @property
    def has_kv_cache_events(self) -> bool:
        """Whether they were asked for (`event_buffer_max_size`)."""
        return bool(getattr(self.plan.arguments.get("kv_cache_config"), "event_buffer_max_size", 0))

    def shutdown(self) -> None:
        """Blocks until its workers have ended."""
        self._llm.shutdown()
