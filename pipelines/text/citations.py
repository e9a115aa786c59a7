"""Which sources an answer rests on: by the markers that the model put, else by the words that are a source's."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipelines.text.sources import Citation, Source

_MARKER = re.compile(r"[\[【]\s*(\d{1,3}(?:\s*[,;]\s*\d{1,3})*)\s*(?:†[^\[【\]】]*)?[\]】](?!\()")
"""[1], [1, 2], 【1】 and 【1†source】; a bracket behind it makes it a Markdown link."""
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]+`", re.DOTALL)
"""In code, [1] is an index."""
_STOP = r"[.!?]++[\"'”’)\]]*+"
_SENTENCE = re.compile(rf"(?=\S)(?:[^.!?\n]|{_STOP}(?!\s|\Z))*+(?:{_STOP})?")
_SENTENCE_REST = " \t\r\n.,;:!?)"
"""What may follow a marker and belongs to the sentence that it marks."""
_WORD = re.compile(r"\w+")
_RUN = 4
"""Words in a row that count as taken over: three and fewer come up in texts that know nothing of each other."""
_SHORT = 2
"""Sentences of so few words cannot show where they come from."""
_TAKEN = 0.6
"""Share of a sentence's words that runs taken from one source must make up: more of it is the source's than not."""
_REFUSAL = re.compile(
    r"\b(?:the|these|this|any|your)\s+(?:\w+\s+)?(?:context|sources?|documents?|documentation|passages?)\s+"
    r"(?:(?:does|do|did)(?:\s+not|n['’]t)|cannot)\s+(?:\w+\s+){0,2}?"
    r"(?:answer|contain|mention|say|state|provide|include|cover|address|specify|have)\b",
    re.IGNORECASE,
)
"""An answer that finds nothing, in the usual words."""
_Run = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    end: int


def cite(answer: str, sources: Sequence[Source]) -> list[Citation]:
    """The citations of a whole answer, in order of its text. `sources` have the ids of its prompt, from 1.

    An answer with markers says itself what it rests on; each marks the sentence, or the part of one, that ends with
    it. Else each sentence cites the source that most of its words are taken from. What says that the sources do not
    answer cites nothing.
    """
    ids = {source.id for source in sources}
    return _by_markers(answer, ids) or _by_overlap(answer, sources)


# -- markers


def _by_markers(answer: str, ids: set[int]) -> list[Citation]:
    found: list[Citation] = []
    marked, last_end = _Span(0, 0), 0
    for marker in _MARKER.finditer(_CODE.sub(_struck_out, answer)):
        if answer[last_end : marker.start()].strip():  # else it follows another one, and marks the same
            marked = _marked(answer, last_end, marker.start())
        last_end = marker.end()
        if marked.start < marked.end and not _REFUSAL.search(answer, marked.start, marked.end):
            found += [
                Citation(source=number, start=marked.start, end=marked.end, by="marker")
                for number in dict.fromkeys(map(int, re.findall(r"\d+", marker[1])))
                if number in ids
            ]
    return list(dict.fromkeys(found))


def _struck_out(code: re.Match[str]) -> str:
    return "`" * len(code[0])


def _marked(answer: str, after: int, before: int) -> _Span:
    """The last sentence, or what there is of it, between two markers; empty where there is none."""
    between = answer[after:before].lstrip(_SENTENCE_REST)
    *_, last = (_Span(0, 0), *_sentences(between))
    return _Span(before - len(between) + last.start, before - len(between) + last.end)


# -- overlap


def _by_overlap(answer: str, sources: Sequence[Source]) -> list[Citation]:
    told = {size: _places_of_runs(sources, size) for size in range(_SHORT + 1, _RUN + 1)}
    found = []
    for span in _sentences(answer):
        sentence = answer[span.start : span.end]
        words = _words(sentence)
        if len(words) <= _SHORT or _REFUSAL.search(sentence):
            continue
        size = min(_RUN, len(words))
        taken = _taken(words, size, told[size])
        best = max(taken, key=lambda place: (taken[place], -place), default=None)  # the first of equals
        if best is not None and taken[best] >= _TAKEN:
            found.append(Citation(source=sources[best].id, start=span.start, end=span.end, by="overlap"))
    return found


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _places_of_runs(sources: Sequence[Source], size: int) -> dict[_Run, list[int]]:
    """For each run of `size` words the places in `sources` of those that have it."""
    places: defaultdict[_Run, list[int]] = defaultdict(list)
    for place, source in enumerate(sources):
        for run in set(_runs(_words(source.text), size)):
            places[run].append(place)
    return places


def _taken(words: Sequence[str], size: int, told: Mapping[_Run, Sequence[int]]) -> dict[int, float]:
    """By source, where it has any run of them, the share of `words` that stand in runs which it has too."""
    taken: defaultdict[int, set[int]] = defaultdict(set)
    for start, run in enumerate(_runs(words, size)):
        for place in told.get(run, ()):
            taken[place].update(range(start, start + size))
    return {place: len(numbers) / len(words) for place, numbers in taken.items()}


def _runs(words: Sequence[str], size: int) -> Iterator[_Run]:
    return (tuple(words[start : start + size]) for start in range(len(words) - size + 1))


def _sentences(text: str) -> Iterator[_Span]:
    """Without the white space around them. A line break ends one too: items of a list have no full stop."""
    for match in _SENTENCE.finditer(text):
        yield _Span(match.start(), match.start() + len(match.group().rstrip()))
