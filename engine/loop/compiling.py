"""Sequences whose grammar is still being compiled: they wait beside the queue, and hold up nobody."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from engine.sampling.constraint import Constraint
from engine.sequence import Sequence
from engine.types import EngineInfo, Grammar
from sluice.errors import ErrorCode, SluiceError

if TYPE_CHECKING:
    from engine.guidance.compiler import GrammarCompiler
    from engine.guidance.matching import CompiledGrammar


class CompilingGrammars:
    """Used by the engine thread; the compiler's own threads do the work."""

    def __init__(self, model_path: str, info: EngineInfo) -> None:
        self._model_path = model_path
        self._info = info
        self._compiler: GrammarCompiler | None = None
        self._waiting: dict[int, tuple[Sequence, Future[CompiledGrammar]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter([sequence for sequence, _ in self._waiting.values()])

    def add(self, sequence: Sequence, grammar: Grammar) -> None:
        """Begin to compile `grammar`, unless that has been done before."""
        if self._compiler is None:
            from engine.guidance.compiler import GrammarCompiler  # only who asks for a grammar pays for loading it

            self._compiler = GrammarCompiler(Path(self._model_path), self._info.vocab_size, self._info.eos_token_ids)
        self._waiting[sequence.stream_id] = (sequence, self._compiler.compile(grammar))

    def get(self, stream_id: int) -> Sequence | None:
        entry = self._waiting.get(stream_id)
        return None if entry is None else entry[0]

    def remove(self, stream_id: int) -> None:
        self._waiting.pop(stream_id, None)

    def take_done(self) -> list[tuple[Sequence, Constraint | SluiceError]]:
        """The sequences whose grammar is ready, each with its constraint or with what is wrong with it."""
        done = [(sequence, future) for sequence, future in self._waiting.values() if future.done()]
        for sequence, _ in done:
            del self._waiting[sequence.stream_id]
        return [(sequence, _outcome(future)) for sequence, future in done]

    def close(self) -> None:
        """End the compiler's threads."""
        if self._compiler is not None:
            self._compiler.close()


def _outcome(future: "Future[CompiledGrammar]") -> Constraint | SluiceError:
    try:
        return future.result().constraint()
    except SluiceError as error:
        return error
    except Exception as error:
        return SluiceError(ErrorCode.INTERNAL, f"compiling the grammar failed: {error}")
