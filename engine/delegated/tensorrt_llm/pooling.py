"""Vectors and scores of TensorRT-LLM in place of tokens: `LLM.encode`, which takes a batch and blocks until it is
done. It has no queue, KV cache or statistics, and runs in this process."""

import asyncio
import logging
import re
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from sluice.engine.arrays import FloatArray
from sluice.engine.blocks import HashChain
from sluice.engine.config import Task
from sluice.engine.delegated.admission import BlockSharing
from sluice.engine.delegated.interface import EngineLost, ResponseDelta, TakeIteration
from sluice.engine.delegated.tensorrt_llm.configuration.encoding import Encoder
from sluice.engine.delegated.tensorrt_llm.configuration.plan import LlmPlan
from sluice.engine.delegated.tensorrt_llm.library import int_tensor
from sluice.engine.delegated.tensorrt_llm.loaded import LoadedLlm
from sluice.engine.delegated.watchdog import stall_timeout_s, warm_up
from sluice.engine.statistics import IterationStats
from sluice.engine.types import EngineInfo, EventDetail, FinishReason, GenerateRequest
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)

_NO_TOKEN = 0
"""Stands for the token that a request is answered with elsewhere; it means nothing."""
_BATCHES = 2
"""One batch runs while the next one gathers."""
_LOST = re.compile(r"CUDA error|CUBLAS_STATUS|device-side assert|illegal memory access", re.IGNORECASE)
"""Texts of errors after which the GPU does nothing more for this process, though `_check_health` does not know it."""


class EncodeHandle:
    """A text that waits for its batch or is in it, as `sluice.engine.delegated.interface.RequestHandle`."""

    def __init__(self, queue: "EncodeQueue", request: GenerateRequest, encoder: Encoder) -> None:
        self.request = request
        self.is_finished = False
        self.answer: asyncio.Future[FloatArray] = asyncio.get_running_loop().create_future()
        self._queue = queue
        self._encoder = encoder

    async def __aiter__(self) -> AsyncIterator[FloatArray]:
        try:
            yield await self.answer
        finally:
            self.is_finished = True

    def read(self, response: FloatArray) -> ResponseDelta:
        """Raises UNIMPLEMENTED where the model gives something else than vectors or scores of its size."""
        self.is_finished = True
        values, encoder = np.asarray(response, np.float32).reshape(-1), self._encoder
        if values.size != encoder.size:
            what = f"TensorRT-LLM gives {values.size} numbers for a text with {encoder.architecture}"
            message = f"{what}, where {encoder.task} needs {encoder.size}; another version or runtime may do it"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param="task")
        told = (1 / (1 + np.exp(-values))).astype(np.float32) if encoder.is_logit else values
        detail = EventDetail(0, generation_logits=told.tobytes())
        return ResponseDelta([_NO_TOKEN], FinishReason.LENGTH, detail)

    def abort(self) -> None:
        """A text that is in a batch ends with it."""
        self._queue.drop(self)


class EncodeQueue:
    """Makes batches of the texts in order of arrival, one at a time: two calls of `encode` would share buffers."""

    def __init__(self, llm: Any, encoder: Encoder, max_num_seqs: int, max_num_tokens: int) -> None:
        self._llm = llm
        self._encoder = encoder
        self._max_num_seqs = max_num_seqs
        self._max_num_tokens = max_num_tokens
        self._waiting: deque[EncodeHandle] = deque()
        self._worker: asyncio.Task[None] | None = None

    def add(self, handle: EncodeHandle) -> None:
        self._waiting.append(handle)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._run(), name="encode")

    def drop(self, handle: EncodeHandle) -> None:
        """End a text that waits."""
        if handle in self._waiting:
            self._waiting.remove(handle)
            _end(handle, np.empty(0, np.float32))

    async def _run(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft()]
            num_tokens = len(batch[0].request.prompt_token_ids)
            while self._waiting and len(batch) < self._max_num_seqs:
                num_tokens += len(self._waiting[0].request.prompt_token_ids)
                if num_tokens > self._max_num_tokens:
                    break
                batch.append(self._waiting.popleft())
            await self._encode(batch)

    async def _encode(self, batch: list[EncodeHandle]) -> None:
        """Encode a batch, and where that fails each text alone: one may have failed the others."""
        try:
            answers = await asyncio.to_thread(self._call, [each.request for each in batch])
            for each, answer in zip(batch, answers, strict=True):
                _end(each, answer)
        except Exception as error:
            if _LOST.search(str(error)):
                lost = EngineLost(f"the GPU is lost to this process: {error}")
                for each in (*batch, *self._waiting):
                    _end(each, lost)
                self._waiting.clear()
            elif len(batch) == 1:
                _end(batch[0], error)
            else:
                for each in batch:
                    await self._encode([each])

    def _call(self, requests: list[GenerateRequest]) -> list[FloatArray]:
        keywords: dict[str, Any] = {}
        if self._encoder.has_token_types and any(each.second_text_start for each in requests):
            keywords["token_type_ids"] = int_tensor(np.concatenate([*map(_token_types, requests)]))
        outputs = self._llm.encode([each.prompt_token_ids for each in requests], **keywords)
        return [each.logits.float().cpu().numpy() for each in outputs]


def _end(handle: EncodeHandle, outcome: FloatArray | Exception) -> None:
    if handle.answer.done():  # its reader is gone
        return
    if isinstance(outcome, Exception):
        handle.answer.set_exception(outcome)
    else:
        handle.answer.set_result(outcome)


def _token_types(request: GenerateRequest) -> Any:
    types = np.zeros(len(request.prompt_token_ids), np.int32)
    types[request.second_text_start or len(types) :] = 1
    return types


class TensorRtEncoder(LoadedLlm):
    """A loaded model that encodes: implements `DelegatedRuntime`."""

    takes_early = False
    sharing = BlockSharing.NONE

    def __init__(self, llm: Any, plan: LlmPlan, encoder: Encoder, *loaded: Any) -> None:
        """`loaded` are the further parts of a `LoadedLlm`."""
        super().__init__(llm, plan, *loaded)
        self._encoder = encoder
        self._queue = EncodeQueue(llm, encoder, plan.max_num_seqs, plan.max_num_batched_tokens)

    def prepare(self, request: GenerateRequest) -> GenerateRequest:
        return request

    def submit(self, prepared: GenerateRequest) -> EncodeHandle:
        handle = EncodeHandle(self._queue, prepared, self._encoder)
        self._queue.add(handle)
        return handle

    def needs_replay(self, request: GenerateRequest) -> bool:
        return False

    def worst_case_blocks(self, request: GenerateRequest) -> int:
        return 0

    def prompt_chain(self, request: GenerateRequest) -> HashChain | None:
        return None

    async def observe(self, take: TakeIteration, is_busy: asyncio.Event) -> None:
        """It tells of nothing."""
        await asyncio.Event().wait()

    async def start(self) -> tuple[EngineInfo, IterationStats | None]:
        info = self.describe(
            # A text that is pooled leaves no room for output, of which every engine counts one token.
            max_model_len=self._plan.max_model_len + 1,
            num_blocks=0,
            max_num_seqs=self._plan.max_num_seqs * _BATCHES,
            scheduler_policy=self._config.scheduler_policy,
            grammar_kinds=(),
            gives_logits=True,
            embedding_size=self._encoder.size,
            is_pooled=True,
            gives_scores=self._encoder.task is Task.SCORE,
        )
        await warm_up(self, info, stall_timeout_s(self._config.runtime_settings))
        return info, None
