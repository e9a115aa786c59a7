"""One loaded LLM of TensorRT-LLM as a delegated runtime, in every version."""

import asyncio
import inspect
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sluice.engine.blocks import HashChain
from sluice.engine.config import EngineConfig, EngineRole, SchedulerPolicy
from sluice.engine.delegated.admission import BlockSharing
from sluice.engine.delegated.cached_prefixes import CachedPrefixes
from sluice.engine.delegated.interface import EngineLost, ExpandedPrompt, RequestHandle, TakeIteration
from sluice.engine.delegated.tensorrt_llm.adapters import Adapters, find_room
from sluice.engine.delegated.tensorrt_llm.blocks import BlockRules
from sluice.engine.delegated.tensorrt_llm.configuration.plan import LlmPlan, plan_llm
from sluice.engine.delegated.tensorrt_llm.disaggregation import (
    ContextHandle,
    Disaggregation,
    GenerationHandle,
    PendingBlocks,
    block_identity,
)
from sluice.engine.delegated.tensorrt_llm.events import check_events, follow_events, has_events
from sluice.engine.delegated.tensorrt_llm.folder import LlmFolder, read_folder
from sluice.engine.delegated.tensorrt_llm.grammars import grammar_kinds
from sluice.engine.delegated.tensorrt_llm.images import ImagePrompts, Processed
from sluice.engine.delegated.tensorrt_llm.library import TensorRtLlmLibrary, load_library
from sluice.engine.delegated.tensorrt_llm.loaded import LoadedLlm, worker_loss
from sluice.engine.delegated.tensorrt_llm.pooling import TensorRtEncoder
from sluice.engine.delegated.tensorrt_llm.responses import (
    LlmRequestHandle,
    TwoPartHandle,
    first_part,
    refused_arguments,
)
from sluice.engine.delegated.tensorrt_llm.sampling import budget_refusal, sampling_params
from sluice.engine.delegated.tensorrt_llm.sleeping import Sleeper
from sluice.engine.delegated.tensorrt_llm.statistics import IterationReader, first_iteration, follow
from sluice.engine.delegated.watchdog import ONE_TOKEN, stall_timeout_s, warm_up
from sluice.engine.frames import SleepMode
from sluice.engine.statistics import HandoverStats, IterationStats
from sluice.engine.types import EngineInfo, GenerateRequest
from sluice.errors import ErrorCode, SluiceError

_QUEUE = ("scheduler_config", "waiting_queue_policy")
_AFFINITY = ("attention_dp_config", "kv_cache_routing_conversation_affinity")


class RequestPlace:
    """Tells `generate_async` of a request's place, where the LLM was started for it: in TensorRT-LLM's own queue, and
    among the ranks of data-parallel attention. Our queue orders requests before they are handed over; TensorRT-LLM's
    has only the few that come early, and takes them by priority where `scheduler_config.waiting_queue_policy` says so.
    """

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


log = logging.getLogger(__name__)

_SALT_BYTES = 16


def load_llm(config: EngineConfig) -> "TensorRtLlm | TensorRtEncoder":
    """Load the model, which may take minutes. Called with no event loop running, since TensorRT-LLM starts loops and
    processes of its own. Raises SluiceError with what is wrong, and what TensorRT-LLM raises."""
    stall_timeout_s(config.runtime_settings)  # a wrong one is not to be found out after minutes
    library = load_library()
    tokenizer = None if config.tokenizer_path is None else Path(config.tokenizer_path)
    folder = read_folder(Path(config.model_path), tokenizer)
    plan = plan_llm(config, folder, library)
    if config.kv_events_endpoint is not None:
        check_events(plan.arguments)
    for note in plan.notes:
        log.warning(note)
    log.info("TensorRT-LLM %s: %s", library.version, plan)
    identity = _identity(plan, library, config.model_path)  # the library writes over configurations that it gets
    try:
        llm = plan.llm_class(**plan.arguments)
    except ValueError as error:
        raise refused_arguments(error, library.version) or error from error
    if plan.encoder is not None:
        return TensorRtEncoder(llm, plan, plan.encoder, library, folder, config)
    return TensorRtLlm(llm, plan, library, folder, config, identity)


