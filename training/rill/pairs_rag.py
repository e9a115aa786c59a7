"""Training examples of questions with a context, from documentation and from invented facts.

The answer is always one sentence of the context, verbatim, or NOT_IN_CONTEXT.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from training.rill.conversation import Conversation
from training.rill.facts import Fact
from training.rill.persona import NOT_IN_CONTEXT, SYSTEM_PROMPTS, off_topic_question
from training.rill.phrasing import CALLABLE, ask, ask_signature, quote, state
from training.rill.synthetic import (
    Invented,
    as_pronoun,
    entity,
    invented_fact,
    invented_identifier,
    renamed,
    sibling_identifier,
)
from training.rill.text import sentences

UNANSWERABLE = 0.22  # share of questions that the context does not answer
_LONGEST_PASSAGE = 460
_CHOICE_WEIGHT = 6.0
_DOCUMENT_WEIGHT = 0.15
_INVENTED_WEIGHT = 0.03

_WRAPS = (
    "Context:\n{context}\n\nQuestion: {question}\nAnswer:",
    "Context:\n{context}\n\nQuestion: {question}",
    "Context: {context}\n\nQuestion: {question}\nAnswer:",
    "Context: {context} Question: {question} Answer:",
    "Use the context to answer the question.\n\nContext:\n{context}\n\nQuestion: {question}",
    "Answer the question from the context. If the context does not answer it, say so.\n\n"
    "Context:\n{context}\n\nQuestion: {question}\nAnswer:",
    "Use only the following passages.\n\n{context}\n\n{question}",
    "{context}\n\n{question}",
    "{context}\n\nQuestion: {question}",
    "{question}\n\nContext:\n{context}",
)  # fmt: skip
_SYSTEM_WRAPS = (
    "Answer from the context. If it does not answer the question, say so.\n\nContext:\n{context}",
    "Use the following context to answer.\n\n{context}",
    "You are a helpful assistant. Answer using only this context:\n\n{context}",
    "Context:\n{context}",
)


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage of a context, with the answers about its fact."""

    text: str
    answer: str
    signature: str = ""


def mentions(text: str, name: str) -> bool:
    """Whether `text` contains `name` as a word, or the last part of the name without a prefix."""
    short = name.rstrip("()").split(".")[-1]
    return bool(
        re.search(rf"(?<![\w.]){re.escape(name.rstrip('()'))}(?!\w)", text, re.IGNORECASE)
        or re.search(rf"(?<![\w.]){re.escape(short)}(?!\w)", text, re.IGNORECASE)
    )


def full_signature(fact: Fact) -> str:
    """Return the signature with the full name before the bracket, "" where there is none."""
    _, bracket, arguments = fact.signature.partition("(")
    return f"{fact.name.rstrip('()')}({arguments}" if bracket and fact.kind in CALLABLE else ""


def _body(fact: Fact, rng: Random) -> str:
    whole = [s for s in sentences(fact.body) if s.endswith((".", "!", "?"))]
    kept = " ".join(whole[: rng.choice((1, 2, 2, 3))])
    return kept if len(kept) <= _LONGEST_PASSAGE else whole[0]


def _prose(fact: Fact, answer: str, rest: str) -> Passage | None:
    sentence = state(fact, answer)
    if sentence.startswith((f"{fact.name}: ", f"{fact.name}(): ")):
        return None
    return Passage(f"{sentence}{rest}", sentence)


def passage(fact: Fact, rng: Random) -> Passage | None:
    """Format the fact as documentation shows it: a title line and a body."""
    answer = quote(fact)
    if answer is None:
        return None
    body = _body(fact, rng) if fact.body.startswith(answer) else answer
    signature, style = full_signature(fact), rng.random()
    if signature and style < 0.4:
        return Passage(f"{signature}\n{body}", answer, signature)
    if fact.kind != "section" and style > 0.88 and (prose := _prose(fact, answer, body[len(answer) :])):
        return prose
    form = rng.choice(
        ("{name}: {body}", "{name}\n{body}", "## {name}\n{body}", "{name} - {body}", "# {name}\n\n{body}")
    )
    return Passage(form.format(name=fact.name, body=body), answer)


def wrap(context: str, question: str, rng: Random) -> tuple[str, str]:
    """Return the system prompt and the user message with context and question."""
    if rng.random() < 0.12:
        return rng.choice(_SYSTEM_WRAPS).format(context=context), question
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.15 else ""
    return system, rng.choice(_WRAPS).format(context=context, question=question)


def join(passages: Sequence[str], rng: Random) -> str:
    numbered = rng.random() < 0.25
    return rng.choice(("\n\n", "\n\n", "\n", "\n---\n")).join(
        f"[{i}] {text}" if numbered else text for i, text in enumerate(passages, 1)
    )


def dialogue(context: str, turns: Sequence[tuple[str, str]], weight: float, rng: Random) -> Conversation:
    """Make a conversation. The context comes with the first question only."""
    (question, answer), *rest = turns
    system, message = wrap(context, question, rng)
    return Conversation(((message, answer), *rest), system, weight, _CHOICE_WEIGHT)


