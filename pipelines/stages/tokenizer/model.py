"""A tokenizer as a model of the v2 protocol: texts in, token ids out."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter_ns

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig

from pipelines.stages.tokenizer.text_tokenizer import TextTokenizer
from serving.job import InferJob
from serving.model import Model
from serving.request import InferRequest, InferResponse
from serving.spec import build_spec
from serving.tensors.tensor import Array, Tensor
from sluice.errors import ErrorCode, SluiceError, invalid

TEXT = "text"
INPUT_IDS, ATTENTION_MASK, TOKEN_TYPE_IDS = "input_ids", "attention_mask", "token_type_ids"
_INLINE_CHARS = 1000
"""Up to here (about a millisecond) a request is answered at once; longer ones go to a thread."""
_NUM_WORKERS = 2


class TokenizerModel(Model):
    """Answers each request by itself: short texts take less time than a batch would be waited for.

    The rows of one request are filled up to the longest with the tokenizer's padding, at their ends.
    """

    def __init__(self, config: ModelConfig, version: int, tokenizer: TextTokenizer, prefix: str = "") -> None:
        """`prefix` stands before every text."""
        super().__init__(config, build_spec(config, version))
        self.tokenizer = tokenizer
        self._prefix = prefix
        self._workers = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix=self.name)
        self._running: dict[asyncio.Future[list[list[int]]], InferJob] = {}

    def _start(self, job: InferJob) -> None:
        job.compute_started_ns = perf_counter_ns()
        texts = self._texts(job.request)
        job.infer_started_ns = perf_counter_ns()
        if sum(map(len, texts)) <= _INLINE_CHARS:
            self._respond(job, self.tokenizer.encode(texts))
            return
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._workers, self.tokenizer.encode_long, texts)
        self._running[future] = job
        future.add_done_callback(self._encoded)

    def _texts(self, request: InferRequest) -> list[str]:
        try:
            return [self._prefix + element.decode() for element in request.inputs[TEXT].array.ravel().tolist()]
        except UnicodeDecodeError:
            message = f"inference input '{TEXT}' for model '{self.name}' holds bytes that are not UTF-8 text"
            raise invalid(TEXT, request.log_prefix + message) from None

    def _encoded(self, future: "asyncio.Future[list[list[int]]]") -> None:
        job = self._running.pop(future)
        if future.cancelled():
            job.fail(SluiceError(ErrorCode.UNAVAILABLE, f"model '{self.name}' version {self.version} is unloaded"))
        elif (error := future.exception()) is not None:
            job.fail(SluiceError(ErrorCode.INTERNAL, f"model '{self.name}' cannot tokenize the text: {error}"))
        else:
            self._respond(job, future.result())

    def _respond(self, job: InferJob, rows: Sequence[Sequence[int]]) -> None:
        job.infer_ended_ns = perf_counter_ns()
        wanted = job.request.requested_outputs or tuple(self.spec.outputs)
        job.respond(InferResponse([self._tensor(name, rows) for name in wanted]))

    def _tensor(self, name: str, rows: Sequence[Sequence[int]]) -> Tensor:
        spec = self.spec.outputs[name]
        array = _filled(rows, name, self.tokenizer.pad_id).astype(spec.data_type.dtype, copy=False)
        if self.spec.max_batch_size == 0:
            array = array[0]
        return Tensor(name, spec.data_type.name, array.shape, array=array)

    async def close(self) -> None:
        """Texts that are being tokenized end as the library cannot be interrupted; those that wait fail now."""
        self.retire()
        self._workers.shutdown(wait=False, cancel_futures=True)
        for future in list(self._running):
            future.cancel()


def _filled(rows: Sequence[Sequence[int]], name: str, pad_id: int) -> Array:
    """[rows, longest] of the output `name`."""
    longest = max(map(len, rows))
    array = np.full((len(rows), longest), pad_id if name == INPUT_IDS else 0, np.int64)
    if name != TOKEN_TYPE_IDS:
        for index, ids in enumerate(rows):
            array[index, : len(ids)] = ids if name == INPUT_IDS else 1
    return array
