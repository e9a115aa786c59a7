"""What requests call the models of several repositories that have models of one name."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

SEPARATOR = "::"


def namespaces_of(roots: Sequence[str]) -> dict[str, str]:
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
