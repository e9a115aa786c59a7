"""The roots of a repository, and their models' names and namespaces. Reads files or the network: for threads."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from sluice.errors import SluiceError, invalid_argument
from sluice.serving.repository.failures import ModelFailure, StoreFailure
from sluice.serving.repository.folders import FolderState, LocalRoot, ModelFolder, Root, is_plain_name
from sluice.serving.repository.stores.location import local_path, store_location

SEPARATOR = "::"
"""Separates namespace and name in a qualified name."""
_APPEARS_TWICE = "model appears in two or more repositories"
"""Triton's reason in the repository index."""

T = TypeVar("T")
FolderStates = tuple[tuple[str, FolderState | None], ...]
"""The states of a model's folders, each with its location; None for one that changed meanwhile or cannot be read."""


@dataclass(frozen=True, slots=True)
class Naming:
    """The names of models, and the (namespace, folder) pairs that each name stands for.

    Without namespaces a name may stand for several folders. With them it stands for one: models that share a name get
    qualified names.
    """

    folders: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The qualified names for each name that several models share."""
    _plain: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, str]], has_namespaces: bool) -> "Naming":
        by_name: dict[str, list[tuple[str, str]]] = {}
        for namespace, name in pairs:
            by_name.setdefault(name, []).append((namespace, name))
        folders: dict[str, tuple[tuple[str, str], ...]] = {}
        choices: dict[str, tuple[str, ...]] = {}
        plain: dict[str, str] = {}
        for name, found in by_name.items():
            if not has_namespaces:
                folders[name] = tuple(found)
            elif len(found) == 1:
                folders[name] = tuple(found)
                plain[qualified(*found[0])] = name
            else:
                folders.update({qualified(*each): (each,) for each in found})
                choices[name] = tuple(qualified(*each) for each in found)
        return cls(folders, choices, plain)

    def canonical(self, name: str) -> str:
        """Return the plain name of a model that is qualified without need, else `name`."""
        return self._plain.get(name, name)

    def selected(self, name: str) -> tuple[str, ...]:
        """Return the names of all models that a load or an unload of `name` is for: several share a plain name."""
        return self.choices.get(name, (self.canonical(name),))


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model's folder, for the caller to release, and its namespace."""

    folder: ModelFolder
    namespace: str


@dataclass(frozen=True, slots=True)
class RepositoryScan:
    """The states of every model's folders (one, unless several roots have it) at one moment.

    `problems` has the reasons for which roots could not be read, by their texts. Their models count as changing.
    """

    models: Mapping[str, FolderStates] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)


