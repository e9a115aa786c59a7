"""One loaded model of vLLM as a delegated runtime."""

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from sluice.engine.blocks import HashChain
from sluice.engine.config import EngineConfig, Task
from sluice.engine.delegated.admission import BlockSharing
from sluice.engine.delegated.cached_prefixes import CachedPrefixes
from sluice.engine.delegated.interface import DelegatedRuntime, ExpandedPrompt, RuntimeFailure, TakeIteration
from sluice.engine.delegated.kv_events import EventSubscriber, told_by_keys
from sluice.engine.delegated.vllm.arguments import VllmPlan, check_adapter, plan_vllm
from sluice.engine.delegated.vllm.capacity import CacheCapacity, read_capacity
from sluice.engine.delegated.vllm.images import expand_prompt, find_placeholders
from sluice.engine.delegated.vllm.library import VllmLibrary, load_library
from sluice.engine.delegated.vllm.pooling import (
    PooledRequestHandle,
    check_task,
    let_prompts_fit,
    longest_prompt,
    pooling_params,
)
from sluice.engine.delegated.vllm.responses import VllmRequestHandle, classify
from sluice.engine.delegated.vllm.runtime import VLLM
from sluice.engine.delegated.vllm.sampling import needs_replay, sampling_params
from sluice.engine.delegated.vllm.statistics import StatisticsReader, published_events
from sluice.engine.delegated.watchdog import generate_one_token, stall_timeout_s, warm_up
from sluice.engine.frames import SleepMode
from sluice.engine.statistics import IterationStats
from sluice.engine.types import EngineInfo, GenerateRequest, GrammarKind, SamplingParams
from sluice.errors import ErrorCode, SluiceError, invalid

log = logging.getLogger(__name__)

COMPILE_S = 300.0
"""How long the first request with log probabilities may take: vLLM compiles for it."""


def load_llm(config: EngineConfig) -> "Vllm":
    """Import vLLM and resolve its arguments. It is started on the event loop, which it needs (`Vllm.start`). Raises
    SluiceError with what is wrong."""
    stall_timeout_s(config.runtime_settings)  # a wrong one is not to be found out after minutes
    if config.kv_events_endpoint is not None:
        message = "vLLM publishes by itself: give the setting kv_events_config, not kv_events_endpoint"
        raise invalid("kv_events_endpoint", message)
    library = load_library()
    plan = plan_vllm(config, library)
    log.info("vLLM %s: %s", library.version, plan)
    for note in VLLM.notes_on_ignored(config):
        log.warning("vLLM: %s", note)
    return Vllm(plan, library, config)


@dataclass(frozen=True, slots=True)
class VllmCall:
    """A request as `generate` or `encode` takes it."""

    request: GenerateRequest
    keywords: dict[str, Any]


