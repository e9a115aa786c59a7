"""An engine that claims the features that only some runtimes have, and records its requests."""

import msgspec

from sluice.engine.client.base import OnGone
from sluice.engine.client.stream import GenerationStream
from sluice.engine.types import GenerateRequest, SamplingParams
from tests.engine.in_process_client import InProcessEngineClient

ADAPTERS = ("french", "polite")
MAX_BEAM_WIDTH = 4
SAMPLING_FIELDS = SamplingParams.__struct_fields__[SamplingParams.__struct_fields__.index("beam_width") :]


class CapableEngine(InProcessEngineClient):
    """Has LoRA adapters, beams and all sampling fields. The tokens are those of a request without any of them."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.requests: list[GenerateRequest] = []

    async def start(self) -> None:
        await super().start()
        self._info = msgspec.structs.replace(
            self.info, adapters=ADAPTERS, max_beam_width=MAX_BEAM_WIDTH, sampling_fields=SAMPLING_FIELDS
        )

    def submit(
        self,
        request: GenerateRequest,
        most_wait_s: float | None = None,
        num_cached_tokens: int = 0,
        *,
        on_gone: OnGone | None = None,
    ) -> GenerationStream:
        self.requests.append(request)
        plain = {name: getattr(SamplingParams(), name) for name in SAMPLING_FIELDS}
        sampling = msgspec.structs.replace(request.sampling, **plain)
        return super().submit(msgspec.structs.replace(request, adapter="", sampling=sampling), most_wait_s)

    @property
    def asked(self) -> GenerateRequest:
        """The last request."""
        return self.requests[-1]
