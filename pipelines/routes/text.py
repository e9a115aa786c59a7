"""A route as a text model, for one request: it answers with the first of its targets that can."""

from collections.abc import Mapping, Sequence

import msgspec

from sluice.engine.client.stream import Consumer
from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.pipelines.answers.cache import AnswerSource
from sluice.pipelines.answers.notes import current_notes
from sluice.pipelines.llm.text_models import model_and_adapter
from sluice.pipelines.routes.attempts import Attempts
from sluice.pipelines.routes.route import Candidate, Route, known_lengths
from sluice.pipelines.text.model import fingerprint_of
from sluice.pipelines.text.stream import give
from sluice.pipelines.text.types import (
    AS_IT_IS,
    AnswerText,
    ChatReader,
    Conversation,
    Part,
    Prompt,
    PromptForm,
    TextDetail,
    TextEvent,
    TextRequest,
)


class RouteReader:
    """Reads with the reader of the target that the first event names."""

    def __init__(self, readers: Mapping[str, ChatReader | None]) -> None:
        """`readers` are those of the targets, at least one of which has a reader; None for answers of text alone."""
        self._readers = readers
        self._chosen: ChatReader | None = None

    @property
    def finds_reasoning(self) -> bool:
        return any(each is not None and each.finds_reasoning for each in self._readers.values())

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._chosen is None else self._chosen.num_reasoning_tokens

    @property
    def relaxed(self) -> list[str]:
        """Constraints that at least one of the targets does not hold calls to."""
        relaxed = [what for each in self._readers.values() if each is not None for what in each.relaxed]
        return list(dict.fromkeys(relaxed))

    def read(self, event: TextEvent) -> list[Part]:
        if event.detail is not None and event.detail.target:
            self._chosen = self._readers[event.detail.target]
        if self._chosen is None:
            return [AnswerText(event.text)] if event.text else []
        return self._chosen.read(event)

    def feed(self, text: str) -> list[Part]:
        if self._chosen is None:
            return [AnswerText(text)] if text else []
        return self._chosen.feed(text)

    def finish(self) -> list[Part]:
        return [] if self._chosen is None else self._chosen.finish()


class RoutedText:
    """The text model of a route, made for each request, which may be of several generations."""

    parent = None
    version = "1"

    def __init__(self, route: Route, candidates: Sequence[Candidate], source: AnswerSource) -> None:
        """`candidates` are the targets that serve, at least one, in the order in which they are asked; `source` is
        where their answers come from."""
        self.route = route
        self.name = route.name
        self.created = route.created
        self._candidates = candidates
        self._models = [each.model for each in candidates]
        self._source = source
        self._is_read = False
        """Whether answers have readers, which must know who answers."""

    @property
    def max_model_len(self) -> int | None:
        """The longest context of the targets, where those of all are known."""
        known = known_lengths(self._models)
        return max(known) if len(known) == len(self._models) else None

    @property
    def max_beam_width(self) -> int:
        return min(each.max_beam_width for each in self._models)

    @property
    def failure(self) -> str | None:
        """None: a target with a dead engine is passed over."""
        return None

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.name, *(each.fingerprint for each in self._models))

    @property
    def template_names(self) -> frozenset[str]:
        return frozenset().union(*(each.template_names for each in self._models))

    @property
    def max_images(self) -> int:
        return min(each.max_images for each in self._models)

    @property
    def takes_parameters(self) -> bool:
        return all(each.takes_parameters for each in self._models)

    def adapt(self, conversation: Conversation) -> Conversation:
        """Return a conversation as the first target takes it that takes all of it. Raises as the first target."""
        refusal: SluiceError | None = None
        for each in self._models:
            try:
                return each.adapt(conversation)
            except SluiceError as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    async def prepare_shared(self, prompt: Prompt, form: PromptForm = AS_IT_IS) -> Prompt:
        """Return the prompt as the first target encodes it. Each target encodes it for itself again."""
        return await self._models[0].prepare_shared(prompt, form)

    def chat_reader(self, request: TextRequest) -> ChatReader | None:
        """Return a reader of the answer of whichever target. Those that cannot take the request's tools are not asked
        from here on. Raises INVALID where none can."""
        readers: dict[str, ChatReader | None] = {}
        refusal: SluiceError | None = None
        for each in self._candidates:
            try:
                readers[each.target.name] = each.model.chat_reader(request)
            except SluiceError as error:
                refusal = refusal or error
        if refusal is not None:
            self._candidates = [each for each in self._candidates if each.target.name in readers]
            if not self._candidates:
                raise refusal
        if not any(readers.values()):
            return None
        self._is_read = True
        return RouteReader(readers)

    async def generate(self, request: TextRequest, consumer: Consumer[TextEvent]) -> None:
        """Generate text as `TextModel.generate`. Before the first event another target may take the place of one that
        cannot answer; after it nothing is tried again."""
        answer = await Attempts(self.route, self._candidates, request, self._source).begin()
        target, notes = answer.candidate.target, current_notes.get()
        self.route.note_asked(*model_and_adapter(answer.candidate.model))
        answer.lookup.note()
        if notes is not None:
            notes.note_target(target.name, answer.num_attempts)
        first = _with_target(answer.first, target.name) if self._is_read else answer.first
        if answer.attempt is None:
            await give(consumer, first)
        else:
            await answer.attempt.pass_to(consumer, first)


def _with_target(event: TextEvent, target: str) -> TextEvent:
    detail = msgspec.structs.replace(event.detail or TextDetail(), target=target)
    return msgspec.structs.replace(event, detail=detail)


def no_candidate(route: str, failures: Sequence[tuple[str, SluiceError]]) -> SluiceError:
    """Return the error of a route of which no target serves, or none gives what is asked for."""
    said = "; ".join(f"{name}: {error.message}" for name, error in failures)
    if all(error.code is ErrorCode.INVALID for _, error in failures):
        return invalid("model", f"route {route!r}: {said}")
    retry_after_s = min((each.retry_after_s for _, each in failures if each.retry_after_s is not None), default=None)
    return SluiceError(ErrorCode.UNAVAILABLE, f"route {route!r}: no target serves: {said}", retry_after_s=retry_after_s)