class Roots:
    """All roots of a repository. Without namespaces, a name that several roots have is ambiguous and serves nothing."""

    def __init__(self, roots: Iterable[Root], *, has_namespaces: bool = False) -> None:
        by_text = {root.text: root for root in roots}
        namespaces = choose_namespaces(list(by_text))
        self._roots = {namespaces[text]: root for text, root in by_text.items()}
        self.has_namespaces = has_namespaces
        self._names: dict[str, frozenset[str]] = dict.fromkeys(self._roots, frozenset())
        """Model names of each namespace at its last reading."""
        self._guard = threading.RLock()
        self.naming = Naming()
        """The names of models at the last reading."""

    def names(self) -> list[str]:
        """Return the models' names for requests. Raises OSError or StoreFailure."""
        self._set_names({namespace: root.names() for namespace, root in self._roots.items()})
        return sorted(self.naming.folders)

    def refresh(self) -> None:
        """Read the names of models again. A root that cannot be read keeps those of its last reading."""
        seen = {namespace: _try_read(root.names)[0] for namespace, root in self._roots.items()}
        self._set_names({namespace: names for namespace, names in seen.items() if names is not None})

    def _set_names(self, names: Mapping[str, Iterable[str]]) -> Naming:
        """Set all model names of these namespaces."""
        with self._guard:
            self._names.update({namespace: frozenset(each) for namespace, each in names.items()})
            pairs = [(namespace, name) for namespace, each in self._names.items() for name in sorted(each)]
            self.naming = Naming.of(pairs, self.has_namespaces)
            return self.naming

    def _set_presence(self, name: str, is_in: Mapping[str, bool]) -> None:
        """Set whether each of these namespaces has the model."""
        with self._guard:
            changed = {
                namespace: self._names[namespace] ^ {name}
                for namespace, is_there in is_in.items()
                if is_there is not (name in self._names[namespace])
            }
            if changed:
                self._set_names(changed)

    def scan(self) -> RepositoryScan:
        """Return the state of every model's folders."""
        scans: dict[str, Mapping[str, FolderState | None]] = {}
        problems: dict[str, str] = {}
        for namespace, root in self._roots.items():
            seen, problem = _try_read(root.scan)
            if seen is None:
                problems[root.text] = problem
                seen = dict.fromkeys(self._names[namespace])
            scans[namespace] = seen
        naming = self._set_names(scans)
        return RepositoryScan(
            {name: self._states(folders, scans) for name, folders in naming.folders.items()}, problems
        )

    def _states(
        self, folders: Iterable[tuple[str, str]], scans: Mapping[str, Mapping[str, FolderState | None]]
    ) -> FolderStates:
        return tuple((self._roots[namespace].location(name), scans[namespace][name]) for namespace, name in folders)

    def open(self, name: str) -> FoundModel | None:
        """Return the folder of `name`, None without one. Raises INVALID for several, OSError and StoreFailure."""
        namespace, _, plain = name.rpartition(SEPARATOR) if self.has_namespaces else ("", "", name)
        if not is_plain_name(plain):
            return None
        found = self._namespaces_with(plain, namespace)
        if len(found) > 1:
            raise ModelFailure(plain, _APPEARS_TWICE, self._ambiguous(plain, found).message)
        for space in found:
            folder = self._roots[space].open(plain)
            return FoundModel(folder, space) if folder is not None else None
        return None

    def _namespaces_with(self, plain: str, namespace: str = "") -> list[str]:
        """Return the namespaces that have the model, or `namespace` alone where it is given and has it.

        A root that cannot be read has the models of its last reading. Its error is raised where no root has the model.
        """
        is_in: dict[str, bool] = {}
        failure: OSError | StoreFailure | None = None
        for each in (each for each in self._roots if namespace in ("", each)):
            try:
                is_in[each] = self._roots[each].has(plain)
            except (OSError, StoreFailure) as error:
                is_in[each] = plain in self._names[each]
                failure = error
        found = [each for each, is_there in is_in.items() if is_there]
        if failure is not None and not found:
            raise failure
        self._set_presence(plain, is_in)
        return found

    def _ambiguous(self, plain: str, namespaces: Sequence[str]) -> SluiceError:
        message = f"model '{plain}' is ambiguous, it is in several repositories: "
        listed = " and ".join(self._roots[each].location(plain) for each in namespaces)
        if self.has_namespaces:
            listed += "; name one of " + ", ".join(f"'{qualified(each, plain)}'" for each in namespaces)
        return invalid_argument(message + listed)

    def member(self, own: str, namespace: str, name: str) -> str:
        """Return the model of an ensemble's step; `own` is its namespace. Raises INVALID if unknown or ambiguous."""
        if namespace:
            return self._shortest_name(self._namespace_with(name, namespace), name)
        if not self.has_namespaces or not is_plain_name(name):
            return name
        found = self._namespaces_with(name)
        if len(found) > 1 and own not in found:
            raise self._ambiguous(name, found)
        return self._shortest_name(own, name) if own in found else name

    def _namespace_with(self, name: str, text: str) -> str:
        """Return the namespace called `text`, by its name or its root's text. It must have the model."""
        for namespace, root in self._roots.items():
            if text in (namespace, root.text):
                if is_plain_name(name) and root.has(name):
                    return namespace
                raise invalid_argument(f"model namespace '{text}' has no model '{name}'")
        listed = ", ".join(f"'{each}'" for each in self._roots)
        raise invalid_argument(f"there is no model namespace '{text}'; there are {listed}")

    def _shortest_name(self, namespace: str, name: str) -> str:
        others = [each for each in self._namespaces_with(name) if each != namespace]
        return qualified(namespace, name) if self.has_namespaces and others else name

    def stop(self) -> None:
        """Let calls in flight on other threads end soon, with an error."""
        for root in self._roots.values():
            root.stop()

    def close(self) -> None:
        for root in self._roots.values():
            root.close()


def _try_read(read: Callable[[], T]) -> tuple[T | None, str]:
    """Return the result of `read`, or None and the reason for which the root cannot be read."""
    try:
        return read(), ""
    except StoreFailure as error:
        return None, error.message
    except OSError as error:
        return None, f"{error}"


def open_roots(texts: Iterable[str | Path], cache: Path | None, rest_s: float) -> list[Root]:
    """Return a local root for each path, a store for each URL. Reads nothing yet. `cache`, `rest_s`: a store's."""
    return [_open_root(str(text), cache, rest_s) for text in texts]


def _open_root(text: str, cache: Path | None, rest_s: float) -> Root:
    location = store_location(text)
    if location is None:
        return LocalRoot(Path(local_path(text)))
    from sluice.serving.repository.stores.root import StoreRoot  # slow: it imports fsspec

    return StoreRoot(location, cache, rest_s)


def choose_namespaces(roots: Sequence[str]) -> dict[str, str]:
    """Return each root's namespace by its text: the name of its folder, or the whole text where two share a name."""
    last = {root: root.rstrip("/").rpartition("/")[2] or root for root in roots}
    names = list(last.values())
    return {root: name if names.count(name) == 1 else root for root, name in last.items()}


def plain_name(name: str) -> str:
    """Return a model's name without its namespace."""
    return name.rpartition(SEPARATOR)[2]


def qualified(namespace: str, name: str) -> str:
    return f"{namespace}{SEPARATOR}{name}"
