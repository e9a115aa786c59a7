"""Images in prompts: the tokens that TensorRT-LLM's input processor of a model puts in their place.

The processor runs here, before the request is queued, since admission counts its tokens; `generate_async` then gets
what it made. From 1.3 on `LLM.preprocess` does both. Before, `generate_async` runs the processor itself, on the event
loop: what was made already is handed to it in the processor's place.

Most processors take text alone, so that a prompt's tokens become text and tokens again. What a message spells like a
control token would then be one: such prompts are refused.
"""

import asyncio
import logging
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from io import BytesIO
from typing import Any, NamedTuple

from sluice.engine.delegated.tensorrt_llm.folder import LlmFolder
from sluice.engine.delegated.tensorrt_llm.library import TensorRtLlmLibrary
from sluice.engine.model_folder import ModelFormat, read_json
from sluice.engine.types import GenerateRequest
from sluice.errors import invalid

log = logging.getLogger(__name__)

IMAGE = "image"
MAX_IMAGES = 64
"""Most images of a prompt, of which TensorRT-LLM has no bound."""
_MADE = "made"
"""The key of a prompt in which the processor of earlier versions finds what it made before."""
_TRIAL_SIZE = (224, 224)
_AT_FAULT = (ValueError, TypeError, LookupError, AssertionError, OSError)
"""Exceptions of processors for images that they do not take, and for a prompt without a placeholder for each. Others,
such as a lack of memory, are no fault of the client's."""


class Processed(NamedTuple):
    """A prompt as a processor made it."""

    token_ids: list[int]
    inputs: Any
    """The prompt as `generate_async` takes it."""
    is_told_apart: bool
    """Whether KV blocks of its images are those of the same images alone."""
    hold: "SharedTensors | None" = None


class SharedTensors:
    """Tensors in shared memory, which nobody would free before TensorRT-LLM's worker has opened them: those of a prompt
    that is dropped instead are opened here."""

    def __init__(self, params: Any) -> None:
        self._freeing = weakref.finalize(self, params.to_tensor, "multimodal_data")
        self._freeing.atexit = False

    def hand_over(self) -> None:
        """TensorRT-LLM has them."""
        self._freeing.detach()


class Turns:
    """Lets one in at a time, and those who wait in turn: the answers of a client that wants many bring their images one
    by one, and others come in between."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By who waits, the next one first."""
        self._is_taken = False

    @asynccontextmanager
    async def take(self, who: str) -> AsyncIterator[None]:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(who, deque()).append(mine)
        self._go_on()
        try:
            await mine
            yield
        finally:
            self._is_taken &= mine.cancelled()  # who was cancelled while waiting had no turn
            self._go_on()

    def _go_on(self) -> None:
        while self._waiting and not self._is_taken:
            who = next(iter(self._waiting))
            rest = self._waiting.pop(who)
            turn = rest.popleft()
            if rest:
                self._waiting[who] = rest  # behind the others
            if not turn.done():
                self._is_taken = True
                turn.set_result(None)


