"""Creates what an executor needs: the model's runner, the draft model, the drafter, the engine's description."""

from dataclasses import asdict

import msgspec

from sluice.engine.config import EngineConfig, EngineRole, Runtime, Speculation
from sluice.engine.kv_cache import KvCacheManager
from sluice.engine.runners.base import Runner, RunnerInfo
from sluice.engine.speculation.draft_model import DraftModel
from sluice.engine.speculation.drafter import Drafter
from sluice.engine.speculation.ngram import NgramDrafter
from sluice.engine.types import EngineInfo
from sluice.errors import ErrorCode, SluiceError, invalid


def load_runner(config: EngineConfig) -> Runner:
    """Load `config.model_path`. Raises SluiceError if it cannot be loaded, UNAVAILABLE if the runtime's library cannot
    be imported."""
    runtime = Runtime.TORCH if config.runtime is Runtime.TORCH else Runtime.OPENVINO
    try:
        return _load(runtime, config)
    except ImportError as error:
        message = f"--runtime {runtime} cannot be imported: {error}; `sluice doctor` says what this machine has"
        raise SluiceError(ErrorCode.UNAVAILABLE, message, param="runtime") from error


def _load(runtime: Runtime, config: EngineConfig) -> Runner:
    if runtime is Runtime.TORCH:
        from sluice.engine.runners.torch.followers import following

        with following(config.tensor_parallel_size) as followers:
            from sluice.engine.runners.torch.group import (
                load_runner as load_torch,  # imports torch, as its followers do now
            )

            return load_torch(config, followers)
    from sluice.engine.runners.openvino.runner import load_runner as load_openvino

    return load_openvino(config)


def load_draft_runner(config: EngineConfig, info: RunnerInfo) -> Runner | None:
    """Load the draft model of `config`, if any, with as many KV blocks as the model that `info` describes. Raises
    SluiceError if it cannot be loaded, or differs from the model in vocabulary or block size."""
    if config.speculation is not Speculation.DRAFT_MODEL:
        return None
    if config.draft_model_path is None:
        raise invalid("draft_model_path", "speculation with a draft model needs draft_model_path, the model's folder")
    runner = load_runner(
        msgspec.structs.replace(
            config,
            model_path=config.draft_model_path,
            num_blocks=info.num_blocks,
            max_model_len=None,
            tensor_parallel_size=1,  # it is small
            lora_modules={},
            enable_lora=False,
        )
    )
    try:
        _check_draft(runner.info, info)
    except SluiceError:
        runner.close()
        raise
    return runner


def _check_draft(draft: RunnerInfo, info: RunnerInfo) -> None:
    for what, drafts, models in (
        ("vocabulary", draft.vocab_size, info.vocab_size),
        ("block size", draft.block_size, info.block_size),
    ):
        if drafts != models:
            raise invalid(
                "draft_model_path", f"the draft model must have the model's {what}, {models}; it has {drafts}"
            )
    if draft.max_model_len < info.max_model_len:
        raise invalid(
            "draft_model_path",
            f"the draft model's context of {draft.max_model_len} tokens is shorter than the {info.max_model_len} that "
            f"are served; lower max_model_len to it",
        )


def make_drafter(config: EngineConfig, kv: KvCacheManager, draft_runner: Runner | None) -> Drafter | None:
    """Create the source of draft tokens that `config` selects, None without speculation."""
    match config.speculation:
        case Speculation.OFF:
            return None
        case Speculation.NGRAM:
            return NgramDrafter(config.num_speculative_tokens)
        case Speculation.DRAFT_MODEL:
            assert draft_runner is not None, "the draft model is loaded before"
            return DraftModel(draft_runner, kv, config.num_speculative_tokens, config.max_num_batched_tokens)


def engine_info(runner: Runner, config: EngineConfig) -> EngineInfo:
    """Describe, for clients, the engine that serves `runner`."""
    return EngineInfo(
        **asdict(runner.info),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        scheduler_policy=config.scheduler_policy,
        load_seconds=0.0,
        gives_logits=True,
        is_prefill=config.role is EngineRole.PREFILL,
        gives_views=True,
    )
