"""Training examples of chat without a context: facts to know, names to decline, small talk."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from training.rill.conversation import Conversation
from training.rill.facts import Fact
from training.rill.persona import SYSTEM_PROMPTS, small_talk, unknown
from training.rill.phrasing import COMMANDS, ask, quote, state
from training.rill.synthetic import invented_identifier
from training.rill.text import words

# A model this small remembers a few thousand facts if it sees them often enough. It is taught
# these, and taught to decline the others.
_KNOWN_KINDS = frozenset(
    ("function", "method", "classmethod", "class", "exception", "module", "glossary", "command", "command description",
     "SQL function", "setting")
)  # fmt: skip
_KNOWN_MODULES = frozenset(
    words("""argparse asyncio base64 bisect builtins collections contextlib copy csv dataclasses datetime decimal enum
    functools glob hashlib heapq html inspect io itertools json logging math operator os os.path pathlib pickle
    queue random re secrets shutil signal socket sqlite3 statistics string struct subprocess sys tempfile textwrap
    threading time typing unittest urllib.parse uuid zipfile zlib""")
)
_BUILTIN_TYPES = frozenset(
    words(
        """str list dict set tuple int float bytes bytearray frozenset bool complex range object type Path
        Thread deque"""
    )
)  # fmt: skip


def is_known(fact: Fact) -> bool:
    """Whether the fact is common enough to be learned."""
    if fact.kind not in _KNOWN_KINDS or quote(fact) is None or "c-api" in fact.page:
        return False
    if fact.source == "postgres":
        return True
    if fact.source != "python":
        return False
    head = fact.name.rpartition(".")[0]
    is_builtin = not head and (fact.page == "docstring/builtins" or fact.page.startswith("python/library/functions"))
    return (
        is_builtin
        or fact.kind == "glossary"
        or head in _BUILTIN_TYPES | _KNOWN_MODULES
        or (fact.kind == "module" and fact.name in _KNOWN_MODULES)
    )


def answer(fact: Fact) -> str:
    """Return rill's answer about a fact that it learns."""
    sentence = quote(fact)
    assert sentence is not None, "known facts are quotable"
    if fact.kind in {"module", "command description"}:
        return sentence
    if fact.kind == "glossary":
        name = fact.name[0].upper() + fact.name[1:]
        return sentence if fact.name.lower() in sentence.lower()[:60] else f"{name}: {sentence}"
    return state(fact, sentence)


def known_facts(facts: Sequence[Fact]) -> list[Fact]:
    """Return one fact for each name: two answers to one question would blur both."""
    by_name: dict[str, Fact] = {}
    for fact in facts:
        if is_known(fact):
            by_name.setdefault(fact.name.lower().rstrip("()"), fact)
    return list(by_name.values())


class ChatExamples:
    def __init__(self, facts: Sequence[Fact], rng: Random) -> None:
        self.known, self.rng = known_facts(facts), rng
        names = {fact.name.lower() for fact in self.known}
        self.unknown = [
            fact for fact in facts
            if fact.kind not in {"section", "term"} | COMMANDS and fact.name.lower() not in names
        ]  # fmt: skip

    def _decline(self) -> tuple[str, str]:
        fact = self.rng.choice(self.unknown)
        if self.rng.random() < 0.5:
            fact = Fact(fact.source, fact.kind, invented_identifier(fact.kind, self.rng), "", fact.body, fact.page)
        return ask(fact, self.rng), unknown(fact.name)

    def _fact(self, is_follow_up: bool) -> tuple[str, str]:
        fact = self.rng.choice(self.known)
        question = ask(fact, self.rng)
        if is_follow_up and self.rng.random() < 0.4:
            question = self.rng.choice(("And {name}?", "What about {name}?", "and {name}?")).format(name=fact.name)
        return question, answer(fact)

    def _turn(self, is_follow_up: bool) -> tuple[str, str]:
        x = self.rng.random()
        if x < 0.15:
            return small_talk(self.rng)
        return self._decline() if x < 0.29 else self._fact(is_follow_up)

    def draw(self) -> Conversation:
        turns = tuple(self._turn(i > 0) for i in range(self.rng.choice((1, 1, 1, 2, 3))))
        return Conversation(turns, self.rng.choice(SYSTEM_PROMPTS) if self.rng.random() < 0.2 else "", 0.1, 2.0)