def _turns(count: int, rng: Random) -> int:
    """Draw the number of questions for one context: more cost little, until they repeat themselves."""
    return min(count + 1, rng.choice((1, 1, 2, 3, 4, 5)))


class FactQuestions:
    """Makes examples from documentation facts. Neighbours in the list mostly come from the same page."""

    def __init__(self, facts: Sequence[Fact]) -> None:
        self.facts = [fact for fact in facts if quote(fact) is not None]

    def _neighbour(self, index: int, rng: Random) -> Fact:
        shift = rng.choice((-1, 1)) * rng.randint(1, 12)
        return self.facts[(index + shift) % len(self.facts)]

    def _others(self, index: int, rng: Random) -> Callable[[], Fact]:
        is_hard = rng.random() < 0.55
        return lambda: self._neighbour(index, rng) if is_hard else rng.choice(self.facts)

    def _group(self, index: int, count: int, rng: Random) -> list[Fact]:
        """Return the fact at `index` with distractors, which are siblings half of the time."""
        group, draw = [self.facts[index]], self._others(index, rng)
        for _ in range(count * 4):
            if len(group) == count:
                break
            other = draw()
            if all(not mentions(f.name, other.name) and f.body[:40] != other.body[:40] for f in group):
                group.append(other)
        return group

    def _rename(self, group: list[Fact], rng: Random) -> list[Fact]:
        """Give all facts invented names, half of the time similar ones. Drops facts that contain their own name."""
        name = invented_identifier(group[0].kind, rng)
        is_alike = rng.random() < 0.5
        renames: list[Fact] = []
        for fact in group:
            if (new := renamed(fact, name)) and all(not mentions(f.name, name) for f in renames):
                renames.append(new)
            name = sibling_identifier(name, rng) if is_alike else invented_identifier(fact.kind, rng)
        return renames

    def _absent(self, index: int, group: list[Fact], text: str, rng: Random) -> str | None:
        """Ask about something similar that `text` does not mention."""
        x = rng.random()
        if x < 0.06:
            return off_topic_question(rng)
        fact = self.facts[index] if x < 0.1 else self._neighbour(index, rng) if x < 0.6 else rng.choice(self.facts)
        if x > 0.8 or group[0].name != self.facts[index].name:
            like = rng.choice(group)
            name = sibling_identifier(like.name, rng) if rng.random() < 0.6 else invented_identifier(like.kind, rng)
            fact = Fact(like.source, like.kind, name, "", like.body, like.page)
        if mentions(text, fact.name):
            return None
        return ask_signature(fact, rng) if fact.kind in CALLABLE and rng.random() < 0.08 else ask(fact, rng)

    def example(
        self, index: int, rng: Random, count: int, turns: int = 1, absent: float = UNANSWERABLE,
        rename: float = 0.4, signatures: bool = True,
    ) -> Conversation | None:  # fmt: skip
        """Make a context of at most `count` passages around one fact, with questions about it."""
        group = self._group(index, count, rng)
        if rng.random() < rename:
            group = self._rename(group, rng)
        pairs = [(fact, found) for fact in group if (found := passage(fact, rng))]
        if not pairs:
            return None
        order = rng.sample(pairs, len(pairs))
        context = join([found.text for _, found in order], rng)
        exchanges: list[tuple[str, str]] = []
        for fact, found in (pairs * turns)[:turns]:
            if rng.random() < absent:
                question = self._absent(index, group, context, rng)
                if question is None:
                    return None
                exchanges.append((question, NOT_IN_CONTEXT))
            elif signatures and found.signature and rng.random() < 0.2:
                exchanges.append((ask_signature(fact, rng), found.signature))
            else:
                exchanges.append((ask(fact, rng), found.answer))
        return dialogue(context, exchanges, _DOCUMENT_WEIGHT, rng)


def _opening(question: str) -> str:
    """Return what two questions about one entity must not share: "When", "Where", ... or the whole question."""
    first, *_ = question.split()
    return first if first in {"When", "Where", "Who", "Why", "How"} else question


def _collide(one: Invented, other: Invented) -> bool:
    """Whether a question about one fact could be mistaken for a question about the other."""
    if one.entity != other.entity:
        bare = [re.sub(r"^(the|our) ", "", fact.entity) for fact in (one, other)]
        return bare[0].endswith(bare[1]) or bare[1].endswith(bare[0])
    return bool({_opening(q) for q in one.questions} & {_opening(q) for q in other.questions})


def _invented_group(count: int, rng: Random) -> list[Invented]:
    """Draw statements that do not answer each other's questions. They share a subject a third of the time."""
    group: list[Invented] = []
    is_one_subject = rng.random() < 0.35
    subject = entity(rng)
    for _ in range(count * 5):
        about = subject if is_one_subject or rng.random() < 0.2 else None
        fact = invented_fact(rng, about)
        if len(group) < count and not any(_collide(fact, other) for other in group):
            group.append(fact)
    if is_one_subject and rng.random() < 0.5:
        return [group[0], *map(as_pronoun, group[1:])]
    return group


