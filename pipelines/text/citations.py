"""Sources of a retrieval-augmented answer, and citations: which parts of the answer rest on which source. Citations
come from the markers that the model wrote, else from runs of words that the answer shares with a source."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

_MARKER = re.compile(r"[\[【]\s*(\d{1,3}(?:\s*[,;]\s*\d{1,3})*)\s*(?:†[^\[【\]】]*)?[\]】](?!\()")
"""Matches [1], [1, 2], 【1】 and 【1†source】. With a bracket behind it, it is a Markdown link and does not match."""
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]+`", re.DOTALL)
"""Matches code, in which [1] is an index."""
_STOP = r"[.!?]++[\"'”’)\]]*+"
_SENTENCE = re.compile(rf"(?=\S)(?:[^.!?\n]|{_STOP}(?!\s|\Z))*+(?:{_STOP})?")
_SENTENCE_REST = " \t\r\n.,;:!?)"
"""Characters that may follow a marker and still belong to the sentence that it marks."""
_WORD = re.compile(r"\w+")
_RUN = 4
"""Consecutive words that count as quoted. Three or fewer also coincide in unrelated texts."""
_SHORT = 2
"""Sentences of at most this many words are too short to attribute."""
_MIN_QUOTED_SHARE = 0.6
"""Smallest share of a sentence's words that must stand in runs quoted from one source."""
_REFUSAL = re.compile(
    r"\b(?:the|these|this|any|your)\s+(?:\w+\s+)?(?:context|sources?|documents?|documentation|passages?)\s+"
    r"(?:(?:does|do|did)(?:\s+not|n['’]t)|cannot)\s+(?:\w+\s+){0,2}?"
    r"(?:answer|contain|mention|say|state|provide|include|cover|address|specify|have)\b",
    re.IGNORECASE,
)
"""Matches the usual sentences that say that the sources have no answer."""
_Run = tuple[str, ...]


class Source(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A retrieved chunk: its document, its heading and its range of characters there. `id` is the source's number in
    the prompt, from 1. Before there is a prompt it is 0, which JSON leaves out."""

    id: int = 0
    document: str
    title: str = ""
    heading: str = ""
    start: int
    end: int
    score: float
    similarity: float | None = None
    metadata: dict[str, str | int | float | bool | None] = {}
    text: str


class Citation(msgspec.Struct, frozen=True, kw_only=True):
    """A range of an answer's characters that rests on the source with the id `source`. `by` is "marker" where the model
    cited the source, "overlap" where the answer repeats the source's words."""

    source: int
    start: int
    end: int
    by: str


class EncodingProgress(msgspec.Struct, frozen=True):
    """How much of a collection is encoded while documents are added to it. `num_chunks` counts the chunks of the
    documents that are stored or being encoded, not of those that wait to be read."""

    collection: str
    num_encoded: int
    num_chunks: int

    def __str__(self) -> str:
        counts = f"{self.num_encoded} of {self.num_chunks} chunks so far"
        return f"Documents of collection '{self.collection}' are being encoded: {counts}."


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Source)
_PROGRESS_DECODER = msgspec.json.Decoder(EncodingProgress)


def encode_source(source: Source) -> bytes:
    """Encode a source as an element of a BYTES tensor, in JSON."""
    return _ENCODER.encode(source)


def decode_source(element: bytes) -> Source:
    """Decode an element of a BYTES tensor. Raises msgspec.DecodeError where it is not a source."""
    return _DECODER.decode(element)


def encode_progress(progress: EncodingProgress | None) -> bytes:
    """Encode the progress as an element of a BYTES tensor, in JSON; None as an empty element."""
    return b"" if progress is None else _ENCODER.encode(progress)


def decode_progress(element: bytes) -> EncodingProgress | None:
    """Decode an element of `encode_progress`. Raises msgspec.DecodeError where it is neither empty nor a progress."""
    return _PROGRESS_DECODER.decode(element) if element else None


