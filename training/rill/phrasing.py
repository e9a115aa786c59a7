"""Words facts in English: questions about a fact, and the fact as a sentence of its own."""

from __future__ import annotations

import re
from random import Random

from training.rill.facts import Fact
from training.rill.sources import TITLES
from training.rill.text import sentences, words

CALLABLE = frozenset({"function", "method", "classmethod", "staticmethod", "SQL function"})
COMMANDS = frozenset({"command", "command description"})
_LONGEST_QUOTE = 240

_VERBS = frozenset(
    words(
        """abort accept acquire add allow alter analyze append apply assign attempt begin bind build
            calculate call cancel cause change check clear close cluster collect comment commit compare
            compile compress compute configure connect construct control convert copy count create declare
            decode decompress decrement define delete describe deserialize designate determine disable display
            draw drop dump emit enable encode enter estimate evaluate execute exit expand explain export
            extend extract fetch find fit flush force format generate get grant handle hash hold ignore
            implement import include increment indicate initialize insert install invoke iterate join kill
            list listen load locate lock log look make map mark match merge move normalize obtain open output
            override pack parse pass pause perform pick pop prepare prevent print process produce provide pull
            push put query raise read reassign refresh register reindex release remove rename render replace
            represent request reset resize resolve restore resume retrieve return reverse revoke rewind
            rollback round run save scan schedule search select send serialize set show shut skip sleep sort
            specify split start stop store strip subtract swap sync synchronize take terminate test trace
            transform translate truncate try turn undo uninstall unload unlock unpack unregister update use
            vacuum validate verify visit wait walk warn wrap write"""
    )
)
_IRREGULAR = {"have": "has", "do": "does", "be": "is", "go": "goes"}

_ASK_CALLABLE = (
    "What does {name} do?", "What does {name} do?", "What does {name} do in {source}?", "Explain {name}.",
    "what is {name} for", "What is {name} used for?", "How does {name} work?", "Describe the {kind} {name}.",
    "Tell me about {name}.", "what does {name} do", "Can you explain {name}?",
)  # fmt: skip
_ASK_COMMAND = (
    "What does {name} do?", "What does {name} do in {source}?", "What is the {name} command for?",
    "Explain {name}.", "What is {name}?", "Describe {name}.", "Tell me about {name}.",
)  # fmt: skip
_ASK_MODULE = (
    "What is the {name} module for?", "What does the {name} module do?", "What is {name} in {source}?",
    "Tell me about the {name} module.", "Explain the {name} module.",
)  # fmt: skip
_ASK_GLOSSARY = (
    "What is {name}?", 'What does "{name}" mean in {source}?', "Define {name}.",
    "What does the term {name} mean?", "what is {name}",
)  # fmt: skip
_ASK_SECTION = (
    "Tell me about {name}.", "Explain {name}.", "What should I know about {name}?",
    'Can you explain "{name}"?', 'What does the text say about "{name}"?', "What about {name}?",
)  # fmt: skip
_ASK_THING = (
    "What is {name}?", "What is {name} in {source}?", "Tell me about {name}.", "Explain {name}.",
    "What does {name} mean?", "Describe {name}.", "what is {name}",
)  # fmt: skip
_ASK_SIGNATURE = (
    "What is the signature of {name}?", "How do I call {name}?", "Show me the signature of {name}.",
    "What arguments does {name} take?",
)  # fmt: skip


def _forms(kind: str) -> tuple[str, ...]:
    if kind in CALLABLE:
        return _ASK_CALLABLE
    if kind in COMMANDS:
        return _ASK_COMMAND
    return {"module": _ASK_MODULE, "glossary": _ASK_GLOSSARY, "section": _ASK_SECTION}.get(kind, _ASK_THING)


def shown_name(fact: Fact) -> str:
    is_bare_call = fact.kind in CALLABLE and not fact.name.endswith(")")
    return fact.name + "()" if is_bare_call else fact.name


def ask(fact: Fact, rng: Random) -> str:
    """Ask a question whose answer is the fact's first sentence."""
    name = shown_name(fact) if rng.random() < 0.5 else fact.name
    if fact.kind not in {"section", "glossary"} and rng.random() < 0.25:
        name = f"`{name}`"
    return rng.choice(_forms(fact.kind)).format(name=name, source=TITLES[fact.source], kind=fact.kind)


def ask_signature(fact: Fact, rng: Random) -> str:
    return rng.choice(_ASK_SIGNATURE).format(name=fact.name)


def first_sentence(body: str) -> str | None:
    """Return the first sentence, which answers "what is it?", or None where it is no good quote."""
    sentence = sentences(body)[0].strip()
    is_whole = sentence.endswith((".", "!", "?")) and sentence.count("(") == sentence.count(")")
    return sentence if is_whole and 20 <= len(sentence) <= _LONGEST_QUOTE else None


def quote(fact: Fact) -> str | None:
    """Apply the answer rule of training and evaluation: the body's first sentence, verbatim."""
    body = fact.body if fact.body[-1] in ".!?:)" else fact.body + "."
    return first_sentence(body)


def _third_person(verb: str) -> str:
    word = verb.lower()
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if word.endswith(("s", "sh", "ch", "x", "z", "o")):
        return word + "es"
    if word.endswith("y") and word[-2] not in "aeiou":
        return word[:-1] + "ies"
    return word + "s"


_THIRD = frozenset(map(_third_person, _VERBS))
_SELF_REFERENCE = re.compile(
    r"This (function|method|class|module|exception|attribute|setting|parameter|option|command|property"
    r"|decorator|constant)\b"
)


def _conjugate_second(rest: str) -> str:
    """Conjugate the second verb of a phrase such as "Return or set"."""
    return re.sub(
        r"^( or | and )([a-z]+)\b",
        lambda match: match[1] + (_third_person(match[2]) if match[2] in _VERBS else match[2]),
        rest,
    )


def state(fact: Fact, sentence: str) -> str:
    """Give `sentence` the fact as its subject: "Return x." becomes "f() returns x."."""
    name = shown_name(fact)
    match = re.match(r"([A-Za-z]+)\b(.*)", sentence, re.DOTALL)
    if not match:
        return f"{name}: {sentence}"
    word, rest = match.groups()
    if word.lower() in _VERBS and (word[0].isupper() or fact.kind == "command"):
        return f"{name} {_third_person(word)}{_conjugate_second(rest)}"
    if word.lower() in _THIRD:
        return f"{name} {word.lower()}{rest}"
    if word in {"A", "An", "The", "One"}:
        return f"{name} is {word.lower()}{rest}"
    if word in {"True", "False"}:
        return f"{name} is {sentence}"
    if word in {"Raised", "Called", "Used"}:
        return f"{name} is {word.lower()}{rest}"
    if _SELF_REFERENCE.match(sentence):
        return _SELF_REFERENCE.sub(lambda _: name, sentence, count=1)
    return sentence if sentence.startswith(fact.name) else f"{name}: {sentence}"
