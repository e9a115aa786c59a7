"""The registry of installed backends: entry points of the group `sluice.backends`, each loaded when first needed."""

from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points

from serving.backend import Backend
from sluice.errors import ErrorCode, SluiceError, invalid_argument

GROUP = "sluice.backends"


class BackendRegistry:
    """Returns one `Backend` for each name. Importing one may be slow: call from a thread, or from several at once."""

    def __init__(self) -> None:
        self._backends: dict[str, Backend] = {}

    def register(self, backend: Backend, *names: str) -> None:
        """Serve `backend` under `names`, or else its own name, in place of an installed one."""
        for name in names or (backend.name,):
            self._backends[name] = backend

    def register_missing(self, backends: Sequence[Backend]) -> list[str]:
        """Serve those of the backends whose names are free. Return the names of the others."""
        taken = set(self.names)
        for backend in backends:
            if backend.name not in taken:
                self.register(backend)
        return [each.name for each in backends if each.name in taken]

    @cached_property
    def _entry_points(self) -> dict[str, EntryPoint]:
        return {each.name: each for each in entry_points(group=GROUP)}

    @property
    def names(self) -> list[str]:
        return sorted({*self._entry_points, *self._backends})

    def get(self, name: str) -> Backend:
        """Return the backend called `name`. Raises INVALID where none is installed, INTERNAL where it fails to load."""
        if name not in self._backends:
            # Two threads may both get here: setdefault lets one of their backends win.
            self._backends.setdefault(name, self._make(name))
        return self._backends[name]

    def find(self, name: str) -> Backend | None:
        """Return the backend that config.pbtxt calls `name`; None where `get` raises."""
        try:
            return self.get(name)
        except SluiceError:
            return None

    def in_detection_order(self) -> list[Backend]:
        """Return every backend that can be constructed, in the order in which they try to recognise a folder."""
        found = {backend.name: backend for name in self.names if (backend := self.find(name)) is not None}
        return sorted(found.values(), key=lambda each: (each.detection_order, each.name))

    def _make(self, name: str) -> Backend:
        if name not in self._entry_points:
            raise invalid_argument(
                f"unable to find backend library for backend '{name}'. Installed backends: {', '.join(self.names)}"
            )
        entry_point = self._entry_points[name]
        try:
            backend = entry_point.load()()
        except Exception as error:
            raise SluiceError(
                ErrorCode.INTERNAL,
                f"backend '{name}' ({entry_point.value}) cannot be loaded: {type(error).__name__}: {error}",
            ) from error
        if not isinstance(backend, Backend):
            raise SluiceError(ErrorCode.INTERNAL, f"backend '{name}' ({entry_point.value}) is not a sluice Backend")
        return backend
