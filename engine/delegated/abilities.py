"""Abilities that only some runtimes have: LoRA adapters that come and go, and prompts with images."""

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from sluice.engine.config import EngineConfig
from sluice.engine.delegated.interface import AdapterRuntime, DelegatedRuntime
from sluice.engine.delegated.sequence import Rendered
from sluice.engine.frames import AdapterOutcome, LoadAdapter, Submit, UnloadAdapter
from sluice.engine.scheduling.admission import check_reported_queue
from sluice.engine.statistics import EngineStats
from sluice.engine.types import EngineInfo, GenerateRequest
from sluice.engine.validation import check_request, num_tokens_after
from sluice.errors import ErrorCode, SluiceError
from sluice.log_relay import about

log = logging.getLogger(__name__)


async def change_adapters(
    runtime: DelegatedRuntime, command: LoadAdapter | UnloadAdapter, adapters: Collection[str]
) -> AdapterOutcome:
    """Load or unload an adapter beside those that are loaded, and return the answer."""
    name, names = command.name, {*adapters}
    try:
        if not isinstance(runtime, AdapterRuntime):
            message = f"{runtime.title} has its LoRA adapters from its start on; give them with --lora-modules"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param="lora_name")
        if isinstance(command, LoadAdapter):
            await runtime.load_adapter(name, command.path)
            names.add(name)
        else:
            await runtime.unload_adapter(name)
            names.discard(name)
    except SluiceError as error:
        return AdapterOutcome(name, error.code, error.message)
    except Exception as error:
        log.exception("%s cannot change LoRA adapter %s", runtime.title, name)
        message = f"{runtime.title} cannot change LoRA adapter {name}: {error}"
        return AdapterOutcome(name, ErrorCode.INTERNAL, message)
    return AdapterOutcome(name, adapters=tuple(sorted(names)), digests=dict(runtime.adapter_digests))


class ExpandedPrompt(NamedTuple):
    """A prompt with its images in the place of their placeholders."""

    token_ids: list[int]
    prepare: Callable[[GenerateRequest], Any]
    """Does what `DelegatedRuntime.prepare` does, for a request with this prompt."""
    goes_on: bool = True
    """Whether an answer can go on after `resume_token_ids`; else it is generated anew."""


@runtime_checkable
class ImageRuntime(DelegatedRuntime, Protocol):
    """A runtime whose prompts may have images: as many as `EngineInfo.image_placeholders`."""

    async def expand(self, request: GenerateRequest) -> ExpandedPrompt:
        """Return the request's prompt with the tokens of its images. Raises SluiceError for images that cannot be
        used."""
        ...


class Renderings:
    """The requests whose images are being turned into tokens, before they can be queued. Used on the executor's
    loop."""

    def __init__(
        self,
        runtime: DelegatedRuntime,
        config: EngineConfig,
        clock: Callable[[], float],
        on_rendered: Callable[[Submit, Rendered | SluiceError], None],
    ) -> None:
        self._runtime = runtime
        self._config = config
        self._clock = clock
        self._on_rendered = on_rendered
        self.tasks: dict[int, asyncio.Task[None]] = {}
        """By stream id."""

    def start(self, command: Submit, info: EngineInfo, stats: EngineStats) -> None:
        """Raises SluiceError for a request that cannot be served, and where the queue is full already."""
        check_request(command.request, info)
        if not command.was_accepted:
            check_reported_queue(stats, info.max_num_seqs, self._config)
        self.tasks[command.stream_id] = asyncio.create_task(self._run(command, info, self._clock()))

    def cancel(self, stream_id: int) -> bool:
        """Forget a request. Returns whether there was one."""
        task = self.tasks.pop(stream_id, None)
        if task is not None:
            task.cancel()
        return task is not None

    async def _run(self, command: Submit, info: EngineInfo, submitted_at: float) -> None:
        assert isinstance(self._runtime, ImageRuntime), "EngineInfo.image_placeholders say so"
        outcome: Rendered | SluiceError
        try:
            expanded = await self._runtime.expand(command.request)
            request = _with_prompt(command.request, expanded.token_ids, info)
            outcome = Rendered(request, expanded.prepare, submitted_at, expanded.goes_on)
        except SluiceError as error:
            outcome = error
        except Exception:
            id_ = command.request.request_id
            log.exception("the images of request %s cannot be prepared", id_, extra=about(id_))
            outcome = SluiceError(ErrorCode.INTERNAL, "the engine failed to prepare these images; its log says why")
        del self.tasks[command.stream_id]
        self._on_rendered(command, outcome)


def _with_prompt(request: GenerateRequest, token_ids: list[int], info: EngineInfo) -> GenerateRequest:
    sampling = request.sampling
    if request.fits_context:
        max_tokens = min(sampling.max_tokens, num_tokens_after(len(token_ids), info))
        sampling = msgspec.structs.replace(sampling, max_tokens=max_tokens)
    return msgspec.structs.replace(request, prompt_token_ids=token_ids, sampling=sampling, images=[])
