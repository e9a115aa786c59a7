"""A request's place in TensorRT-LLM itself: in its queue, and among the ranks of data-parallel attention.

Our queue orders requests before they are handed over. TensorRT-LLM's has only the few that come early, and takes them
by priority where `scheduler_config.waiting_queue_policy` says so.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from sluice.engine.delegated.tensorrt_llm.library import TensorRtLlmLibrary
from sluice.engine.types import GenerateRequest
from sluice.errors import ErrorCode, SluiceError

_QUEUE = ("scheduler_config", "waiting_queue_policy")
_AFFINITY = ("attention_dp_config", "kv_cache_routing_conversation_affinity")


class RequestPlace:
    """Tells `generate_async` of a request's place, where the LLM was started for it."""

    def __init__(self, llm: Any, arguments: Mapping[str, Any], library: TensorRtLlmLibrary) -> None:
        """`arguments` are those that `llm` was made with. Raises UNIMPLEMENTED where they ask for what it cannot be
        told."""
        known = inspect.signature(llm.generate_async).parameters
        policy = _argument(arguments, _QUEUE)
        self._has_priority = str(getattr(policy, "value", policy)).lower() == "priority"
        self._has_affinity = bool(_argument(arguments, _AFFINITY))
        self._library = library
        for is_on, asked, name in (
            (self._has_priority, _QUEUE, "priority"),
            (self._has_affinity, _AFFINITY, "conversation_params"),
        ):
            if is_on and name not in known:
                lacks = f"requests of TensorRT-LLM {library.version} have no {name}"
                message = f"{'.'.join(asked)} cannot be used: {lacks}; later versions of 1.3, and 1.4, do"
                raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param=".".join(asked))

    def keywords(self, request: GenerateRequest) -> dict[str, Any]:
        """Return keyword arguments of `generate_async`: none where they would change nothing."""
        told: dict[str, Any] = {}
        if self._has_priority:
            told["priority"] = share_of(request.priority)
        if self._has_affinity and request.session:
            told["conversation_params"] = self._library.conversation(request.session)
        return told


def share_of(priority: int) -> float:
    """Return a number from 0 to 1 for a priority, of which lower values run earlier: 0.5 for 0, as for requests without
    one, and higher ones for those that run earlier."""
    return 0.5 - priority / (2 * (1 + abs(priority)))


def _argument(arguments: Mapping[str, Any], path: tuple[str, str]) -> Any:
    return getattr(arguments.get(path[0]), path[1], None)
