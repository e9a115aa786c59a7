"""The registry of installed backends: entry points of the group `sluice.backends`, each loaded when first needed."""

from collections.abc import Sequence
from difflib import get_close_matches
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backend import Backend
from sluice.serving.findings import invalid_field

GROUP = "sluice.backends"
_SIMILARITY = 0.7
_LIBRARIES = {
    "dali": "decode and resize in a Python model (Pillow, torchvision), for instance as a step of an ensemble",
    "fil": "convert the trees to model.onnx (onnxmltools, skl2onnx), or predict in a Python model (treelite)",
}
"""Replacements for Triton's backends that are C++ libraries, by name."""
_ANY_LIBRARY = (
    'backend: "python" with a model.py, or DIR/{name}/model.py for --backend-directory DIR: C++ libraries '
    "(libtriton_{name}.so) are not loaded"
)


def _not_installed(name: str, installed: Sequence[str]) -> SluiceError:
    """Return the error of a backend that is not installed, which says what to write in its place."""
    near = [] if name in _LIBRARIES else get_close_matches(name, installed, n=1, cutoff=_SIMILARITY)
    start = f"unable to find backend library for backend '{name}'" + (f"; did you mean '{near[0]}'?" if near else ".")
    fix = f'backend: "{near[0]}"' if near else _LIBRARIES.get(name, _ANY_LIBRARY.format(name=name))
    return invalid_field(f"{start} Installed backends: {', '.join(installed)}", "backend", fix)


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
            raise _not_installed(name, self.names)
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
