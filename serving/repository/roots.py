"""Where models lie: the roots of a repository, local folders and remote stores.

Everything here reads the file system or the network and is for threads.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from serving.repository.failures import StoreFailure
from serving.repository.folders import FolderState, LocalRoot, ModelFolder, Root, is_plain_name
from serving.repository.stores.location import local_path, store_location
from sluice.errors import ErrorCode, SluiceError

SEPARATOR = "::"


def choose_namespaces(roots: Sequence[str]) -> dict[str, str]:
    """The namespace of each repository by its text: the name of its folder, or all of it where two share that."""
    last = {root: root.rstrip("/").rpartition("/")[2] or root for root in roots}
    names = list(last.values())
    return {root: name if names.count(name) == 1 else root for root, name in last.items()}


def qualified(namespace: str, name: str) -> str:
    """`NAMESPACE::NAME`."""
    return f"{namespace}{SEPARATOR}{name}"


@dataclass(frozen=True, slots=True)
class Naming:
    """The names of models, and for each the folders that it stands for, as (namespace, folder) pairs.

    Without namespaces a name may stand for several. With them it stands for one: models that share a name have
    qualified ones.
    """

    places: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The names to choose from in place of one that several models share."""
    _plain: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, str]], has_namespaces: bool) -> "Naming":
        """The naming of these (namespace, folder) pairs."""
        by_name: dict[str, list[tuple[str, str]]] = {}
        for namespace, name in pairs:
            by_name.setdefault(name, []).append((namespace, name))
        places: dict[str, tuple[tuple[str, str], ...]] = {}
        choices: dict[str, tuple[str, ...]] = {}
        plain: dict[str, str] = {}
        for name, found in by_name.items():
            if not has_namespaces:
                places[name] = tuple(found)
            elif len(found) == 1:
                places[name] = tuple(found)
                plain[qualified(*found[0])] = name
            else:
                places.update({qualified(*each): (each,) for each in found})
                choices[name] = tuple(qualified(*each) for each in found)
        return cls(places, choices, plain)

    def canonical(self, name: str) -> str:
        """`name`, but the plain one where it is qualified without need."""
        return self._plain.get(name, name)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model's folder, held for whoever found it, and the namespace that it lies in."""

    folder: ModelFolder
    namespace: str


States = tuple[tuple[str, FolderState | None], ...]
"""A model's folders by their places; None for one that was in motion or could not be seen."""


@dataclass(frozen=True, slots=True)
class RepositoryScan:
    """Every model's folders (one, unless several roots have it) as they were at one moment.

    `problems`: why roots could not be seen, by their texts. What they had when they were last seen counts as in motion.
    """

    models: Mapping[str, States] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)


