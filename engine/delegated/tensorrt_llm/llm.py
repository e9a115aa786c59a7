"""One loaded LLM of TensorRT-LLM as a delegated runtime, in every version."""

import asyncio
import inspect
import logging
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packaging.version import Version

from engine.blocks import HashChain, blocks_for
from engine.config import EngineConfig, SchedulerPolicy
from engine.delegated.interface import EngineLost, RuntimeFailure, StatisticsListener
from engine.delegated.sharing import BlockSharing
from engine.delegated.tensorrt_llm.configuration.plan import LlmPlan, plan_llm
from engine.delegated.tensorrt_llm.folder import LlmFolder, read_folder
from engine.delegated.tensorrt_llm.grammars import grammar_kinds
from engine.delegated.tensorrt_llm.library import TensorRtLlmLibrary, load_library
from engine.delegated.tensorrt_llm.responses import LlmRequestHandle, classify
from engine.delegated.tensorrt_llm.runtime import TENSORRT_LLM
from engine.delegated.tensorrt_llm.sampling import sampling_params
from engine.delegated.tensorrt_llm.statistics import (
    CachedBlocks,
    IterationReader,
    follow,
    read_iteration_stats,
    reopened,
)
from engine.delegated.tensorrt_llm.two_parts import TwoPartHandle, first_part
from engine.delegated.watchdog import stall_timeout_s, warm_up
from engine.statistics import IterationStats
from engine.types import EngineInfo, GenerateRequest
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)

STATS_TIMEOUT_S = 1.0
"""How long a stream of statistics or events waits before it ends; while something runs, it is read again."""
_SALT_BYTES = 16
_CREDITS_CANDIDATES = Version("1.3.0rc5")
"""From here on the blocks that others hold are not reserved for a request that is to begin (pulls 11490, 11637)."""


