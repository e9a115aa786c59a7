"""A checkout of NVIDIA's layout in small, made of the stand-in's modules, for tests of the tool itself."""

import shutil
from pathlib import Path

from tests.paths import DATA
from tests.stand_ins.paths import STAND_INS

VERSION = "1.3.0"
_SAMPLING = """

def _sampling_config(self):
    from tensorrt_llm.bindings.executor import SamplingConfig
    names = [each for each in dir(SamplingConfig) if not each.startswith("__")]
    beams = {"beam_width": self.best_of if self.use_beam_search else 1, "num_return_sequences": self.n}
    return SamplingConfig(**{each: beams.get(each, getattr(self, each, None)) for each in names})

def _output_config(self, is_pytorch_backend=False):
    from tensorrt_llm.bindings.executor import OutputConfig
    return OutputConfig(return_log_probs=bool(self.logprobs), exclude_input_from_output=self.exclude_input_from_output)

def _validate(self):
    if self.best_of < self.n:
        raise ValueError(f"best_of ({self.best_of}) must be at least n ({self.n})")

SamplingParams._get_sampling_config = _sampling_config
SamplingParams._get_output_config = _output_config
SamplingParams._get_guided_decoding_params = lambda self: None
SamplingParams._get_stop_words = lambda self: [[each] for each in self.stop_token_ids or []]
"""
_REQUEST = """

class GenerationRequest:
    def __init__(self, prompt_token_ids, sampling_params, streaming):
        self.prompt_token_ids, self.sampling_params, self.streaming = prompt_token_ids, sampling_params, streaming

    def set_id(self, number):
        self.id = self.request_id = number
        return self
"""
_RESULT = """

from .._stand_in.responses import SequenceResponse

class _Queue:
    def __init__(self, told):
        self._told = told

    def put(self, response):
        if getattr(response, "result", None) is None:
            self._told.put(Response(error=response.error_msg))
            return
        result = response.result
        reason = result.finish_reasons[0] if result.is_final else None
        logprobs = [[(each, -0.5, 1)] for each in result.output_token_ids[0]]
        sequence = SequenceResponse(result.output_token_ids[0], [], logprobs, None, reason)
        self._told.put(Response([sequence], result.is_final, iteration=result.decoding_iter))

_Result = GenerationResult

class GenerationResult(_Result):
    def __init__(self, request, background_error_handler=None, executor=None, logprob_params=None):
        super().__init__(request, executor)
        self.queue = _Queue(self._queue)

IterationResult.queue = property(lambda self: self._queue)
"""
_EXECUTOR = """
import queue
from .request import GenerationRequest
from .result import IterationResult

class GenerationExecutor:
    def __init__(self, is_llm_executor=None):
        self._iter_stats_result, self._number, self._error_queue = None, 0, queue.Queue()

    def _get_next_client_id(self):
        self._number += 1
        return self._number

    def generate_async(self, prompt_token_ids, sampling_params, streaming=False):
        self._iter_stats_result = self._iter_stats_result or IterationResult()
        return self.submit(GenerationRequest(prompt_token_ids, sampling_params, streaming))

    def aget_stats(self, timeout):
        self._iter_stats_result.set_timeout(timeout)
        return self._iter_stats_result

    def _get_logprob_params(self, request): ...
    def _handle_background_error(self, error=None): ...
    def is_shutdown(self): return False
"""
_UTILS = """

from typing import NamedTuple

class ErrorResponse(NamedTuple):
    client_id: int
    error_msg: str
    request_id: int
"""
_SCHEDULER = """
from enum import Enum
from tests.stand_ins.tensorrt_llm._stand_in.schedulers import POLICIES, BatchLimits, Cache, micro_batch

class ChunkingPolicy(Enum):
    FIRST_COME_FIRST_SERVED = 1

class ContextChunkingConfig:
    def __init__(self, policy, unit):
        self.unit = unit

class PyCapacityScheduler:
    def __init__(self, max_num_requests, kv_cache_manager, scheduler_policy):
        self._most, self._cache, self._policy = max_num_requests, kv_cache_manager, POLICIES[scheduler_policy.value]

    def schedule_request(self, requests):
        free = next(iter(self._cache.get_kv_cache_stats().num_free_blocks_per_window_size.values()))
        cache = Cache(free, self._cache.tokens_per_block, has_credit=True)
        by_id = {each.request_id: each for each in requests}
        fitting = self._policy([each.load for each in requests], cache, self._most)
        return [by_id[load.request_id] for load in fitting.scheduled], [], []

class PyMicroBatchScheduler:
    def __init__(self, max_batch_size, max_num_tokens, chunking):
        self._limits = BatchLimits(max_batch_size, max_num_tokens, chunking and chunking.unit)

    def schedule(self, requests, inflight):
        batch = micro_batch([each.load for each in requests], self._limits)
        by_id = {each.request_id: each for each in requests}
        for load, size in batch.contexts:
            by_id[load.request_id].context_chunk_size = size
        contexts, generations = [load for load, _ in batch.contexts], batch.generations
        return [by_id[each.request_id] for each in contexts], [by_id[each.request_id] for each in generations]
"""
_SAMPLER = """
TEXT = "min_p is not supported here"

class Sampler:
    def validate_request(self, request):
        if request.min_p:
            raise ValueError(TEXT)
        raise ValueError(f"top_k must be at most {request.most}")
"""
_MORE = {
    "sampling_params.py": _SAMPLING,
    "executor/request.py": _REQUEST,
    "executor/result.py": _RESULT,
    "executor/utils.py": _UTILS,
}
_NEW = {
    "version.py": f'__version__ = "{VERSION}"\n',
    "executor/executor.py": _EXECUTOR,
    "executor/base_worker.py": "from .._torch.pyexecutor.llm_request import LlmResponse\n",
    "executor/proxy.py": "mpi_futures = []\n",
    "llmapi/utils.py": "from tensorrt_llm.logger import Singleton, logger\n",
    "_torch/pyexecutor/scheduler/scheduler.py": _SCHEDULER,
    "_torch/pyexecutor/sampler/sampler.py": _SAMPLER,
}


def write_checkout(folder: Path) -> Path:
    """Write the checkout; the stand-in's modules read their data beside it, as they do in tests."""
    (folder / "data").symlink_to(DATA)
    root = folder / "checkout"
    package = root / "tensorrt_llm"
    shutil.copytree(Path(STAND_INS) / "tensorrt_llm", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in _NEW.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    for name, text in _MORE.items():
        append(root, name, text)
    template = root / "triton_backend" / "all_models" / "llmapi" / "tensorrt_llm"
    shutil.copytree(DATA / "tensorrt_llm_llmapi" / "tensorrt_llm", template)
    for file, old, new in (("config.pbtxt", "tensorrtllm", "python"), ("1/model.yaml", "${decoupled}", "false")):
        (template / file).write_text((template / file).read_text().replace(old, new))
    return root


def append(checkout: Path, file: str, text: str) -> None:
    path = checkout / "tensorrt_llm" / file
    path.write_text(path.read_text() + text)
