"""The part that the runtimes of TensorRT-LLM share: one loaded LLM, its health, its facts and its end."""

import logging
from typing import Any

from sluice.engine.config import EngineConfig
from sluice.engine.delegated.interface import DelegatedRuntime, RuntimeFailure
from sluice.engine.delegated.tensorrt_llm.configuration.plan import LlmPlan
from sluice.engine.delegated.tensorrt_llm.folder import LlmFolder
from sluice.engine.delegated.tensorrt_llm.library import TensorRtLlmLibrary
from sluice.engine.delegated.tensorrt_llm.responses import classify
from sluice.engine.delegated.tensorrt_llm.runtime import TENSORRT_LLM
from sluice.engine.types import EngineInfo

log = logging.getLogger(__name__)


class LoadedLlm(DelegatedRuntime):
    """The methods of `DelegatedRuntime` that do not depend on what the LLM is for."""

    title = TENSORRT_LLM.title

    def __init__(
        self, llm: Any, plan: LlmPlan, library: TensorRtLlmLibrary, folder: LlmFolder, config: EngineConfig
    ) -> None:
        """`llm` is an object of `plan.llm_class`."""
        self._llm = llm
        self._plan = plan
        self._library = library
        self._folder = folder
        self._config = config

    def classify(self, error: Exception, *, at_submit: bool) -> RuntimeFailure:
        return classify(error, at_submit=at_submit)

    async def is_healthy(self) -> bool:
        """An LLM that cannot be asked counts as ill."""
        try:
            if (loss := worker_loss(self._llm)) is not None:
                log.error("TensorRT-LLM has lost a worker: %s", loss)
                return False
            if (check := getattr(self._llm, "_check_health", None)) is not None:
                return bool(check())
            is_shut_down = getattr(getattr(self._llm, "_executor", None), "is_shutdown", None)
            return is_shut_down is None or not is_shut_down()
        except Exception as error:
            log.error("TensorRT-LLM's health check failed: %s", error)
            return False

    def shutdown(self) -> None:
        """Blocks until its workers have ended."""
        self._llm.shutdown()

    def describe(self, **facts: Any) -> EngineInfo:
        """Return what the engine is; `facts` are those that depend on what the LLM is for, or go before the plan's."""
        plan, folder = self._plan, self._folder
        common = {
            "runtime": TENSORRT_LLM.runtime.value,
            "runtime_version": str(self._library.version),
            "model_type": folder.model_type,
            "dtype": folder.dtype,
            "vocab_size": folder.vocab_size,
            "eos_token_ids": folder.eos_token_ids,
            "max_model_len": plan.max_model_len,
            "block_size": plan.tokens_per_block,
            "max_num_seqs": plan.max_num_seqs,
            "max_num_batched_tokens": plan.max_num_batched_tokens,
            "load_seconds": 0.0,
            "quantization": plan.quantization,
            "num_gpus": plan.num_gpus,
        }
        return EngineInfo(**{**common, **facts})


def worker_loss(llm: Any) -> str | None:
    """Return what is known of a worker that ended, None while all live. The library's own front tells nobody of it
    before the next request."""
    front = getattr(llm, "_executor", None)
    errors = getattr(front, "_error_queue", None)
    if errors is not None and not errors.empty():
        return str(errors.queue[0]) if getattr(errors, "queue", None) else "it reported an error"
    ended = next((each for each in getattr(front, "mpi_futures", None) or () if each.done()), None)
    return None if ended is None else str(ended.exception() or "its process ended")
