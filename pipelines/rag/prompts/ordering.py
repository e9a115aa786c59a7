"""In which order a prompt has its passages, which come best first."""

from collections.abc import Sequence

from pipelines.text.citations import Source


def in_reading_order(sources: Sequence[Source]) -> list[int]:
    """Indices of `sources`: documents in the order of their best passage, each in text order.

    For models that read all of their context. Questions that find the same passages in another order get the same
    prompt more often, whose prefix is then computed already.
    """
    best: dict[str, int] = {}
    for rank, source in enumerate(sources):
        best.setdefault(source.document, rank)
    return sorted(range(len(sources)), key=lambda index: (best[sources[index].document], sources[index].start, index))
