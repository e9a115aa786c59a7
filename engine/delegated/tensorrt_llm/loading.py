"""From a configuration to an LLM that has generated a token, and what it is to be told of as."""

import logging
from pathlib import Path
from typing import Any

import msgspec

from engine.blocks import blocks_for
from engine.config import EngineConfig, SchedulerPolicy
from engine.delegated.tensorrt_llm.configuration.arguments import describe, plan_llm
from engine.delegated.tensorrt_llm.folder import read_folder
from engine.delegated.tensorrt_llm.library import load_library
from engine.delegated.tensorrt_llm.loop.following import first_of
from engine.delegated.tensorrt_llm.loop.llm import Llm
from engine.delegated.tensorrt_llm.loop.probe import one_token
from engine.delegated.tensorrt_llm.loop.statistics import iteration_stats
from engine.delegated.tensorrt_llm.loop.watch import stall_timeout_s
from engine.delegated.tensorrt_llm.sampling.parameters import grammar_kinds
from engine.types import EngineInfo, IterationStats
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)

WARM_UP_STATISTICS_S = 1.0
"""How long the statistics of the first token are waited for."""


def load_llm(config: EngineConfig) -> Llm:
    """Blocks for as long as it takes, minutes for large models. Called with no event loop running, since TensorRT-LLM
    starts loops and processes of its own.

    Raises SluiceError with what is wrong, and what TensorRT-LLM raises.
    """
    stall_timeout_s(config.runtime_settings)  # a wrong one is not to be found out after minutes
    library = load_library()
    tokenizer = None if config.tokenizer_path is None else Path(config.tokenizer_path)
    folder = read_folder(Path(config.model_path), tokenizer)
    plan = plan_llm(config, folder, library)
    for note in plan.notes:
        log.warning(note)
    log.info("TensorRT-LLM %s: %s", library.version, describe(plan))
    return Llm(plan.llm_class(**plan.arguments), plan, library, folder)


async def warm_up(llm: Llm, config: EngineConfig) -> tuple[EngineInfo, IterationStats | None]:
    """Generate a token: it proves that the model works, and its statistics tell the size of the KV cache.

    Returns what the engine is (`load_seconds` is left to who knows), and the statistics, where there are any.
    Raises SluiceError where no token comes, and where TensorRT-LLM says that it is ill.
    """
    info = engine_info(llm, config, None)
    limit_s = stall_timeout_s(config.runtime_settings)
    try:
        output = await one_token(llm, info, "warm-up", limit_s)
    except TimeoutError:
        message = f"TensorRT-LLM loaded the model, but brings no token within {limit_s:g} s"
        raise SluiceError(ErrorCode.INTERNAL, message) from None
    if output.outputs[0].finish_reason not in ("length", "stop"):
        raise SluiceError(ErrorCode.INTERNAL, "TensorRT-LLM loaded the model, but it brings no token")
    if not llm.is_healthy():
        raise SluiceError(ErrorCode.INTERNAL, "TensorRT-LLM loaded the model, but says that it is not healthy")
    stats = await _first_statistics(llm)
    return engine_info(llm, config, stats), stats


async def _first_statistics(llm: Llm) -> IterationStats | None:
    try:
        told = await first_of(llm.statistics(WARM_UP_STATISTICS_S))
        return None if told is None else iteration_stats(told)
    except Exception as error:
        log.warning("TensorRT-LLM tells no statistics: %s: %s", type(error).__name__, error)
        return None


def engine_info(llm: Llm, config: EngineConfig, stats: IterationStats | None) -> EngineInfo:
    """`stats` are those of an iteration, where there are any."""
    plan, folder = llm.plan, llm.folder
    cache = plan.arguments.get("kv_cache_config")
    block_size = (stats and stats.tokens_per_block) or plan.tokens_per_block
    info = EngineInfo(
        runtime="tensorrt_llm",
        runtime_version=str(llm.library.version),
        model_type=folder.model_type,
        dtype=folder.dtype,
        vocab_size=folder.vocab_size,
        eos_token_ids=folder.eos_token_ids,
        max_model_len=plan.max_model_len,
        block_size=block_size,
        num_blocks=0,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        load_seconds=0.0,
        kv_cache_dtype=str(getattr(cache, "dtype", "")),
        quantization=plan.quantization,
        scheduler_policy=_policy(plan.arguments.get("scheduler_config"), config),
        adapters=tuple(sorted(plan.adapters)),
        max_beam_width=plan.max_beam_width,
        sampling_fields=plan.sampling_fields,
        grammar_kinds=grammar_kinds(llm.guided_decoding_backend),
        num_gpus=plan.num_gpus,
    )
    return msgspec.structs.replace(info, num_blocks=_num_blocks(info, cache, stats))


def _num_blocks(info: EngineInfo, cache: Any, stats: IterationStats | None) -> int:
    """As TensorRT-LLM says; else the tokens that were asked for; else as many as its places could ever fill, so that
    what does not fit waits in there."""
    if stats is not None and stats.max_blocks:
        return stats.max_blocks
    max_tokens = getattr(cache, "max_tokens", None)
    if max_tokens:
        return blocks_for(int(max_tokens), info.block_size)
    return info.max_num_seqs * blocks_for(info.max_model_len, info.block_size)


def _policy(scheduler: Any, config: EngineConfig) -> SchedulerPolicy:
    """That of the arguments, where they have one."""
    told = getattr(scheduler, "capacity_scheduler_policy", None)
    try:
        return SchedulerPolicy(str(getattr(told, "value", told)).lower())
    except ValueError:
        return config.scheduler_policy
