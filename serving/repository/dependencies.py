"""Ensembles after their members: in which order models load, and which cannot because they contain themselves."""

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter


def load_order(members: Mapping[str, Sequence[str]]) -> tuple[list[str], dict[str, str]]:
    """The names of `members`' keys, each after those of its members that are keys too; and why some cannot load.

    A model that contains itself, by whatever way, is not in the order but among the reasons.
    """
    graph = {name: [each for each in inner if each in members] for name, inner in members.items()}
    circular: dict[str, str] = {}
    while True:
        try:
            order = list(TopologicalSorter(graph).static_order())
        except CycleError as error:
            # graphlib's cycle begins and ends with one name, each a member of the next.
            cycle: list[str] = list(reversed(error.args[1]))
            for index, name in enumerate(cycle[:-1]):
                path = " -> ".join([*cycle[index:-1], *cycle[: index + 1]])
                circular[name] = f"circular dependency between ensembles: {path}"
                graph[name] = []
            continue
        return [name for name in order if name not in circular], circular