class Vllm(DelegatedRuntime):
    """An `AsyncLLM` of vLLM."""

    title = VLLM.title

    def __init__(self, plan: VllmPlan, library: VllmLibrary, config: EngineConfig) -> None:
        self._plan = plan
        self._library = library
        self._config = config
        self._statistics = StatisticsReader()
        self._numbers = count(1)
        self._adapter_numbers = count(1)
        self._adapters = {name: self._lora_request(name, path) for name, path in sorted(config.lora_modules.items())}
        """vLLM's LoRARequest of each adapter."""
        self._one_expansion = asyncio.Lock()
        """Admits one prompt at a time: its decoded images may take hundreds of megabytes."""
        self._has_lost_weights = False
        self._llm: Any = None
        self._capacity: CacheCapacity | None = None

    @property
    def _is_pooled(self) -> bool:
        return self._plan.task is not Task.GENERATE

    @property
    def takes_early(self) -> bool:
        """vLLM goes by the prompt, which is all that a pooled request has."""
        return self._is_pooled

    @property
    def sharing(self) -> BlockSharing:
        assert self._capacity is not None
        return BlockSharing.NONE if self._is_pooled else self._capacity.sharing

    # -- requests

    async def expand(self, request: GenerateRequest) -> ExpandedPrompt:
        async with self._one_expansion:
            inputs = await expand_prompt(self._llm, self._library, request)
        return ExpandedPrompt(inputs["prompt_token_ids"], partial(self.prepare, inputs=inputs))

    def prepare(self, request: GenerateRequest, inputs: dict[str, Any] | None = None) -> VllmCall:
        """`inputs` are those of a prompt with images. Raises SluiceError for what vLLM cannot do."""
        ids = [*request.prompt_token_ids, *request.resume_token_ids]
        prompt = {**(inputs or self._library.find("vllm.inputs:tokens_input")(ids)), "prompt_token_ids": ids}
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        keywords: dict[str, Any] = {"prompt": prompt}
        if self._is_pooled:
            num_types = getattr(self._llm.vllm_config.model_config.hf_config, "type_vocab_size", 0)
            keywords["pooling_params"] = pooling_params(self._library, request, self._plan.task, num_types)
            return VllmCall(request, keywords)
        has_tokenizer = self._plan.has_tokenizer
        keywords["sampling_params"] = sampling_params(self._library, request, has_tokenizer=has_tokenizer)
        if request.adapter:
            keywords["lora_request"] = self._adapters[request.adapter]
        return VllmCall(request, keywords)

    def submit(self, prepared: VllmCall) -> VllmRequestHandle:
        # A client's own id need not be unique, and vLLM aborts all requests of an id.
        request_id = f"{next(self._numbers)}-{prepared.request.request_id}"
        call, handle = (
            (self._llm.encode, PooledRequestHandle) if self._is_pooled else (self._llm.generate, VllmRequestHandle)
        )
        outputs = call(request_id=request_id, **prepared.keywords)
        return handle(outputs, prepared.request, lambda: self._llm.abort(request_id))

    def needs_replay(self, request: GenerateRequest) -> bool:
        return needs_replay(request)

    def worst_case_blocks(self, request: GenerateRequest) -> int:
        assert self._capacity is not None
        return self._capacity.worst_case_blocks(len(request.prompt_token_ids), request.sampling.max_tokens)

    def prompt_chain(self, request: GenerateRequest) -> HashChain | None:
        """None for a prompt that is computed anew for its log probabilities."""
        assert self._capacity is not None
        if request.computes_whole_prompt:
            return None
        adapter = self._adapters[request.adapter].lora_name if request.adapter else ""
        return HashChain(request.cache_salt, self._capacity.groups[0].block_size, adapter)

    def classify(self, error: Exception, *, at_submit: bool) -> RuntimeFailure:
        return classify(error)

    # -- adapters at run time

    async def load_adapter(self, name: str, path: str) -> None:
        if self._is_pooled:
            message = f"LoRA adapters are for generation; this model is served for {self._plan.task}"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param="lora_name")
        check_adapter(name, path, self._llm.vllm_config.lora_config)
        made = self._lora_request(name, path)
        try:
            await self._llm.add_lora(made)
        except Exception as error:
            if self.classify(error, at_submit=False).is_fatal:
                raise
            message = f"vLLM does not take LoRA adapter {name} in {path}: {error}"
            raise SluiceError(ErrorCode.INVALID, message, param="lora_path") from error
        self._adapters[name] = made

    async def unload_adapter(self, name: str) -> None:
        """Requests in flight bring the adapter with them: vLLM reads it again where they still need it."""
        await self._llm.remove_lora(self._adapters[name].lora_int_id)
        del self._adapters[name]

    # -- sleep

    def check_sleep(self, level: int, mode: SleepMode) -> None:
        if level and not (self._library.is_on_cpu or self._plan.arguments.get("enable_sleep_mode")):
            message = (
                f"level {level} needs --enable-sleep-mode, or the setting enable_sleep_mode=true; level 0 does not"
            )
            raise invalid("level", message)

    async def sleep(self, level: int, mode: SleepMode) -> None:
        await self._llm.sleep(level, mode)
        self._has_lost_weights = level == 2 and not self._library.is_on_cpu

    async def wake_up(self, tags: list[str] | None) -> bool:
        if self._has_lost_weights and (tags is None or "weights" in tags):
            await self._llm.wake_up(["weights"])
            await self._llm.collective_rpc("reload_weights")
            self._has_lost_weights = False
            if tags is None:
                return bool(await self._llm.wake_up(["kv_cache"]))
            tags = [each for each in tags if each != "weights"] or ["scheduling"]
        return bool(await self._llm.wake_up(tags))

    def _lora_request(self, name: str, path: str) -> Any:
        """Return a request for an adapter under a name and number of its own: vLLM keeps KV blocks apart by the name,
        and another adapter may come under the same one."""
        number = next(self._adapter_numbers)
        made = self._library.find("vllm.lora.request:LoRARequest")
        return made(lora_name=f"{name}-{number}", lora_int_id=number, lora_path=path)

    # -- health, statistics and the end

    async def is_healthy(self) -> bool:
        try:
            await self._llm.check_health()
        except Exception as error:
            log.error("vLLM is not healthy: %s", error)
            return False
        return True

    async def observe(self, take: TakeIteration, is_busy: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._statistics.follow(take))
            if self.prefixes is not None and (published := published_events(self._llm.vllm_config)) is not None:
                tasks.create_task(EventSubscriber(published, self.prefixes, told_by_keys).run())

    def shutdown(self) -> None:
        """Blocks until its processes have ended, or vLLM has killed them."""
        if self._llm is not None:
            self._llm.shutdown()

    # -- the start

    async def start(self) -> tuple[EngineInfo, IterationStats | None]:
        """Start vLLM's processes, and generate two tokens: one proves that the model works, and one with log
        probabilities lets vLLM compile what it needs for these, which takes seconds in which nobody gets a token."""
        base = self._library.find("vllm.v1.metrics.loggers:PrometheusStatLogger")
        arguments = self._library.find("vllm.engine.arg_utils:AsyncEngineArgs")
        try:
            given = arguments(**self._plan.arguments)
            if self._is_pooled:
                let_prompts_fit(given)
            vllm_config = given.create_engine_config()
            self._llm = self._library.find("vllm.v1.engine.async_llm:AsyncLLM").from_vllm_config(
                vllm_config, stat_loggers=[self._statistics.logger_class(base)], disable_log_stats=True
            )
        except (ValueError, TypeError, NotImplementedError) as error:
            raise SluiceError(ErrorCode.INVALID, f"vLLM {self._library.version} cannot start so: {error}") from error
        self._library.find("vllm.envs:enable_envs_cache")()  # each token would read the environment's variables anew
        if self._is_pooled:
            check_task(vllm_config.model_config, await self._llm.get_supported_tasks(), self._plan.task)
        metadata = await self._llm.engine_core.call_utility_async("get_kv_cache_group_metadata")
        self._capacity = read_capacity(self._llm.vllm_config, metadata)
        self._statistics.num_blocks = self._capacity.num_blocks
        info = self._info(self._capacity)
        if published_events(self._llm.vllm_config) is not None:
            self.prefixes = CachedPrefixes(info.block_size)
        await warm_up(self, info, stall_timeout_s(self._config.runtime_settings))
        if self._is_pooled:
            return info, None
        with_logprobs = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=1)
        await generate_one_token(self, info, "warm-up-logprobs", COMPILE_S, with_logprobs)
        return info, None

    def _info(self, capacity: CacheCapacity) -> EngineInfo:
        vllm_config = self._llm.vllm_config
        model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
        return EngineInfo(
            runtime=VLLM.runtime.value,
            runtime_version=str(self._library.version),
            model_type=str(getattr(model.hf_text_config, "model_type", "unknown")),
            dtype=str(model.dtype).removeprefix("torch."),
            vocab_size=int(model.get_vocab_size()),
            eos_token_ids=self._eos_token_ids(),
            # A prompt that is pooled leaves no room for output, of which every engine counts one token.
            max_model_len=longest_prompt(model) + 1 if self._is_pooled else int(model.max_model_len),
            block_size=int(cache.block_size),
            num_blocks=capacity.num_blocks,
            max_num_seqs=int(vllm_config.scheduler_config.max_num_seqs),
            max_num_batched_tokens=int(vllm_config.scheduler_config.max_num_batched_tokens),
            load_seconds=0.0,
            kv_cache_dtype=str(cache.cache_dtype),
            quantization=str(model.quantization or "none"),
            scheduler_policy=self._config.scheduler_policy,
            adapters=tuple(self._adapters),
            grammar_kinds=tuple(GrammarKind) if self._plan.has_tokenizer else (),
            refused_sampling={"thinking_token_budget": "thinking budgets are not passed on to vLLM; leave it out"},
            gives_logits=self._is_pooled,
            embedding_size=_output_size(model, self._plan.task),
            is_pooled=self._is_pooled,
            gives_scores=self._plan.task is Task.SCORE,
            can_sleep=self._config.enable_sleep_mode or bool(self._plan.arguments.get("enable_sleep_mode")),
            image_placeholders=() if self._is_pooled else find_placeholders(self._llm, self._library),
            num_gpus=0 if self._library.is_on_cpu else int(parallel.world_size),
        )

    def _eos_token_ids(self) -> tuple[int, ...]:
        """Return the ends that vLLM itself stops at: the tokenizer's, and those of generation_config.json."""
        model = self._llm.vllm_config.model_config
        own = self._llm.tokenizer.eos_token_id if self._plan.has_tokenizer else None
        listed = (model.try_get_generation_config() or {}).get("eos_token_id")
        ids = (own, *(listed if isinstance(listed, list) else (listed,)))
        return tuple(dict.fromkeys(each for each in ids if isinstance(each, int)))


def _output_size(model: Any, task: Task) -> int:
    """Return how many numbers a pooled request brings; 0 for a model that generates."""
    match task:
        case Task.EMBED:
            return int(model.embedding_size)
        case Task.SCORE:
            return 1
    return 0
