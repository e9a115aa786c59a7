"""Recordings of what a test does, as a protocol's guard begins them."""

from collections.abc import Iterator
from contextlib import contextmanager

from sluice.record.spans import Recording, RemoteParent, Span, current_span

PARENT = RemoteParent(0xA1, 0xB2, True)


@contextmanager
def recorded() -> Iterator[Recording]:
    """Record what is done in the context, for a collector."""
    recording = Recording("test", "id", {}, lambda done: None, PARENT, is_sampled=True, is_exported=True)
    token = current_span.set(recording.root)
    try:
        yield recording
    finally:
        recording.root.end()
        current_span.reset(token)


def find_span(recording: Recording, name: str) -> Span:
    """Return the only span of that name."""
    [found] = [each for each in recording.spans if each.name == name]
    return found


def parents(recording: Recording) -> dict[str, str]:
    """Return the name of each span's parent, by its own."""
    return {each.name: each.parent.name for each in recording.spans if each.parent is not None}
