"""The one data plane under every protocol: finds models, generates with them, and counts open requests."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from sluice.engine.client.stream import Consumer
from sluice.engine.fleet.client import Engine
from sluice.errors import SluiceError
from sluice.gateway.calls import answer_scope, current_call, keeps_answers, note_model
from sluice.gateway.plane.health import ServerHealth
from sluice.gateway.plane.models import EncodingModels, ModelFinder, TextModels, living
from sluice.gateway.plane.routing import RouteTable
from sluice.pipelines.answers.cache import AnswerCache, AnswerSource
from sluice.pipelines.llm.model import LlmModel, language_models
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.llm.text_models import model_and_adapter
from sluice.pipelines.routes.encoder import Embedder
from sluice.pipelines.routes.settings import RouteSettings
from sluice.pipelines.routes.text import RoutedText
from sluice.pipelines.text.model import TextModel
from sluice.pipelines.text.stream import Generate, OpenTexts
from sluice.pipelines.text.types import TextEvent, TextRequest
from sluice.serving.repository.repository import ModelRepository

_ABORTED_S = 1.0
"""Longest time for streams of language models to end with the error of `abort_all`."""


class Plane:
    """Serves the models of one repository. Lives on the event loop's thread.

    Models serve as soon as they are loaded. While the server drains, the plane refuses new requests; open ones go on
    until they end or `abort_all` ends them.
    """

    def __init__(
        self,
        repository: ModelRepository,
        health: ServerHealth,
        routes: Mapping[str, RouteSettings] | None = None,
        answers: AnswerCache | None = None,
    ) -> None:
        """`routes` are names that stand for models. `answers` keeps those of routes and keys that want it."""
        self.repository = repository
        self.health = health
        self.models = ModelFinder(repository, health)
        self.encoding = EncodingModels(self.models)
        self._texts = TextModels(self.models, self.encoding)
        self.routes = RouteTable(routes or {}, self._texts, self.encoding, answers)
        self.answers = answers
        self._open = OpenTexts()

    # --- models ---

    def llm(self, name: str, key: str = "") -> TextModel:
        """Return the language model `name`, the pipeline with one at its end, or the route; `base:adapter` has a LoRA
        adapter, and so has `adapter` where one model has it.

        Where versions have weights, `key` chooses one. Raises NOT_FOUND in OpenAI's words, and UNAVAILABLE while the
        model cannot serve.
        """
        self.health.refuse_if_draining()
        if name in self.routes.names:
            return self.routes.text(name, key)
        note_model(name, is_checked=False)
        try:
            found = self._texts.find(name, key)
        except SluiceError as error:
            raise self.health.explain_absence(name, error) from None
        if current_call.get() is not None:
            note_model(*model_and_adapter(found))
        return living(found)

    def text_models(self) -> list[TextModel]:
        """Return the highest version of everything that `llm` finds.

        Language models come first, then pipelines, then routes, each by name; adapters follow their model.
        """
        return [*self._texts.visible(), *self.routes.texts()]

    def embedder(self, name: str) -> Embedder:
        """Return what encodes texts for a request: the embedding model `name`, or the route. Raises as
        `EncodingModels.encoder`."""
        if name in self.routes.names:
            self.health.refuse_if_draining()
            return self.routes.encoder(name)
        source = AnswerSource(self.answers if keeps_answers() else None, answer_scope())
        return source.wrap(self.encoding.encoder(name))

    def llms(self) -> list[LlmText]:
        """Return the highest version of every loaded language model of our own."""
        return list({model.name: model.text for model in language_models(self.repository.models())}.values())

    def engines(self) -> list[Engine]:
        """Return the engines of every version of all language models of our own."""
        return [model.engine for model in language_models(self.repository.models())]

    # --- requests ---

    def generate(self, model: TextModel, request: TextRequest) -> Generate:
        """Return what generates the answer to `request`. Raises UNAVAILABLE while draining.

        Every other refusal (INVALID, OVERLOADED, UNAVAILABLE) is raised, as SluiceError, before the first event.
        Cancelling it cancels the request in the engine. It counts as open from its start to its end.
        """
        self.health.refuse_if_draining()
        generate = partial(model.generate, request)
        if self.answers is not None and keeps_answers() and not isinstance(model, RoutedText):
            generate = partial(AnswerSource(self.answers, answer_scope()).answer, model, request)

        async def generate_counted(consumer: Consumer[TextEvent]) -> None:
            with self._open:
                await generate(consumer)

        return generate_counted

    @property
    def num_open(self) -> int:
        """Number of requests that have begun and not ended."""
        return self._open.count + sum(model.num_in_flight for model in self.repository.models())

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait for open requests. Return whether all ended within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._open.wait_idle()
                for model in self.repository.models():
                    await model.wait_idle()
        except TimeoutError:
            return False
        return True

    async def abort_all(self, error: SluiceError) -> None:
        """End every open request: streams of language models with `error`, which clients see as an error event."""
        models = self.repository.models()
        for engine in self.engines():
            engine.abort_all(error)
        with suppress(TimeoutError):  # ensembles pass that error on, unless they close before it reaches them
            async with asyncio.timeout(_ABORTED_S):
                await asyncio.gather(*(model.wait_idle() for model in language_models(models)))
        for model in models:
            if not isinstance(model, LlmModel):
                await model.close()
