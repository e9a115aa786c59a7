"""From a path under /v2 to what answers it."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from gateway.http.v2.exchange import Exchange
from gateway.http.v2.target import Target

Handler = Callable[[Exchange, Target], Awaitable[None]]
NOTHING = Target()


@dataclass(frozen=True, slots=True)
class Route:
    """What answers a path, by method."""

    handler: Handler
    methods: frozenset[str]


def get(handler: Handler) -> Route:
    return Route(handler, frozenset(("GET",)))


def post(handler: Handler) -> Route:
    return Route(handler, frozenset(("POST",)))


def get_or_post(handler: Handler) -> Route:
    return Route(handler, frozenset(("GET", "POST")))


@dataclass(frozen=True, slots=True)
class Router:
    """The routes, by what is fixed in their paths.

    `fixed` has whole paths. `of_model` has what follows /v2/models/NAME or …/versions/NUMBER, and `metadata` is where
    nothing does. `of_region` has, for each kind of shared memory, what follows it or …/region/NAME.
    """

    fixed: Mapping[str, Route]
    metadata: Route
    trace_of_model: Route
    of_model: Mapping[str, Route]
    of_region: Mapping[str, Mapping[str, Route]]
    of_repository: Mapping[str, Route]
    refuse_repository: Route

    def find(self, path: str) -> tuple[Route, Target] | None:
        """The route and what the path names; None where there is nothing."""
        route = self.fixed.get(path)
        if route is not None:
            return route, NOTHING
        _, _, *parts = path.split("/")
        match parts:
            case ["models", name, *rest] if name:
                return self._model(name, rest)
            case ["repository", *rest]:
                return self._repository(rest)
            case [kind, "region", region, action] if region:
                return _with(self.of_region.get(kind, {}).get(action), Target(region))
            case [kind, action]:
                return _with(self.of_region.get(kind, {}).get(action), NOTHING)
        return None

    def _model(self, name: str, rest: list[str]) -> tuple[Route, Target] | None:
        match rest:
            case [action]:
                return _with(self.of_model.get(action), Target(name))
            case []:
                return self.metadata, Target(name)
            case ["versions", version] if _is_number(version):
                return self.metadata, Target(name, version)
            case ["versions", version, action] if _is_number(version):
                return _with(self.of_model.get(action), Target(name, version))
            case ["trace", "setting"]:
                return self.trace_of_model, Target(name)
        return None

    def _repository(self, rest: list[str]) -> tuple[Route, Target] | None:
        match rest:
            case ["models", name, action] if name:
                return _with(self.of_repository.get(action), Target(name))
            case [repository, "index"] if repository:
                return self.fixed["/v2/repository/index"], NOTHING
            case [repository, "models", name, action] if repository and name and action in self.of_repository:
                return self.refuse_repository, Target(name)
        return None


def _is_number(version: str) -> bool:
    return version.isascii() and version.isdigit()


def _with(route: Route | None, target: Target) -> tuple[Route, Target] | None:
    return None if route is None else (route, target)
