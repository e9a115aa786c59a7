"""What both generating routes make of their requests."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.http.openai.reply import Reply
from gateway.http.openai.schemas import GenerationRequest
from pipelines.text.types import Prompt, SamplingOverrides, TextRequest


@dataclass(frozen=True, slots=True)
class Job:
    """Prompts to continue under the same `fields`, and the shape of the answer.

    `max_tokens` None leaves each prompt all that the context has.
    """

    fields: GenerationRequest
    prompts: Sequence[Prompt]
    max_tokens: int | None
    reply: type[Reply]

    def text_requests(self, request_id: str) -> list[TextRequest]:
        """One request to the model for each prompt."""
        sampling, stop = self._sampling(), self._stop()
        return [
            TextRequest(request_id=request_id, prompt=prompt, sampling=sampling, stop=stop) for prompt in self.prompts
        ]

    def _stop(self) -> tuple[str, ...]:
        stop = self.fields.stop
        if stop is None:
            return ()
        return (stop,) if isinstance(stop, str) else tuple(stop)

    def _sampling(self) -> SamplingOverrides:
        """The sampling fields that the client sent."""
        fields, ids = self.fields, self.fields.stop_token_ids
        return SamplingOverrides(
            max_tokens=self.max_tokens,
            min_tokens=fields.min_tokens,
            temperature=fields.temperature,
            top_k=0 if fields.top_k == -1 else fields.top_k,
            top_p=fields.top_p,
            min_p=fields.min_p,
            repetition_penalty=fields.repetition_penalty,
            presence_penalty=fields.presence_penalty,
            frequency_penalty=fields.frequency_penalty,
            seed=fields.seed,
            stop_token_ids=None if ids is None else tuple(ids),
            ignore_eos=fields.ignore_eos,
        )
