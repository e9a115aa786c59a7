"""The routes of a server over its models: which target is which model now, and whose answers are kept."""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import TypeVar

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.calls import answer_scope, is_visible, keeps_answers, note_model, note_route
from sluice.gateway.plane.models import EncodingModels, TextModels
from sluice.pipelines.answers.cache import AnswerCache, AnswerSource
from sluice.pipelines.routes.encoder import EncoderTarget, RoutedEncoder
from sluice.pipelines.routes.route import Candidate, Route
from sluice.pipelines.routes.settings import ROUTES_FLAG, RouteSettings
from sluice.pipelines.routes.text import RoutedText, no_candidate

_SHARED = "shared"
_MODELS_ALONE = AnswerSource()
_NO_TEXT = invalid("model", "it gives embeddings and no text; POST /v1/embeddings")


class RouteTable:
    """The routes by name. Belongs to the event loop."""

    def __init__(
        self,
        settings: Mapping[str, RouteSettings],
        texts: TextModels,
        encoding: EncodingModels,
        answers: AnswerCache | None,
    ) -> None:
        """`answers` None: nothing is kept. Senders need no right to the models that are targets."""
        self.names = frozenset(settings)
        note_asked = partial(note_model, is_checked=False)
        self._routes = {name: Route(name, each, note_asked) for name, each in settings.items()}
        self._texts = texts
        self._encoding = encoding
        self._answers = answers

    def __bool__(self) -> bool:
        return bool(self._routes)

    def __iter__(self) -> Iterator[Route]:
        return iter(self._routes.values())

    def text(self, name: str, key: str) -> RoutedText:
        """Return a route for one request, whose `key` chooses a target by weight. Raises FORBIDDEN where the sender may
        not use the route, UNAVAILABLE where no target serves, and INVALID where none gives text."""
        note_route(name)
        return self._open_text(self._routes[name], key)

    def encoder(self, name: str) -> RoutedEncoder:
        """Return a route of encoders for one request. Raises as `text`, and INVALID where no target has embeddings."""
        note_route(name)
        return self._open_encoder(self._routes[name])

    def texts(self) -> list[RoutedText]:
        """Return the routes that give text and whose name the sender may use."""
        found = (_or_none(partial(self._open_text, each, "")) for each in self._visible())
        return [each for each in found if each is not None]

    def encoders(self) -> list[RoutedEncoder]:
        """Return the routes that give embeddings and whose name the sender may use."""
        found = (_or_none(partial(self._open_encoder, each)) for each in self._visible())
        return [each for each in found if each is not None]

    def _visible(self) -> list[Route]:
        return [each for each in self._routes.values() if is_visible(each.name)]

    def _open_text(self, route: Route, key: str) -> RoutedText:
        candidates: list[Candidate] = []
        failures: list[tuple[str, SluiceError]] = []
        for target in route.order(key):
            try:
                candidates.append(Candidate(target, self._texts.find_target(target.name, key)))
            except SluiceError as error:
                failures.append((target.name, _NO_TEXT if self._gives_vectors(target.name) else _without_others(error)))
        if not candidates:
            raise no_candidate(route.name, failures)
        return RoutedText(route, candidates, self._source_of(route))

    def _open_encoder(self, route: Route) -> RoutedEncoder:
        targets: list[EncoderTarget] = []
        lengths: list[int | None] = []
        failures: list[tuple[str, SluiceError]] = []
        source = self._source_of(route)
        for target in route.order(""):
            try:
                encoder = self._encoding.find_target(target.name)
                lengths.append(encoder.max_model_len)
            except SluiceError as error:
                failures.append((target.name, _without_others(error)))
                continue
            targets.append((target, source.wrap(encoder)))
        if not targets:
            raise no_candidate(route.name, failures)
        return RoutedEncoder(route, targets, lengths)

    def _source_of(self, route: Route) -> AnswerSource:
        """Return where the answers to the current request come from."""
        if self._answers is None or not (route.settings.cache or keeps_answers()):
            return _MODELS_ALONE
        return AnswerSource(self._answers, None if route.settings.cache == _SHARED else answer_scope())

    def check(self, models: Collection[str]) -> None:
        """Check the routes against models that stay as they are. Raises INVALID, which names the route and its
        target."""
        for route in self._routes.values():
            where = f"{ROUTES_FLAG}: route {route.name!r}"
            if route.name in models:
                raise invalid("routes", f"{where} must have a name that no model has, got the name of a model")
            kinds = {self._kind(f"{where}: targets[{i}].model", each.name) for i, each in enumerate(route.targets)}
            if len(kinds) > 1:
                raise invalid("routes", f"{where}: targets must all give text, or all vectors, got both kinds")

    def _kind(self, where: str, name: str) -> str:
        """Return which kind of model a target is. Raises INVALID for none."""
        try:
            self._texts.find_target(name, "")
        except SluiceError as error:
            if not self._gives_vectors(name):
                message = f"{where} must be a model that gives text or vectors, got {name!r}: {error.message}"
                raise invalid("routes", message) from None
            return "vectors"
        return "text"

    def _gives_vectors(self, name: str) -> bool:
        return _or_none(lambda: self._encoding.find_target(name)) is not None


Found = TypeVar("Found")


def _or_none(find: Callable[[], Found]) -> Found | None:
    try:
        return find()
    except SluiceError:
        return None


def _without_others(error: SluiceError) -> SluiceError:
    """Return the error about a target without the list of models, of which the sender may know none."""
    return error.reworded("it is not served") if error.code is ErrorCode.NOT_FOUND else error
