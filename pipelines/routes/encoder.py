"""A route as an encoder: vectors from the first of its targets that can."""

import asyncio
from collections.abc import Callable, Sequence

from sluice.errors import CANNOT_SERVE, ErrorCode, SluiceError
from sluice.pipelines.answers.cache import AnyEncoder
from sluice.pipelines.answers.notes import current_notes
from sluice.pipelines.encoding import AdmitTokens, admit_all
from sluice.pipelines.encoding.encoder import Embeddings
from sluice.pipelines.encoding.signature import Inputs
from sluice.pipelines.routes.route import Route, join_failures
from sluice.pipelines.routes.target import Target

EncoderTarget = tuple[Target, AnyEncoder]


class RoutedEncoder:
    """The encoder of a route, made for each request. Each target is asked once, in their order."""

    def __init__(self, route: Route, targets: Sequence[EncoderTarget], lengths: Sequence[int | None]) -> None:
        """`targets` are those that serve, at least one; `lengths` are the most tokens of a text for each."""
        self.route = route
        self.name = route.name
        self.created = route.created
        self._targets = targets
        self._lengths = lengths

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of a text that every target takes; None where one is not known."""
        known = [each for each in self._lengths if each is not None]
        return min(known) if len(known) == len(self._lengths) else None

    async def embed(
        self,
        inputs: Inputs,
        label: Callable[[int], str],
        *,
        prefix: str = "",
        truncate_to: int | None = None,
        dimensions: int | None = None,
        admit: AdmitTokens = admit_all,
    ) -> Embeddings:
        """Encode as `TextEncoder.embed`. Raises the last target's error, which says what the others said."""
        failures: list[tuple[str, SluiceError]] = []
        admitted = [each for each in self._targets if each[0].breaker.admits]
        for number, (target, encoder) in enumerate(admitted or self._least_ill(), 1):
            given = target.breaker.enter()
            self.route.note_asked(target.name, "")
            try:
                async with asyncio.timeout(target.settings.timeout_s):
                    found = await encoder.embed(
                        inputs, label, prefix=prefix, truncate_to=truncate_to, dimensions=dimensions, admit=admit
                    )
            except BaseException as raised:
                error = _late(target) if isinstance(raised, TimeoutError) else raised
                target.note_end(given, error)
                if not isinstance(error, SluiceError) or error.code not in CANNOT_SERVE or error.is_senders_limit:
                    raise
                failures.append((target.name, error))
                continue
            if found.is_cached:
                target.note_cached(given)
            else:
                target.note_end(given, None)
            if (notes := current_notes.get()) is not None:
                notes.note_target(target.name, number)
            return found
        raise join_failures(self.name, failures)

    def _least_ill(self) -> list[EncoderTarget]:
        """Return the target whose breaker closes next: without it the route would refuse for sure."""
        return [min(self._targets, key=lambda each: each[0].breaker.closes_in_s)]


Embedder = AnyEncoder | RoutedEncoder
"""Encodes texts for clients: a model or a route."""


def _late(target: Target) -> SluiceError:
    timeout_s = target.settings.timeout_s
    return SluiceError(ErrorCode.DEADLINE, f"model '{target.name}' gave no vectors within {timeout_s:g} s")
