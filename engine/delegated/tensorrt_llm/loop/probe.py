"""One token for nobody: whether TensorRT-LLM still generates."""

import asyncio
from typing import Any

from engine.delegated.tensorrt_llm.loop.llm import Llm
from engine.types import EngineInfo, GenerateRequest, SamplingParams


async def one_token(llm: Llm, info: EngineInfo, request_id: str, limit_s: float) -> Any:
    """The whole RequestOutput. Raises TimeoutError after `limit_s`, and what TensorRT-LLM raises."""
    # A prompt of this token alone cannot be found in the cache by any other.
    token_id = info.eos_token_ids[0] if info.eos_token_ids else 0
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)  # so that it ends by its length
    request = GenerateRequest(request_id=request_id, prompt_token_ids=[token_id], sampling=params)
    async with asyncio.timeout(limit_s):
        output = llm.generate(llm.prepare(request))
        async for _ in output:
            pass
    return output
