"""Finds the models of the repository for the sender of a request: by name, by what they make of texts, or as text."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import NamedTuple

import msgspec

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.calls import is_visible, note_model
from sluice.gateway.plane.health import ServerHealth
from sluice.pipelines.encoding.classifier import TextClassifier, is_classifier
from sluice.pipelines.encoding.encoder import TextEncoder
from sluice.pipelines.encoding.encoder import is_encoder as has_vectors
from sluice.pipelines.encoding.llm_encoder import LlmEncoder
from sluice.pipelines.encoding.reranker import EncoderReranker, LlmReranker, ModelReranker, RerankerFinder
from sluice.pipelines.llm.model import LlmModel, embedder_of
from sluice.pipelines.llm.text_models import choose_text_model, find_owner, list_text_models, split_name
from sluice.pipelines.llm.text_models import model_and_adapter as names_of
from sluice.pipelines.text.model import TextModel, text_model_of
from sluice.serving.model import Model
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.request import LATEST, InferRequest

STICKY_HEADER = "x-sluice-sticky"
"""Chooses the version of a model whose versions share its requests, and is the session where no header names one."""
_PARENT_HEADER = "x-parent-session-id"
_AGENT_SESSION, _AGENT, _PARENT_AGENT = (
    f"x-claude-code-{name}" for name in ("session-id", "agent-id", "parent-agent-id")
)
"""Claude Code's: the session of the whole program, and, in the requests of subagents, which of them and whose child."""
_THREAD, _PARENT_THREAD, _WINDOW = "thread-id", "x-codex-parent-thread-id", "x-codex-window-id"
_ROOT_THREADS = ("session-id", "session_id")
"""Codex's: its threads, subagents' too, have an id each and share the first one's; a window is `thread:number`."""
_PLAIN_HEADERS = ("x-session-id", "x-session-affinity")


class Session(NamedTuple):
    """The session of a request by the client's name, and the session that started it, as an agent does its subagents;
    "" for none."""

    id: str = ""
    parent: str = ""


class _UserId(msgspec.Struct):
    session_id: str = ""


NO_SESSION = Session()
_SESSION_MARK = "_session_"


@cache
def session_header_names(names: tuple[str, ...]) -> frozenset[str]:
    """Return the names, in lower case, of all headers that `find_session` looks at, `names` among them."""
    of_agents = (_AGENT_SESSION, _AGENT, _PARENT_AGENT, _THREAD, _PARENT_THREAD, _WINDOW, *_ROOT_THREADS)
    return frozenset((*names, *_PLAIN_HEADERS, _PARENT_HEADER, *of_agents, STICKY_HEADER))


def find_session(headers: Mapping[str, str], names: tuple[str, ...]) -> Session:
    """Return the session that headers, by lower-case name, or metadata of gRPC name. The first counts of: those of
    `names`, Claude Code's, Codex's, `x-session-id`, `x-session-affinity`, the sticky key."""
    known = session_header_names(names)
    sent = {name: value for name, value in headers.items() if value and name in known}
    if not sent:
        return NO_SESSION
    if own := _first_of(sent, names):
        return Session(own, sent.get(_PARENT_HEADER, ""))
    if _AGENT_SESSION in sent:
        return _session_of_agent(sent[_AGENT_SESSION], sent.get(_AGENT, ""), sent.get(_PARENT_AGENT, ""))
    root = _first_of(sent, _ROOT_THREADS)
    if thread := sent.get(_THREAD) or root or sent.get(_WINDOW, "").rpartition(":")[0]:
        return Session(thread, sent.get(_PARENT_THREAD) or (root if root != thread else ""))
    if plain := _first_of(sent, _PLAIN_HEADERS):
        return Session(plain, sent.get(_PARENT_HEADER, ""))
    return Session(sent.get(STICKY_HEADER, ""))


def session_in(user_id: str) -> str:
    """Return the session in a `user_id` of Anthropic's metadata as Claude Code writes it, an object of JSON or
    `user_..._account_..._session_...`; of another one, all of it."""
    if user_id.startswith("{"):
        with suppress(msgspec.DecodeError, RecursionError):
            return msgspec.json.decode(user_id, type=_UserId).session_id or user_id
    return user_id.rpartition(_SESSION_MARK)[2] or user_id


def _first_of(sent: Mapping[str, str], names: Sequence[str]) -> str:
    return next((value for name in names if (value := sent.get(name))), "")


