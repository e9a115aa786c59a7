"""The stand-in for TensorRT-LLM: in this process, in an engine's process, and the model folders that it reads."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.engine.delegated.tensorrt_llm.flavours import FLAVOURS, load
from tests.stand_ins.model_folders import make_checkpoint, make_compiled_engine, make_converted_checkpoint
from tests.stand_ins.versions import STAND_INS


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> str:
    """The version that the stand-in is of."""
    return str(request.param)


@pytest.fixture
def import_stand_in(monkeypatch: pytest.MonkeyPatch, flavour: str) -> Iterator[Callable[..., ModuleType]]:
    """Import `tensorrt_llm` with these settings: `import_stand_in(FAULT="hang_after=3")`. LLMs that are still up at the
    end are the test's to shut down."""
    yield partial(load, monkeypatch, flavour)
    STAND_INS.unload()


@pytest.fixture
def open_llm(checkpoint: Path) -> Iterator[Callable[..., Any]]:
    """Make an LLM of the imported stand-in and shut it down at the end: `open_llm(tensorrt_llm, max_batch_size=4)`."""
    with ExitStack() as stack:

        def make(package: ModuleType, model: Path = checkpoint, **arguments: Any) -> Any:
            llm = package.LLM(model, skip_tokenizer_init=True, **arguments)
            stack.callback(llm.shutdown)
            return llm

        yield make


@pytest.fixture
def stand_in(import_stand_in: Callable[..., ModuleType]) -> ModuleType:
    """`tensorrt_llm` of this flavour without faults."""
    return import_stand_in()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A HuggingFace checkpoint without weights, of the size of the suite's runner without a model."""
    return make_checkpoint(tmp_path / "checkpoint")


@pytest.fixture
def converted_checkpoint(tmp_path: Path) -> Path:
    """A checkpoint in TensorRT-LLM's own format, without weights."""
    return make_converted_checkpoint(tmp_path / "converted")


@pytest.fixture
def compiled_engine(tmp_path: Path) -> Path:
    """A compiled engine's folder, without the engine."""
    return make_compiled_engine(tmp_path / "compiled")