class Roots:
    """All of a repository. Without namespaces a name that several roots have is ambiguous, and nothing serves as it."""

    def __init__(self, roots: Iterable[Root], *, has_namespaces: bool = False) -> None:
        by_text = {root.text: root for root in roots}
        namespaces = choose_namespaces(list(by_text))
        self._roots = {namespaces[text]: root for text, root in by_text.items()}
        self.has_namespaces = has_namespaces
        self._names: dict[str, frozenset[str]] = dict.fromkeys(self._roots, frozenset())
        """Of each namespace, when it was last seen."""
        self._guard = threading.RLock()
        self.naming = Naming()
        """What the models were called when they were last seen."""

    def names(self) -> list[str]:
        """What requests call the models. Raises OSError or StoreFailure."""
        self._saw({namespace: root.names() for namespace, root in self._roots.items()})
        return sorted(self.naming.places)

    def refresh(self) -> None:
        """See what models there are; of a root that cannot be read now, what was there when it could."""
        seen = {namespace: _seen(root.names)[0] for namespace, root in self._roots.items()}
        self._saw({namespace: names for namespace, names in seen.items() if names is not None})

    def _saw(self, names: Mapping[str, Iterable[str]]) -> Naming:
        """These are all the models of these namespaces."""
        with self._guard:
            self._names.update({namespace: frozenset(each) for namespace, each in names.items()})
            pairs = [(namespace, name) for namespace, each in self._names.items() for name in sorted(each)]
            self.naming = Naming.of(pairs, self.has_namespaces)
            return self.naming

    def _saw_one(self, name: str, is_in: Mapping[str, bool]) -> None:
        """Whether each of these namespaces has the model."""
        with self._guard:
            changed = {
                namespace: self._names[namespace] ^ {name}
                for namespace, is_there in is_in.items()
                if is_there is not (name in self._names[namespace])
            }
            if changed:
                self._saw(changed)

    def look(self) -> RepositoryScan:
        """Every root, for changes."""
        looks: dict[str, Mapping[str, FolderState | None]] = {}
        problems: dict[str, str] = {}
        for namespace, root in self._roots.items():
            seen, problem = _seen(root.look)
            if seen is None:
                problems[root.text] = problem
                seen = dict.fromkeys(self._names[namespace])
            looks[namespace] = seen
        naming = self._saw(looks)
        return RepositoryScan({name: self._states(places, looks) for name, places in naming.places.items()}, problems)

    def _states(
        self, places: Iterable[tuple[str, str]], looks: Mapping[str, Mapping[str, FolderState | None]]
    ) -> States:
        return tuple((self._roots[namespace].place(name), looks[namespace][name]) for namespace, name in places)

    def open(self, name: str) -> FoundModel | None:
        """The folder that `name` stands for; None where there is none.

        Raises SluiceError INVALID where it stands for several, OSError and StoreFailure.
        """
        namespace, _, plain = name.rpartition(SEPARATOR) if self.has_namespaces else ("", "", name)
        if not is_plain_name(plain):
            return None
        found = self._having(plain, namespace)
        if len(found) > 1:
            raise self._ambiguous(plain, found)
        for space in found:
            folder = self._roots[space].open(plain)
            return FoundModel(folder, space) if folder is not None else None
        return None

    def _having(self, plain: str, namespace: str = "") -> list[str]:
        """The namespaces that have the model, of those that `namespace` leaves.

        A root that cannot be read now has what it had. Raises its error where that leaves nobody who has the model.
        """
        is_in: dict[str, bool] = {}
        failure: OSError | StoreFailure | None = None
        for each in (each for each in self._roots if namespace in ("", each)):
            try:
                is_in[each] = self._roots[each].has(plain)
            except (OSError, StoreFailure) as error:
                is_in[each] = plain in self._names[each]
                failure = error
        having = [each for each, is_there in is_in.items() if is_there]
        if failure is not None and not having:
            raise failure
        self._saw_one(plain, is_in)
        return having

    def _ambiguous(self, plain: str, namespaces: Sequence[str]) -> SluiceError:
        message = f"model '{plain}' is ambiguous, it is in several repositories: "
        listed = " and ".join(self._roots[each].place(plain) for each in namespaces)
        if self.has_namespaces:
            listed += "; name one of " + ", ".join(f"'{qualified(each, plain)}'" for each in namespaces)
        return SluiceError(ErrorCode.INVALID, message + listed)

    def member(self, own: str, namespace: str, name: str) -> str:
        """What the model that an ensemble's step names is called, the ensemble being in the namespace `own`.

        Raises SluiceError INVALID for a namespace that there is not and for an ambiguous name.
        """
        if namespace:
            return self._called(self._namespace_with(name, namespace), name)
        if not self.has_namespaces or not is_plain_name(name):
            return name
        having = self._having(name)
        if len(having) > 1 and own not in having:
            raise self._ambiguous(name, having)
        return self._called(own, name) if own in having else name

    def _namespace_with(self, name: str, text: str) -> str:
        """The namespace called `text`, by its name or its root, which must have the model."""
        for namespace, root in self._roots.items():
            if text in (namespace, root.text):
                if is_plain_name(name) and root.has(name):
                    return namespace
                raise SluiceError(ErrorCode.INVALID, f"model namespace '{text}' has no model '{name}'")
        listed = ", ".join(f"'{each}'" for each in self._roots)
        raise SluiceError(ErrorCode.INVALID, f"there is no model namespace '{text}'; there are {listed}")

    def _called(self, namespace: str, name: str) -> str:
        others = [each for each in self._having(name) if each != namespace]
        return qualified(namespace, name) if self.has_namespaces and others else name

    def stop(self) -> None:
        """As a root's."""
        for root in self._roots.values():
            root.stop()

    def close(self) -> None:
        """As a root's."""
        for root in self._roots.values():
            root.close()


def _seen(read: Callable[[], T]) -> tuple[T | None, str]:
    """What `read` gives, or None and why it cannot be read."""
    try:
        return read(), ""
    except StoreFailure as error:
        return None, error.message
    except OSError as error:
        return None, f"{error}"


def make_roots(places: Iterable[str | Path], cache: Path | None, rest_s: float) -> list[Root]:
    """Local folders for paths, stores for URLs. Reads and imports nothing yet; `cache` and `rest_s` as a store's."""
    return [_make_root(str(place), cache, rest_s) for place in places]


def _make_root(place: str, cache: Path | None, rest_s: float) -> Root:
    location = store_location(place)
    if location is None:
        return LocalRoot(Path(local_path(place)))
    # fsspec takes its time to import.
    from serving.repository.stores.root import StoreRoot

    return StoreRoot(location, cache, rest_s)