def _session_of_agent(session: str, agent: str, parent_agent: str) -> Session:
    """Return the session of one agent of a program: the program's own without an `agent`."""
    if not agent or agent == session:
        return Session(session)
    is_nested = parent_agent and parent_agent != session
    return Session(f"{session}/{agent}", f"{session}/{parent_agent}" if is_nested else session)


class ModelFinder:
    """Finds models by name and version. Lives on the event loop's thread."""

    def __init__(self, repository: ModelRepository, health: ServerHealth) -> None:
        self.repository = repository
        self._health = health

    def find(self, name: str, version: int = LATEST) -> Model:
        """Return the model `name`. Raises NOT_FOUND in Triton's words, and UNAVAILABLE while it cannot serve."""
        self._health.refuse_if_draining()
        note_model(name)
        try:
            return self.repository.find(name, version)
        except SluiceError as error:
            raise self._health.explain_absence(name, error) from None

    def route(self, name: str, version: int = LATEST, key: str = "") -> Model:
        """Find a model like `find`, for inference: where versions have weights, `key` chooses the version."""
        self._health.refuse_if_draining()
        note_model(name)
        try:
            return self.repository.route(name, version, key)
        except SluiceError as error:
            raise self._health.explain_absence(name, error) from None

    def route_sequence(self, model: Model, request: InferRequest, version: int = LATEST, key: str = "") -> Model:
        """Return the version for a request that was parsed for `model`: all requests of a sequence get the same one.

        `model` was found by `version` and `key`; where either was given, it is `model` itself.
        """
        if version != LATEST or key or not request.correlation_id:
            return model
        return self.repository.route(model.name, LATEST, str(request.correlation_id))

    def visible(self) -> list[Model]:
        """Return the loaded models that the sender of the current request may use."""
        return [each for each in self.repository.models() if is_visible(each.name)]


class EncodingModels:
    """Finds encoders, rerankers and classifiers: models that turn texts into vectors, scores or labels."""

    def __init__(self, models: ModelFinder) -> None:
        self._models = models
        self._repository = models.repository
        self._rerankers = RerankerFinder(models.repository)

    def encoders(self) -> list[TextEncoder | LlmEncoder]:
        """Return every model that has embeddings and no text, by name."""
        found = {model.name: model for model in self._models.visible() if self.is_encoder(model)}
        return [self.open(found[name]) for name in sorted(found)]

    def has_embeddings(self, name: str) -> bool:
        """Return whether `encoder` finds the model `name`."""
        try:
            return self.is_encoder(self._models.find(name))
        except SluiceError:
            return False

    def is_encoder(self, model: Model) -> bool:
        """Return whether a model has embeddings and no text."""
        if isinstance(model, LlmModel):
            return embedder_of(model) is not None
        return text_model_of(model) is None and has_vectors(model, self._repository)

    def open(self, model: Model) -> TextEncoder | LlmEncoder:
        """Return the encoder over a model that `is_encoder`."""
        text = embedder_of(model)
        return TextEncoder(self._repository, model.name) if text is None else LlmEncoder(text)

    def find_target(self, name: str) -> TextEncoder | LlmEncoder:
        """Return the encoder of a route's target, whoever may use it. Raises NOT_FOUND, and INVALID for a model without
        embeddings."""
        model = self._repository.find(name)
        if not self.is_encoder(model):
            raise invalid("model", f"model {name!r} has no embeddings")
        return self.open(model)

    def encoder(self, name: str) -> TextEncoder | LlmEncoder:
        """Return the embedding model `name`.

        Raises NOT_FOUND in OpenAI's words, INVALID for a model without embeddings, and UNAVAILABLE while the model
        cannot serve. The errors list the models that have embeddings.
        """
        if not self.has_embeddings(name):
            names = [each.name for each in self.encoders()]
            raise self._unusable(name, "has no embeddings; models with embeddings", names)
        return self.open(self._models.find(name))

    def rerankers(self) -> list[ModelReranker]:
        """Return every model that scores passages by itself, by name."""
        names = {each.name for each in self._models.visible() if self._rerankers.is_reranker(each)}
        return [ModelReranker(self._repository, name) for name in sorted(names)]

    async def reranker(self, name: str) -> ModelReranker | EncoderReranker | LlmReranker:
        """Return the reranker `name`, or one that compares the vectors of the encoder `name`. Raises as `encoder`."""
        if self.has_embeddings(name):
            return EncoderReranker(self.encoder(name))
        names = [each.name for each in self.rerankers()]
        if name not in names:
            usable = [*(each.name for each in self.encoders()), *names]
            raise self._unusable(name, "does not score texts; models that do", usable)
        return await self._rerankers.find(self._models.find(name))

    def classifiers(self) -> list[TextClassifier]:
        """Return every model that classifies texts, by name."""
        names = {each.name for each in self._models.visible() if is_classifier(each, self._repository)}
        return [TextClassifier(self._repository, name) for name in sorted(names)]

    def classifier(self, name: str) -> TextClassifier:
        """Return the classifier `name`. Raises as `encoder`."""
        found = self.classifiers()
        names = [each.name for each in found]
        if name not in names:
            raise self._unusable(name, "has no output with labels; models that classify texts", names)
        return found[names.index(name)]

    def _unusable(self, name: str, fault: str, usable: Iterable[str]) -> SluiceError:
        """Return why the model `name` cannot be used: its absence, or else its `fault`, which ends in the `usable`."""
        available = ", ".join(usable) or "none"
        try:
            self._models.find(name)
        except SluiceError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                return error
            return SluiceError(error.code, f"model {name!r} not found; available: {available}", param="model")
        return invalid("model", f"model {name!r} {fault}: {available}")