def load_llm(config: EngineConfig) -> "TensorRtLlm":
    """Load the model, which may take minutes. Called with no event loop running, since TensorRT-LLM starts loops and
    processes of its own. Raises SluiceError with what is wrong, and what TensorRT-LLM raises."""
    stall_timeout_s(config.runtime_settings)  # a wrong one is not to be found out after minutes
    library = load_library()
    tokenizer = None if config.tokenizer_path is None else Path(config.tokenizer_path)
    folder = read_folder(Path(config.model_path), tokenizer)
    plan = plan_llm(config, folder, library)
    for note in plan.notes:
        log.warning(note)
    log.info("TensorRT-LLM %s: %s", library.version, plan)
    return TensorRtLlm(plan.llm_class(**plan.arguments), plan, library, folder, config)


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A request as `generate_async` takes it."""

    request: GenerateRequest
    inputs: list[int]
    keywords: dict[str, Any]
    whole: GenerateRequest | None = None
    """The request of which this is the first part."""


class TensorRtLlm:
    """Implements `DelegatedRuntime`. `submit` needs a running event loop; the responses are read on it too."""

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
        self._block_size = plan.tokens_per_block
        self._kv_cache = plan.arguments.get("kv_cache_config")
        backend = plan.arguments.get("guided_decoding_backend")
        self._guidance = None if backend is None else str(backend)
        self._adapters = {name: number for number, name in enumerate(sorted(plan.adapters), 1)}
        self._has_salt = "cache_salt" in inspect.signature(llm.generate_async).parameters
        self._check_health = getattr(llm, "_check_health", None)

    # -- requests

    def prepare(self, request: GenerateRequest) -> PreparedCall:
        """Raises SluiceError for what TensorRT-LLM, or this version of it, cannot do."""
        first = first_part(request, self._folder)
        if first is not None:
            return replace(self._prepare(first), whole=request)
        return self._prepare(request)

    def _prepare(self, request: GenerateRequest) -> PreparedCall:
        params = sampling_params(self._library, request, self._folder, self._guidance, self._plan.sampler)
        # The tokens of a beam search may all change until its end.
        keywords: dict[str, Any] = {"sampling_params": params, "streaming": request.sampling.beam_width == 1}
        if request.adapter:
            number, path = self._adapters[request.adapter], self._plan.adapters[request.adapter]
            keywords["lora_request"] = self._library.lora_request(request.adapter, number, path)
        if salt := self._salt(request):
            keywords["cache_salt"] = salt
        return PreparedCall(request, [*request.prompt_token_ids, *request.resume_token_ids], keywords)

    def submit(self, prepared: PreparedCall) -> LlmRequestHandle | TwoPartHandle:
        """Raises EngineLost where a worker is gone: TensorRT-LLM would shut down first, on this thread, and wait for
        ranks that may never end."""
        if (loss := worker_loss(self._llm)) is not None:
            raise EngineLost(f"a worker is gone: {loss}")
        handle = self._hand_over(prepared)
        if prepared.whole is None:
            return handle
        return TwoPartHandle(handle, prepared.whole, lambda rest: self._hand_over(self._prepare(rest), is_rest=True))

    def _hand_over(self, prepared: PreparedCall, *, is_rest: bool = False) -> LlmRequestHandle:
        output = self._llm.generate_async(prepared.inputs, **prepared.keywords)
        ends = self._folder.eos_token_ids
        return LlmRequestHandle(output, prepared.request, ends, self._block_size, tells_cached=not is_rest)

    def needs_replay(self, request: GenerateRequest) -> bool:
        """A grammar is matched from the first token of the output: what was sent cannot be part of the prompt."""
        return request.sampling.grammar is not None

    def worst_case_blocks(self, request: GenerateRequest) -> int:
        params = request.sampling
        num_prompt, most = len(request.prompt_token_ids), self._max_cached_tokens(self._block_size)
        return blocks_to_completion(num_prompt, params.max_tokens, params.beam_width, self._block_size, most)

    @property
    def takes_early(self) -> bool:
        """Its scheduler can lock up for good with chunked prefill and block reuse: a request that waited for a prefix
        goes before a later one that has begun, does not fit, and nothing behind it runs. What fits beside all that it
        has does not come to that."""
        return not (self._reuses_blocks and self._plan.arguments.get("enable_chunked_prefill"))

    @property
    def sharing(self) -> BlockSharing:
        """Ranks of data-parallel attention have caches of their own, and a window's blocks go while others need
        them."""
        is_windowed = self._max_cached_tokens(self._block_size) > 0
        if not self._reuses_blocks or is_windowed or self._plan.arguments.get("enable_attention_dp"):
            return BlockSharing.NONE
        return BlockSharing.RUNNING if self._library.version < _CREDITS_CANDIDATES else BlockSharing.AWAITED

    def prompt_chain(self, request: GenerateRequest) -> HashChain | None:
        """None for beams too, and for a prompt under a salt of its own."""
        if request.sampling.beam_width > 1 or _needs_whole_prompt(request):
            return None
        return HashChain(request.cache_salt, self._block_size, request.adapter)

    @property
    def _reuses_blocks(self) -> bool:
        return bool(getattr(self._kv_cache, "enable_block_reuse", True))

    def _max_cached_tokens(self, block_size: int) -> int:
        """Return `EngineInfo.max_cached_tokens`. The longest of several windows counts."""
        window = max(getattr(self._kv_cache, "max_attention_window", None) or (0,))
        return window + block_size if 0 < window < self._plan.max_model_len else 0

    def classify(self, error: Exception, *, at_submit: bool) -> RuntimeFailure:
        return classify(error, at_submit=at_submit)

    def _salt(self, request: GenerateRequest) -> str:
        """Return the salt of the request's blocks. Prompt log probabilities come only of tokens that are computed: a
        random salt keeps all cached blocks away from a request that wants them."""
        salt = secrets.token_hex(_SALT_BYTES) if _needs_whole_prompt(request) else request.cache_salt
        if salt and not self._has_salt:
            raise SluiceError(
                ErrorCode.UNIMPLEMENTED,
                f"TensorRT-LLM {self._library.version} cannot keep KV blocks apart by cache_salt; version 1.2 can",
                param="cache_salt",
            )
        return salt

    # -- health, statistics and the end

    async def is_healthy(self) -> bool:
        try:
            if (loss := worker_loss(self._llm)) is not None:
                log.error("TensorRT-LLM has lost a worker: %s", loss)
                return False
            if self._check_health is not None:
                return bool(self._check_health())
            is_shut_down = getattr(getattr(self._llm, "_executor", None), "is_shutdown", None)
            return is_shut_down is None or not is_shut_down()
        except Exception as error:
            log.error("TensorRT-LLM's health check failed: %s", error)
            return False

    async def observe(self, listener: StatisticsListener, is_busy: asyncio.Event) -> None:
        reader, cached = IterationReader(), CachedBlocks()

        def take_iteration(entry: Mapping[str, Any]) -> None:
            listener.on_iteration(reader.read(entry))

        def take_event(event: Mapping[str, Any]) -> None:
            cached.observe(event)
            listener.on_cached_blocks(len(cached))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow(self._statistics, take_iteration, is_busy, "statistics"))
            if getattr(self._kv_cache, "event_buffer_max_size", 0):
                tasks.create_task(follow(self._kv_cache_events, take_event, is_busy, "KV-cache events"))

    def _statistics(self) -> AsyncIterator[dict[str, Any]]:
        return reopened(self._llm.get_stats_async(timeout=STATS_TIMEOUT_S))

    def _kv_cache_events(self) -> AsyncIterator[dict[str, Any]]:
        return reopened(self._llm.get_kv_cache_events_async(timeout=STATS_TIMEOUT_S))

    def shutdown(self) -> None:
        """Blocks until its workers have ended."""
        self._llm.shutdown()

    # -- the start

    async def start(self) -> tuple[EngineInfo, IterationStats | None]:
        """Generate a token: it proves that the model works, and its statistics show the size of the KV cache."""
        info = self._info(None)
        await warm_up(self, info, stall_timeout_s(self._config.runtime_settings))
        iteration = await self._first_iteration()
        info = self._info(iteration)
        self._block_size = info.block_size
        return info, iteration

    async def _first_iteration(self) -> IterationStats | None:
        try:
            async for entry in self._statistics():
                return read_iteration_stats(entry)
        except Exception as error:
            log.warning("TensorRT-LLM tells no statistics: %s: %s", type(error).__name__, error)
        return None

    def _info(self, iteration: IterationStats | None) -> EngineInfo:
        plan, folder = self._plan, self._folder
        block_size = (iteration and iteration.tokens_per_block) or plan.tokens_per_block
        return EngineInfo(
            runtime=TENSORRT_LLM.runtime.value,
            runtime_version=str(self._library.version),
            model_type=folder.model_type,
            dtype=folder.dtype,
            vocab_size=folder.vocab_size,
            eos_token_ids=folder.eos_token_ids,
            max_model_len=plan.max_model_len,
            block_size=block_size,
            num_blocks=self._num_blocks(block_size, iteration),
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            load_seconds=0.0,
            kv_cache_dtype=str(getattr(self._kv_cache, "dtype", "")),
            quantization=plan.quantization,
            scheduler_policy=self._policy(),
            adapters=tuple(sorted(plan.adapters)),
            max_beam_width=plan.max_beam_width,
            sampling_fields=plan.sampling_fields,
            refused_sampling=dict(plan.sampler.refusals),
            grammar_kinds=grammar_kinds(self._guidance),
            num_gpus=plan.num_gpus,
            max_cached_tokens=self._max_cached_tokens(block_size),
        )

    def _num_blocks(self, block_size: int, iteration: IterationStats | None) -> int:
        """Return the blocks that TensorRT-LLM tells of; else those of the configured tokens; else as many as all its
        requests could ever fill, so that those that do not fit wait in TensorRT-LLM."""
        if iteration is not None and iteration.max_blocks:
            return iteration.max_blocks
        max_tokens = getattr(self._kv_cache, "max_tokens", None)
        if max_tokens:
            return blocks_for(int(max_tokens), block_size)
        return self._plan.max_num_seqs * blocks_for(self._plan.max_model_len, block_size)

    def _policy(self) -> SchedulerPolicy:
        """Return the policy of the arguments, where they have one."""
        policy = getattr(self._plan.arguments.get("scheduler_config"), "capacity_scheduler_policy", None)
        try:
            return SchedulerPolicy(str(getattr(policy, "value", policy)).lower())
        except ValueError:
            return self._config.scheduler_policy


def worker_loss(llm: Any) -> str | None:
    """Return what is known of a worker that ended, None while all live. The library's own front tells nobody of it
    before the next request."""
    front = getattr(llm, "_executor", None)
    errors = getattr(front, "_error_queue", None)
    if errors is not None and not errors.empty():
        return str(errors.queue[0]) if getattr(errors, "queue", None) else "it reported an error"
    ended = next((each for each in getattr(front, "mpi_futures", None) or () if each.done()), None)
    return None if ended is None else str(ended.exception() or "its process ended")


def _needs_whole_prompt(request: GenerateRequest) -> bool:
    return request.sampling.prompt_logprobs is not None and not request.resume_token_ids


def blocks_to_completion(
    num_prompt: int, max_tokens: int, beam_width: int, block_size: int, max_cached_tokens: int = 0
) -> int:
    """Return the blocks that TensorRT-LLM reserves for a request that has not begun, under GUARANTEED_NO_EVICT, without
    credit for blocks that others hold. Whole blocks of the prompt are shared by the beams, no more than
    `max_cached_tokens` stay (0 for all), and the last token counts, though it is never fed back: the rule is its
    `getRemainingBlocksToCompletion`."""
    num_tokens = num_prompt + max_tokens
    if max_cached_tokens:
        num_prompt, num_tokens = min(num_prompt, max_cached_tokens), min(num_tokens, max_cached_tokens)
    shared = num_prompt // block_size
    return shared + (blocks_for(num_tokens, block_size) - shared) * beam_width
