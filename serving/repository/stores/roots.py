"""The roots of a repository, from what an operator names."""

from collections.abc import Iterable
from pathlib import Path

from serving.repository.roots import LocalRoot, Root
from serving.repository.stores.location import local_path, store_location


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
