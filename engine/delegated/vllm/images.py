"""Images in prompts: how many a model takes, and the tokens that vLLM's processor of the model puts in their place.

The processor runs here, before the request is queued, since admission counts its tokens. Its cache must then be the one
that stays in this process: vLLM's other one notes what the core has, and a request that never gets there, or gets there
after a later one, would make that wrong.
"""

import asyncio
import logging
import time
from typing import Any

from sluice.engine.delegated.vllm.library import VllmLibrary
from sluice.engine.types import GenerateRequest
from sluice.errors import ErrorCode, SluiceError, invalid

log = logging.getLogger(__name__)

IMAGE = "image"
MAX_IMAGES = 64
"""Most images of a prompt, where vLLM would take hundreds."""


def find_placeholders(llm: Any, library: VllmLibrary) -> tuple[str, ...]:
    """Return the texts that stand for the images of a prompt, none for a model of text alone. A text is empty where
    the model has none: then its chat template writes it."""
    model_config, processor = llm.vllm_config.model_config, llm.renderer.mm_processor
    if processor is None:
        return ()
    most = min(int(processor.info.allowed_mm_limits.get(IMAGE, 0)), MAX_IMAGES)
    placeholder = library.find("vllm.model_executor.model_loader:get_model_cls")(model_config).get_placeholder_str
    return tuple(placeholder(IMAGE, number) or "" for number in range(1, most + 1))


async def expand_prompt(llm: Any, library: VllmLibrary, request: GenerateRequest) -> dict[str, Any]:
    """Return a prompt with its images as `AsyncLLM.generate` takes it. Raises INVALID for images that the model's
    processor does not take, and for a prompt without a placeholder for each."""
    load = library.find("vllm.multimodal.media.image:ImageMediaIO")
    options = llm.vllm_config.model_config.multimodal_config.media_io_kwargs.get(IMAGE, {})

    def decode() -> list[Any]:
        return [load(**options).load_bytes(each) for each in request.images]

    try:
        prompt = {
            "prompt_token_ids": request.prompt_token_ids,
            "multi_modal_data": {IMAGE: await asyncio.to_thread(decode)},
        }
        inputs = await llm.renderer.process_for_engine_async(prompt, time.time(), skip_mm_cache=True)
    except (RuntimeError, AssertionError) as error:  # vLLM's search for placeholders raises both
        log.info("request %s: %s", request.request_id, error)
        message = f"the prompt must have a placeholder for each of its {len(request.images)} images: {error}"
        raise invalid("messages", message) from error
    except (ValueError, TypeError, OSError) as error:
        log.info("request %s: %s", request.request_id, error)
        raise invalid("messages", f"vLLM cannot use the images of this prompt: {error}") from error
    if inputs["type"] != "multimodal":
        raise SluiceError(ErrorCode.INTERNAL, f"vLLM made {inputs['type']} inputs of a prompt with images")
    return dict(inputs)