class TextModels:
    """Finds language models, pipelines with one at their end, and their adapters."""

    def __init__(self, models: ModelFinder, encoding: EncodingModels) -> None:
        """`encoding` knows the models that a client may take for one of these."""
        self._models = models
        self._repository = models.repository
        self._encoding = encoding

    def find(self, name: str, key: str) -> TextModel:
        """Return the text model `name`; `base:adapter` has a LoRA adapter, and so has `adapter` where one model has it.
        Where versions have weights, `key` chooses one.

        Raises NOT_FOUND in OpenAI's words, and INVALID for a model that gives no text.
        """
        return self._find_plain(name, key) or self._find_adapter(name, key)

    def find_target(self, name: str, key: str) -> TextModel:
        """Return the text model of a route's target, whoever may use it. Raises as `find`, and UNAVAILABLE where its
        engine is dead."""
        found = self._find_plain(name, key)
        return living(found or self._choose_adapter(name, key, self._repository.models()))

    def visible(self) -> list[TextModel]:
        """Return the highest version of everything that `find` finds for the sender of the current request.

        Language models come first, then pipelines, each by name; adapters follow their model.
        """
        models = sorted(self._models.visible(), key=lambda each: each.spec.platform == "ensemble")
        return [each for each in list_text_models(models) if is_visible(*names_of(each))]

    def _find_plain(self, name: str, key: str) -> TextModel | None:
        """Return the text model of the model `name`; None where none with a text model serves under that name."""
        try:
            model = self._repository.route(name, LATEST, key)
        except SluiceError:
            return None
        if isinstance(model, LlmModel):
            found: TextModel | None = None if model.text.info.embedding_size else model.text
        else:
            found = text_model_of(model)
        return found if found is not None and found.name == name else None

    def _find_adapter(self, name: str, key: str) -> TextModel:
        """Return the adapter that `name` means. Raises NOT_FOUND, which lists the models."""
        if self._encoding.has_embeddings(name):
            raise invalid("model", f"model {name!r} gives embeddings and no text; POST /v1/embeddings")
        if name in {each.name for each in self._encoding.rerankers()}:
            raise invalid("model", f"model {name!r} gives scores and no text; POST /v1/score")
        return self._choose_adapter(name, key, self._models.visible())

    def _choose_adapter(self, name: str, key: str, models: Sequence[Model]) -> TextModel:
        owner = find_owner(models, name)
        if owner is not None:
            return choose_text_model(self._repository.route(owner, LATEST, key), name)
        base, adapter = split_name(name, [model.name for model in models if text_model_of(model) is not None])
        return choose_text_model(self._repository.route(base, LATEST, key), adapter)


def living(text: TextModel) -> TextModel:
    """Return the text model. Raises UNAVAILABLE where its engine is dead."""
    if text.failure is not None:
        raise SluiceError(ErrorCode.UNAVAILABLE, f"the engine failed: {text.failure}")
    return text