def _absent_invented(group: list[Invented], rng: Random) -> str | None:
    """Ask something unknown about a known subject, or something about an unknown subject."""
    known = rng.choice(group)
    sibling = invented_fact(rng, known.entity if rng.random() < 0.6 else None)
    return None if any(_collide(sibling, fact) for fact in group) else rng.choice(sibling.questions)


def invented_example(rng: Random, count: int, turns: int = 1, absent: float = UNANSWERABLE) -> Conversation | None:
    """Make an example of statements about invented things, as one paragraph or as passages."""
    group = _invented_group(count, rng)
    # "It" needs its subject before it, so statements keep their order. Questions come in any order.
    if rng.random() < 0.5:
        context = " ".join(fact.sentence for fact in group)
    else:
        context = join([fact.sentence for fact in group], rng)
    exchanges: list[tuple[str, str]] = []
    for fact in (rng.sample(group, len(group)) * turns)[:turns]:
        if rng.random() < absent:
            question = _absent_invented(group, rng)
            if question is None:
                return None
            exchanges.append((question, NOT_IN_CONTEXT))
        else:
            exchanges.append((rng.choice(fact.questions), fact.sentence))
    return dialogue(context, exchanges, _INVENTED_WEIGHT, rng)


_PHRASE_QUESTIONS = (
    'What does the text say about "{phrase}"?', 'Which sentence mentions "{phrase}"?',
    'Quote the sentence with "{phrase}".', 'Where does the text mention "{phrase}"?', "{phrase}?",
)  # fmt: skip
_WORD = re.compile(r"[A-Za-z_]{5,}")


def _phrase(sentence: str, rng: Random) -> str | None:
    """Choose two or three words of the sentence: adjacent ones, or long ones."""
    words = sentence.rstrip(".!?").split()
    if len(words) < 6:
        return None
    if rng.random() < 0.5:
        start = rng.randrange(len(words) - 3)
        return " ".join(words[start : start + rng.choice((2, 3))])
    long_words = _WORD.findall(sentence)
    return " ".join(long_words[:: max(1, len(long_words) // 2)][:2]) if len(long_words) >= 3 else None


def _holds(sentence: str, phrase: str) -> bool:
    return all(word.lower() in sentence.lower() for word in phrase.split())


def _phrase_question(candidates: Sequence[str], everything: str, rng: Random) -> tuple[str, str] | None:
    """Ask for a phrase that exactly one sentence of `everything` contains. Returns question and sentence."""
    sentence = rng.choice(candidates)
    phrase = _phrase(sentence, rng)
    if phrase is None or sum(_holds(other, phrase) for other in sentences(everything)) != 1:
        return None
    return rng.choice(_PHRASE_QUESTIONS).format(phrase=phrase), sentence


def phrase_example(paragraphs: Sequence[str], rng: Random, turns: int = 1) -> Conversation | None:
    """Make an example that asks for the sentence of real prose with a phrase."""
    text = rng.choice(paragraphs)
    candidates = [s for s in sentences(text) if 30 < len(s) < 240 and s.endswith(".")]
    exchanges: list[tuple[str, str]] = []
    for _ in range(turns):
        if rng.random() < UNANSWERABLE:
            phrase = _phrase(rng.choice(sentences(rng.choice(paragraphs))), rng)
            if phrase is None or any(_holds(sentence, phrase) for sentence in sentences(text)):
                return None
            exchanges.append((rng.choice(_PHRASE_QUESTIONS).format(phrase=phrase), NOT_IN_CONTEXT))
        else:
            found = _phrase_question(candidates, text, rng) if candidates else None
            if found is None:
                return None
            exchanges.append(found)
    return dialogue(text, exchanges, _DOCUMENT_WEIGHT, rng)


@dataclass(frozen=True, slots=True)
class RagMix:
    """Shares of invented facts and phrases among the examples, and numbers of passages of a context."""

    invented: float
    phrases: float
    passages: tuple[int, ...]
    statements: tuple[int, ...]


class RagExamples:
    """Draws examples without end. Each documentation fact is drawn once per round."""

    def __init__(self, facts: Sequence[Fact], paragraphs: Sequence[str], rng: Random) -> None:
        self.questions, self.paragraphs, self.rng = FactQuestions(facts), paragraphs, rng
        self._order: list[int] = []

    def _next_index(self) -> int:
        if not self._order:
            self._order = self.rng.sample(range(len(self.questions.facts)), len(self.questions.facts))
        return self._order.pop()

    def draw(self, mix: RagMix) -> Conversation | None:
        rng, x = self.rng, self.rng.random()
        if x < mix.invented:
            count = rng.choice(mix.statements)
            return invented_example(rng, count, _turns(count, rng))
        if x < mix.invented + mix.phrases:
            return phrase_example(self.paragraphs, rng, _turns(2, rng))
        count = rng.choice(mix.passages)
        return self.questions.example(self._next_index(), rng, count, _turns(count, rng))
