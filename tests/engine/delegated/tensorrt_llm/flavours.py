"""The stand-in imported into this process, in each of its versions."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from tests.stand_ins.paths import PATHS
from tests.stand_ins.versions import STAND_INS

FLAVOURS = ("1.2.1", "1.3.0")
ONLY_1_2 = pytest.mark.parametrize("flavour", ["1.2.1"], indirect=True)
ONLY_1_3 = pytest.mark.parametrize("flavour", ["1.3.0"], indirect=True)
ONLY_1_4 = pytest.mark.parametrize("flavour", ["1.4.0"], indirect=True)
"""This one differs from 1.3.0 in its arguments alone."""


def load(patch: pytest.MonkeyPatch, flavour: str, **settings: str) -> ModuleType:
    """Return `tensorrt_llm` of this flavour with these settings: `load(patch, "1.3.0", FAULT="unhealthy")`."""
    for path in PATHS:
        patch.syspath_prepend(str(path))
    for name, value in {"VERSION": flavour, **settings}.items():
        patch.setenv(f"STAND_IN_{name}", value)
    return STAND_INS.load(flavour)


@contextmanager
def imported(flavour: str, patch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import `tensorrt_llm` of this flavour, without faults, as long as the context lasts."""
    try:
        yield load(patch, flavour)
    finally:
        STAND_INS.unload()