class ImagePrompts:
    """Makes inputs of prompts with images, one at a time and off the event loop: processors share a tokenizer, which
    only one thread may use, and the images of one prompt may take hundreds of megabytes."""

    def __init__(self, llm: Any, library: TensorRtLlmLibrary, folder: LlmFolder) -> None:
        self._llm = llm
        self._library = library
        self._folder = folder
        self._processor: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="images")
        self._turns = Turns()
        self.placeholders: tuple[str, ...] = ()
        """`EngineInfo.image_placeholders`. Known after `start`."""

    async def start(self) -> None:
        """Find out what the model takes, and try it: at its first prompt a processor notes, for good, whether it can
        tell images apart in the cache, and that prompt must not be a client's faulty one."""
        try:
            text = self._placeholder()
            if text is None:
                return
            self._processor = self._llm.input_processor
            if not self._preprocesses:
                self._llm.input_processor = _Made(self._processor)
            await self._run(partial(self._try, text.format(1)))
        except Exception:
            log.exception("TensorRT-LLM's processor of this model fails; it is served without images")
            return
        self.placeholders = tuple(text.format(number) for number in range(1, MAX_IMAGES + 1))

    async def process(self, request: GenerateRequest, resumed: Sequence[int] = ()) -> Processed:
        """Return the request's prompt, and `resumed` after it, with the tokens of its images. Raises INVALID."""
        try:
            token_ids = [*request.prompt_token_ids, *resumed]
            async with self._turns.take(request.request_id):
                return await self._run(lambda: self._process(token_ids, [_decode(each) for each in request.images]))
        except _AT_FAULT as error:
            log.info("request %s: %s: %s", request.request_id, type(error).__name__, error)
            message = (
                f"messages have images that TensorRT-LLM cannot use: {error}. The prompt must have a placeholder for "
                f"each of its {len(request.images)} images"
            )
            raise invalid("messages", message) from error

    async def _run(self, work: Callable[[], Processed]) -> Processed:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _placeholder(self) -> str | None:
        """Return the text that stands for an image, which may have a place for its number; None for a model of text."""
        registry = getattr(self._library.inputs, "MULTIMODAL_PLACEHOLDER_REGISTRY", None)
        if registry is None or self._folder.format is not ModelFormat.HUGGINGFACE:
            return None
        model_type = str(read_json(self._folder.path / "config.json").get("model_type"))
        return str(registry.get_placeholder(model_type, IMAGE)) if registry.is_valid(model_type, IMAGE) else None

    # -- on the thread

    @property
    def _preprocesses(self) -> bool:
        return hasattr(self._llm, "preprocess")

    def _try(self, placeholder: str) -> Processed:
        from PIL import Image  # TensorRT-LLM brings it along

        return self._process(self._tokens(placeholder), [Image.new("RGB", _TRIAL_SIZE, "gray")])

    def _process(self, token_ids: list[int], images: list[Any]) -> Processed:
        prompt = {"multi_modal_data": {IMAGE: images}, "mm_processor_kwargs": {}}
        params = self._library.llmapi.SamplingParams(end_id=0, pad_id=0, add_special_tokens=False)
        takes_tokens = self._preprocesses and getattr(self._processor, "supports_token_id_mm_expansion", False)
        text = "" if takes_tokens else self._text(token_ids)
        if self._preprocesses:
            inputs = self._llm.preprocess({"prompt_token_ids": token_ids, **prompt}, params)
            shared = inputs.multimodal_params
            is_told_apart = getattr(shared, "multimodal_input", None) is not None
            hold = None if shared is None else SharedTensors(shared)
            return Processed(list(inputs.prompt_token_ids), inputs, is_told_apart, hold)
        run = self._library.inputs.create_input_processor_with_hash(self._processor)
        made = run({"prompt": text, **prompt}, params)
        is_told_apart = bool(made[1]) and made[1].get("multimodal_input") is not None
        return Processed(list(made[0]), {"prompt": "", _MADE: made}, is_told_apart)

    def _tokens(self, text: str) -> list[int]:
        return list(self._llm.tokenizer.encode(text, add_special_tokens=False))

    def _text(self, token_ids: list[int]) -> str:
        """Return the prompt as text. Raises ValueError where its tokens would not be the same control tokens."""
        tokenizer = self._llm.tokenizer
        text = str(tokenizer.decode(token_ids))
        again = self._tokens(text)
        # Without control tokens: those that were text before are missing afterwards.
        plain, plain_again = (tokenizer.decode(each, skip_special_tokens=True).split() for each in (token_ids, again))
        if plain != plain_again:
            raise ValueError("a message spells a control token of the model, which its processor would take for one")
        return text


def _decode(file: bytes) -> Any:
    """Return an image in the form that TensorRT-LLM's own server makes of it. Raises ValueError or OSError."""
    from PIL import Image

    try:
        image: Image.Image = Image.open(BytesIO(file))
    except Image.DecompressionBombError as error:  # known before it is decoded
        raise ValueError(str(error)) from error
    if image.mode == "RGBA":
        white = Image.new("RGB", image.size, "white")
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image.convert("RGB")


class _Made:
    """The input processor of an LLM before 1.3, which has made some prompts already."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __call__(self, inputs: Any, params: Any) -> Any:
        return inputs[_MADE] if _MADE in inputs else self._processor(inputs, params)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)