def _identity(plan: LlmPlan, library: TensorRtLlmLibrary, model_path: str) -> str:
    if plan.sampler.is_compiled:
        return ""
    sizes = (plan.quantization, plan.tokens_per_block, plan.max_model_len)
    return block_identity(plan.arguments, library, model_path, sizes)


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A request as `generate_async` takes it."""

    request: GenerateRequest
    inputs: Any
    keywords: dict[str, Any]
    whole: GenerateRequest | None = None
    """The request of which this is the first part."""
    images: Processed | None = None
    """The prompt, where it has images."""
    transfer: PendingBlocks | None = None
    """Where a request that another engine has begun is fetched."""


class TensorRtLlm(LoadedLlm):
    """An LLM that generates. `submit` needs a running event loop; the responses are read on it too."""

    def __init__(
        self,
        llm: Any,
        plan: LlmPlan,
        library: TensorRtLlmLibrary,
        folder: LlmFolder,
        config: EngineConfig,
        identity: str = "",
    ) -> None:
        """`identity` is that of its blocks."""
        super().__init__(llm, plan, library, folder, config)
        self._blocks = BlockRules(plan, library.version)
        backend = plan.arguments.get("guided_decoding_backend")
        self._guidance = None if backend is None else str(backend)
        self._adapters = Adapters(library, plan.adapters, find_room(plan.arguments, folder))
        self._sleeper = Sleeper(llm, library.version, can_release=plan.arguments.get("sleep_config") is not None)
        self._is_busy = asyncio.Event()
        self._has_salt = "cache_salt" in inspect.signature(llm.generate_async).parameters
        self._place = RequestPlace(llm, plan.arguments, library)
        self._disaggregation = Disaggregation(plan.arguments, library, identity)
        self._images = ImagePrompts(llm, library, folder)

    # -- requests

    async def expand(self, request: GenerateRequest) -> ExpandedPrompt:
        """The output that an earlier engine sent goes through the processor too, which may read other tokens in it."""
        sent = [] if self.needs_replay(request) else request.resume_token_ids
        processed = await self._images.process(request, sent)
        goes_on = processed.token_ids[len(processed.token_ids) - len(sent) :] == sent
        if not goes_on:
            sent, processed = [], await self._images.process(request)
        prompt = processed.token_ids[: len(processed.token_ids) - len(sent)]
        return ExpandedPrompt(prompt, partial(self.prepare, images=processed), goes_on)

    def prepare(self, request: GenerateRequest, images: Processed | None = None) -> PreparedCall:
        """`images` is the prompt of a request with images. Raises SluiceError for what TensorRT-LLM, or this version of
        it, cannot do."""
        first = first_part(request, self._folder, has_images=images is not None)
        if first is not None:
            return replace(self._prepare(first), whole=request)
        return self._prepare(request, images)

    def _prepare(self, request: GenerateRequest, images: Processed | None = None, adapter: Any = None) -> PreparedCall:
        """`adapter` is the library's request for an adapter, in place of that which has the name now."""
        params = sampling_params(self._library, request, self._folder, self._guidance, self._plan.sampler)
        # The tokens of a beam search may all change until its end.
        keywords: dict[str, Any] = {"sampling_params": params, "streaming": request.sampling.beam_width == 1}
        keywords |= self._place.keywords(request)
        if adapter is not None or request.adapter:
            keywords["lora_request"] = adapter or self._adapters.request(request.adapter)
        if salt := self._salt(request, images):
            keywords["cache_salt"] = salt
        if request.hands_over:
            keywords |= {"disaggregated_params": self._disaggregation.context_params(), "streaming": False}
        ids = [*request.prompt_token_ids, *request.resume_token_ids]
        return PreparedCall(request, ids if images is None else images.inputs, keywords, images=images)

    def take_over(self, prepared: PreparedCall, handover: bytes) -> PreparedCall:
        return replace(prepared, transfer=self._disaggregation.read(handover))

    def handover_stats(self) -> HandoverStats | None:
        return self._disaggregation.stats(self._blocks.size)

    def submit(self, prepared: PreparedCall) -> RequestHandle:
        """Raises EngineLost where a worker is gone: TensorRT-LLM would shut down first, on this thread, and wait for
        ranks that may never end."""
        if (loss := worker_loss(self._llm)) is not None:
            raise EngineLost(f"a worker is gone: {loss}")
        if prepared.transfer is not None:
            if time.monotonic() < prepared.transfer.due:
                return self._fetch(prepared, prepared.transfer)
            self._disaggregation.num_late += 1
        handle = self._hand_over(prepared)
        if prepared.whole is None:
            return handle
        adapter = prepared.keywords.get("lora_request")  # the name may mean another by then, or none
        return TwoPartHandle(
            handle,
            prepared.whole,
            lambda rest: self._hand_over(self._prepare(rest, adapter=adapter), is_rest=True),
        )

    def _fetch(self, prepared: PreparedCall, transfer: PendingBlocks) -> GenerationHandle:
        request, keywords = prepared.request, {**prepared.keywords, "disaggregated_params": transfer.params}
        handle = self._hand_over(replace(prepared, keywords=keywords), is_rest=True)
        num_moved = (len(request.prompt_token_ids) - 1) // self._blocks.size * self._blocks.size
        return GenerationHandle(
            self._disaggregation, handle, request, num_moved, lambda: self.submit(self._prepare(request))
        )

    def _hand_over(self, prepared: PreparedCall, *, is_rest: bool = False) -> LlmRequestHandle:
        keywords = prepared.keywords
        if self._sleeper.salt:
            keywords = {**keywords, "cache_salt": self._sleeper.salt + keywords.get("cache_salt", "")}
        output = self._llm.generate_async(prepared.inputs, **keywords)
        if prepared.images is not None and prepared.images.hold is not None:
            prepared.images.hold.hand_over()
        of_output = (output, prepared.request, self._folder.eos_token_ids, self._blocks.size)
        if prepared.request.hands_over:
            return ContextHandle(*of_output, asked=keywords["disaggregated_params"])
        return LlmRequestHandle(*of_output, tells_cached=not is_rest)

    def needs_replay(self, request: GenerateRequest) -> bool:
        """A grammar is matched from the first token of the output: what was sent cannot be part of the prompt."""
        return request.sampling.grammar is not None

    def worst_case_blocks(self, request: GenerateRequest) -> int:
        return self._blocks.worst_case(request)

    @property
    def takes_early(self) -> bool:
        return self._blocks.takes_early

    @property
    def sharing(self) -> BlockSharing:
        return self._blocks.sharing

    def prompt_chain(self, request: GenerateRequest) -> HashChain | None:
        """None for beams too, and for a prompt under a salt of its own."""
        if request.sampling.beam_width > 1 or request.computes_whole_prompt:
            return None
        return HashChain(request.cache_salt, self._blocks.size, self.adapter_digests.get(request.adapter, ""))

    def _salt(self, request: GenerateRequest, images: Processed | None) -> str:
        """Return the salt of the request's blocks. Prompt log probabilities come only of tokens that are computed, and
        some processors do not tell images apart, whose tokens are all the same: a random salt keeps all cached blocks
        away from such a request."""
        is_alike = images is not None and not images.is_told_apart and self._blocks.are_reused
        is_alone = is_alike or request.computes_whole_prompt
        salt = secrets.token_hex(_SALT_BYTES) if is_alone else request.cache_salt
        if salt and not self._has_salt:
            raise SluiceError(
                ErrorCode.UNIMPLEMENTED,
                f"TensorRT-LLM {self._library.version} cannot keep KV blocks apart by cache_salt; version 1.2 can",
                param="cache_salt",
            )
        return salt

    # -- adapters at run time, and sleep

    @property
    def adapter_digests(self) -> dict[str, str]:
        return self._adapters.digests

    async def load_adapter(self, name: str, path: str) -> None:
        await self._adapters.load(name, path, self._prove)

    async def unload_adapter(self, name: str) -> None:
        self._adapters.unload(name)

    async def _prove(self, lora_request: Any) -> None:
        """Generate a token with an adapter. Raises SluiceError where the library refuses it; asleep, nothing is
        tried."""
        if self._sleeper.is_asleep:
            return
        token_id = next(iter(self._folder.eos_token_ids), 0)
        request = GenerateRequest(request_id="", prompt_token_ids=[token_id], sampling=ONE_TOKEN)
        handle = self.submit(self._prepare(request, adapter=lora_request))
        try:
            async with asyncio.timeout(stall_timeout_s(self._config.runtime_settings)):
                async for response in handle:
                    handle.read(response)
        except TimeoutError:
            handle.abort()
            raise
        except Exception as error:
            if self.classify(error, at_submit=False).is_fatal or not await self.is_healthy():
                raise
            raise SluiceError(ErrorCode.INVALID, str(error)) from error

    def check_sleep(self, level: int, mode: SleepMode) -> None:
        self._sleeper.check(level, mode, self._is_busy)

    async def sleep(self, level: int, mode: SleepMode) -> None:
        salt = self._sleeper.salt
        try:
            await self._sleeper.sleep(level, self._is_busy)
        finally:
            if self.prefixes is not None and self._sleeper.salt != salt:
                self.prefixes.clear(self._sleeper.salt)

    async def wake_up(self, tags: list[str] | None) -> bool:
        return await self._sleeper.wake_up(tags)

    # -- statistics

    async def observe(self, take: TakeIteration, is_busy: asyncio.Event) -> None:
        self._is_busy = is_busy
        reader = IterationReader()

        def take_iteration(entry: Mapping[str, Any]) -> None:
            take(reader.read(entry))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow(self._statistics, take_iteration, is_busy, "statistics"))
            if self.prefixes is not None:
                name_of = self._adapters.name_of
                tasks.create_task(follow_events(self._llm, self._plan.arguments, self.prefixes, name_of, is_busy))

    def _statistics(self, timeout: float) -> Any:
        return self._llm.get_stats_async(timeout=timeout)

    # -- the start

    async def start(self) -> tuple[EngineInfo, IterationStats | None]:
        """Generate a token: it proves that the model works, and its statistics show the size of the KV cache."""
        if not self._plan.sampler.is_compiled:
            await self._images.start()
        info = self._info(None)
        await warm_up(self, info, stall_timeout_s(self._config.runtime_settings))
        iteration = await first_iteration(self._statistics)
        if iteration is not None and iteration.tokens_per_block:
            self._blocks.size = iteration.tokens_per_block
        info = self._info(iteration)
        if has_events(self._plan.arguments):
            self.prefixes = CachedPrefixes(info.block_size)
        return info, iteration

    def _info(self, iteration: IterationStats | None) -> EngineInfo:
        plan = self._plan
        return self.describe(
            block_size=self._blocks.size,
            num_blocks=self._blocks.num_blocks(iteration),
            kv_cache_dtype=str(getattr(plan.arguments.get("kv_cache_config"), "dtype", "")),
            scheduler_policy=self._policy(),
            adapters=tuple(sorted(plan.adapters)),
            adapter_digests=self._adapters.digests,
            can_sleep=self._config.enable_sleep_mode or plan.arguments.get("sleep_config") is not None,
            max_beam_width=plan.max_beam_width,
            sampling_fields=plan.sampling_fields,
            refused_sampling={**plan.sampler.refusals, **budget_refusal(plan.arguments, self._library)},
            grammar_kinds=grammar_kinds(self._guidance),
            max_cached_tokens=self._blocks.max_cached_tokens,
            image_placeholders=self._images.placeholders,
            is_prefill=self._config.role is EngineRole.PREFILL,
            block_identity=self._disaggregation.identity,
            handover_fields=self._disaggregation.fields,
        )

    def _policy(self) -> SchedulerPolicy:
        """Return the policy of the arguments, where they have one."""
        policy = getattr(self._plan.arguments.get("scheduler_config"), "capacity_scheduler_policy", None)
        try:
            return SchedulerPolicy(str(getattr(policy, "value", policy)).lower())
        except ValueError:
            return self._config.scheduler_policy