def encoding_field(progress: EncodingProgress | None) -> dict[str, Any]:
    """Return the field `encoding` of an answer over HTTP, which is there only while documents are being encoded."""
    return {} if progress is None else {"encoding": msgspec.to_builtins(progress)}


def to_json_objects(items: Sequence[Source | Citation]) -> list[dict[str, Any]]:
    """Return the items as JSON objects, for answers over HTTP."""
    return [msgspec.to_builtins(item) for item in items]


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    end: int


def cite(answer: str, sources: Sequence[Source]) -> list[Citation]:
    """Return the citations of a whole answer, in order of its text. `sources` have the ids of its prompt, from 1.

    A marker cites its source for the sentence, or the part of one, that ends at the marker. In an answer without
    markers each sentence cites the source that most of its words are quoted from. A sentence that says that the
    sources have no answer cites nothing.
    """
    ids = {source.id for source in sources}
    return _by_markers(answer, ids) or _by_overlap(answer, sources)


# -- markers


def _by_markers(answer: str, ids: set[int]) -> list[Citation]:
    found: list[Citation] = []
    marked, last_end = _Span(0, 0), 0
    for marker in _MARKER.finditer(_CODE.sub(lambda code: "`" * len(code[0]), answer)):
        if answer[last_end : marker.start()].strip():  # else it follows another marker, and marks the same text
            marked = _find_marked(answer, last_end, marker.start())
        last_end = marker.end()
        if marked.start < marked.end and not _REFUSAL.search(answer, marked.start, marked.end):
            found += [
                Citation(source=number, start=marked.start, end=marked.end, by="marker")
                for number in dict.fromkeys(map(int, re.findall(r"\d+", marker[1])))
                if number in ids
            ]
    return list(dict.fromkeys(found))


def _find_marked(answer: str, after: int, before: int) -> _Span:
    """Return the last sentence, or part of one, between two markers; an empty span where there is none."""
    between = answer[after:before].lstrip(_SENTENCE_REST)
    *_, last = (_Span(0, 0), *_sentences(between))
    return _Span(before - len(between) + last.start, before - len(between) + last.end)


# -- overlap


def _by_overlap(answer: str, sources: Sequence[Source]) -> list[Citation]:
    known = {size: _index_runs(sources, size) for size in range(_SHORT + 1, _RUN + 1)}
    found = []
    for span in _sentences(answer):
        sentence = answer[span.start : span.end]
        words = _words(sentence)
        if len(words) <= _SHORT or _REFUSAL.search(sentence):
            continue
        size = min(_RUN, len(words))
        shares = _quoted_shares(words, size, known[size])
        best = max(shares, key=lambda place: (shares[place], -place), default=None)  # the first of equals
        if best is not None and shares[best] >= _MIN_QUOTED_SHARE:
            found.append(Citation(source=sources[best].id, start=span.start, end=span.end, by="overlap"))
    return found


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _index_runs(sources: Sequence[Source], size: int) -> dict[_Run, list[int]]:
    """Map each run of `size` words to the places in `sources` of the sources that contain it."""
    places: defaultdict[_Run, list[int]] = defaultdict(list)
    for place, source in enumerate(sources):
        for run in set(_runs(_words(source.text), size)):
            places[run].append(place)
    return places


def _quoted_shares(words: Sequence[str], size: int, known: Mapping[_Run, Sequence[int]]) -> dict[int, float]:
    """Map each source that shares a run with `words` to the share of `words` in such runs."""
    quoted: defaultdict[int, set[int]] = defaultdict(set)
    for start, run in enumerate(_runs(words, size)):
        for place in known.get(run, ()):
            quoted[place].update(range(start, start + size))
    return {place: len(numbers) / len(words) for place, numbers in quoted.items()}


def _runs(words: Sequence[str], size: int) -> Iterator[_Run]:
    return (tuple(words[start : start + size]) for start in range(len(words) - size + 1))


def _sentences(text: str) -> Iterator[_Span]:
    """Yield sentences without surrounding white space. A line break ends one too: list items have no full stop."""
    for match in _SENTENCE.finditer(text):
        yield _Span(match.start(), match.start() + len(match.group().rstrip()))
