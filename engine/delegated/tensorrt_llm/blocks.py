"""The KV blocks that TensorRT-LLM reserves for requests, and those that they share."""

from packaging.version import Version

from sluice.engine.blocks import blocks_for
from sluice.engine.delegated.admission import BlockSharing
from sluice.engine.delegated.tensorrt_llm.configuration.plan import LlmPlan
from sluice.engine.statistics import IterationStats
from sluice.engine.types import GenerateRequest

CREDITS_SINCE = Version("1.3.0rc5")
"""From here on the blocks that others hold are not reserved for a request that is to begin (pulls 11490, 11637)."""


class BlockRules:
    """The rules of one loaded LLM."""

    def __init__(self, plan: LlmPlan, version: Version) -> None:
        self._plan = plan
        self._version = version
        self._config = plan.arguments.get("kv_cache_config")
        self.size = plan.tokens_per_block
        """Tokens of a block; the statistics may tell another."""

    @property
    def are_reused(self) -> bool:
        return bool(getattr(self._config, "enable_block_reuse", True))

    @property
    def max_cached_tokens(self) -> int:
        """`EngineInfo.max_cached_tokens`. The longest of several windows counts."""
        window = max(getattr(self._config, "max_attention_window", None) or (0,))
        return window + self.size if 0 < window < self._plan.max_model_len else 0

    @property
    def takes_early(self) -> bool:
        """Whether requests may come early. Its scheduler can lock up for good with chunked prefill and block reuse: a
        request that waited for a prefix goes before a later one that has begun, does not fit, and nothing behind it
        runs. What fits beside all that it has does not come to that."""
        return not (self.are_reused and self._plan.arguments.get("enable_chunked_prefill"))

    @property
    def sharing(self) -> BlockSharing:
        """Which blocks it holds once. Ranks of data-parallel attention have caches of their own, and a window's blocks
        go while others need them."""
        is_windowed = self.max_cached_tokens > 0
        if not self.are_reused or is_windowed or self._plan.arguments.get("enable_attention_dp"):
            return BlockSharing.NONE
        return BlockSharing.RUNNING if self._version < CREDITS_SINCE else BlockSharing.AWAITED

    def worst_case(self, request: GenerateRequest) -> int:
        params = request.sampling
        lengths = len(request.prompt_token_ids), params.max_tokens
        return blocks_to_completion(*lengths, params.beam_width, self.size, self.max_cached_tokens)

    def num_blocks(self, iteration: IterationStats | None) -> int:
        """Return the blocks that TensorRT-LLM tells of; else those of the configured tokens; else as many as all its
        requests could ever fill, so that those that do not fit wait in TensorRT-LLM."""
        if iteration is not None and iteration.max_blocks:
            return iteration.max_blocks
        if max_tokens := getattr(self._config, "max_tokens", None):
            return blocks_for(int(max_tokens), self.size)
        return self._plan.max_num_seqs * blocks_for(self._plan.max_model_len, self.size)


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
