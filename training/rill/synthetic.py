"""Invented names and facts, which cannot be remembered and must be read from the context."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from random import Random

from training.rill.facts import Fact
from training.rill.phrasing import CALLABLE, COMMANDS
from training.rill.text import words

_SYLLABLES = words(
    """ka lo mi ren tav sor bel qui zan dor fel gri hul jex nor pra ster tul vor wex yar om ith as el in ar und
    eck ost ba ce di fo gu ha ji ke lu ma ne pi ro su ta ve wo xi zu bra cle dro fla gle pho sha thri"""
)
_FIRST = words(
    """Alice Bruno Carla David Elena Farid Grace Hanna Ivan Julia Karim Laura Marco Nadia Oscar Paula Quentin
    Rosa Samir Tanya Umar Vera Walter Xenia Yusuf Zoe Peter Linda Omar Sofia Maria Tom Anna Max Lena"""
)
_CITIES = words(
    """Paris Oslo Lima Cairo Tokyo Berlin Madrid Quito Dublin Vienna Prague Lisbon Athens Nairobi Toronto Boston
    Denver Zurich Geneva Warsaw Rome Seoul Delhi Hanoi"""
)
_MONTHS = words("January February March April May June July August September October November December")
_DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_COLOURS = words("red blue green yellow black white orange purple grey brown")
_NOUNS = words(
    """server printer report backup warehouse library museum office car bridge garden database router project
    team school station hotel bakery ticket invoice cluster sensor camera gateway meeting lecture course shop
    queue cache service script parking canteen laptop"""
)
_LANGUAGES = words("Python Rust Go C Java Ruby Haskell Erlang Swift Kotlin")
_REASONS = (
    "heavy rain", "a power failure", "a software error", "a lack of staff", "repairs", "a full disk", "a broken pump",
    "an expired certificate",
)  # fmt: skip
_CODE_VERBS = words("get set add remove read write open close load dump parse send find make copy")
_CODE_NOUNS = words("item key value file path node list map buffer stream token header index state config")


def invented_word(rng: Random) -> str:
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.choice((2, 2, 3))))


def _piece(rng: Random) -> str:
    x = rng.random()
    if x < 0.5:
        return invented_word(rng)
    return rng.choice(_CODE_VERBS if x < 0.75 else _CODE_NOUNS)


def invented_identifier(kind: str, rng: Random) -> str:
    """Make a name that no documentation has, in the form of names of this kind."""
    word, second = invented_word(rng), _piece(rng)
    if kind in COMMANDS:
        return f"{rng.choice(('CREATE', 'ALTER', 'DROP', 'SHOW', 'SET'))} {word}".upper()
    if kind in {"class", "exception", "type"}:
        return word.capitalize() + second.capitalize()
    if kind in {"section", "glossary"}:
        return f"{word.capitalize()} {rng.choice(_NOUNS)}"
    if kind in CALLABLE:
        return rng.choice((f"{word}.{second}", f"{word}_{second}", f"{second}_{word}", word, f"{word}.{second}_{word}"))
    return rng.choice((f"{word}_{second}", f"{word}.{second}", word, f"{word}-{second}"))


def sibling_identifier(name: str, rng: Random) -> str:
    """Make a name that shares a part with `name`, and is easily confused with it."""
    parts = re.split(r"([._\- ])", name)
    position = rng.randrange(0, len(parts), 2)
    parts[position] = _piece(rng) if parts[position].islower() else invented_word(rng).capitalize()
    return "".join(parts)


def renamed(fact: Fact, name: str) -> Fact | None:
    """Return the fact under another name, or None where its body contains the old name."""
    short = fact.name.split(".")[-1].rstrip("()")
    if short.lower() in fact.body.lower():
        return None
    _, bracket, arguments = fact.signature.partition("(")
    signature = f"{name.split('.')[-1]}({arguments}" if bracket and fact.kind in CALLABLE else ""
    return replace(fact, name=name, signature=signature)


@dataclass(frozen=True, slots=True)
class Invented:
    """An invented statement, the questions that it answers, and its subject."""

    sentence: str
    questions: tuple[str, ...]
    entity: str


def _person(rng: Random) -> str:
    return f"{rng.choice(_FIRST)} {invented_word(rng).capitalize()}"


def entity(rng: Random) -> str:
    word = invented_word(rng).capitalize()
    return rng.choice(
        (word, f"the {word} {rng.choice(_NOUNS)}", f"the {rng.choice(_NOUNS)}", f"our {rng.choice(_NOUNS)}",
         f"{word} {rng.choice(('Ltd', 'Inc', 'Group', 'Labs'))}", f"{word} {rng.randint(1, 9)}")
    )  # fmt: skip


# (statement, questions). {e} is the entity; `_fields` draws every other field.
RELATIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("The default port of {e} is {port}.", ("What is the default port of {e}?", "Which port does {e} use?")),
    ("{e} listens on port {port}.", ("Which port does {e} listen on?", "What port does {e} use?")),
    ("{e} was founded in {year} by {person}.", ("Who founded {e}?", "When was {e} founded?")),
    ("{e} was designed by {person} in {year}.", ("Who designed {e}?", "When was {e} designed?")),
    ("{e} is located in {city}.", ("Where is {e} located?", "Where is {e}?", "In which city is {e}?")),
    ("{e} is open from {hour}:{minute} to {late}:{minute} on weekdays.",
     ("When is {e} open?", "What are the opening hours of {e}?")),
    ("{e} opens at {hour}:{minute} on {day}.", ("When does {e} open?", "At what time does {e} open?")),
    ("The price of {e} is {small} {money}.", ("How much does {e} cost?", "What is the price of {e}?")),
    ("{e} costs {small} {money} a month.", ("How much does {e} cost?", "What does {e} cost?")),
    ("The manager of {e} is {person}.", ("Who is the manager of {e}?", "Who manages {e}?")),
    ("{person} maintains {e}.", ("Who maintains {e}?", "Who is the maintainer of {e}?")),
    ("{person} will present {e} on {month} {date}.", ("Who will present {e}?", "When will {e} be presented?")),
    ("{e} supports up to {small} {things}.", ("How many {things} does {e} support?",)),
    ("The maximum number of {things} for {e} is {small}.", ("What is the maximum number of {things} for {e}?",)),
    ("The colour of {e} is {colour}.", ("What colour is {e}?", "What is the colour of {e}?")),
    ("The password for {e} is {code}.", ("What is the password for {e}?", "Which password does {e} have?")),
    ("The password for {e} expires every {days} days.", ("How often does the password for {e} expire?",)),
    ("{e} starts on {month} {date}.", ("When does {e} start?", "On which date does {e} start?")),
    ("{e} takes place in {city} on {month} {date}.", ("Where does {e} take place?", "When does {e} take place?")),
    ("The current version of {e} is {version}.", ("What is the current version of {e}?", "Which version is {e}?")),
    ("The code for {e} is {code}.", ("What is the code for {e}?",)),
    ("{e} closed because of {reason}.", ("Why did {e} close?", "Why was {e} closed?")),
    ("{e} failed because of {reason}.", ("Why did {e} fail?", "What made {e} fail?")),
    ("Customers of {e} may return goods within {days} days.",
     ("How long do customers of {e} have to return goods?", "When can customers of {e} return goods?")),
    ("To restart {e}, press the {colour} button for {date} seconds.", ("How do I restart {e}?",)),
    ("{e} stores its data in the {word} directory.", ("Where does {e} store its data?",)),
    ("{e} is written in {language}.", ("In which language is {e} written?", "What is {e} written in?")),
    ("{e} keeps its backups for {days} days.", ("How long does {e} keep its backups?",)),
    ("{e} depends on {word} {version}.", ("What does {e} depend on?",)),
    ("{e} was replaced by {word} in {year}.", ("What replaced {e}?", "When was {e} replaced?")),
    ("{e} weighs {small} grams.", ("How much does {e} weigh?", "What is the weight of {e}?")),
    ("{e} has {small} {things}.", ("How many {things} does {e} have?",)),
    ("The timeout of {e} is {date} seconds.", ("What is the timeout of {e}?", "How long is the timeout of {e}?")),
    ("Set {word}_{colour} to change the speed of {e}.", ("How do I change the speed of {e}?",)),
    ("{e} is {days} years old.", ("How old is {e}?",)),
    ("{person} lives in {city} and works for {e}.", ("Where does {person} live?", "Who does {person} work for?")),
    ("The phone number of {e} is {small}-{port}.", ("What is the phone number of {e}?",)),
    ("{e} is on floor {digit}.", ("On which floor is {e}?", "Which floor is {e} on?")),
    ("{e} is a {noun} written in {language}.", ("What is {e}?", "In which language is {e} written?")),
    ("{e} is a {noun} in {city}.", ("What is {e}?", "In which city is {e}?")),
    ("{e} is free for visitors.", ("Is {e} free for visitors?", "Who can use {e} for free?")),
    ("Do not use {e} after {month} {date}.", ("Until when can I use {e}?", "When should I stop using {e}?")),
)  # fmt: skip

# Statements without a name: (subject, statement, questions).
_GENERAL: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("deliveries", "Deliveries take {digit} working days.", ("How long do deliveries take?",)),
    ("invoices", "Invoices are paid within {days} days.", ("When are invoices paid?", "How fast are invoices paid?")),
    ("breakfast", "Breakfast is served from {hour}:{minute}.", ("When is breakfast served?",)),
    ("traces", "Traces are sent to port {port}.", ("Where are traces sent?", "To which port are traces sent?")),
    ("session", "{person} will chair the session.", ("Who will chair the session?", "Who chairs the session?")),
    ("passwords", "Passwords expire after {days} days.", ("When do passwords expire?",)),
    ("bicycles", "Bicycles are not allowed in the {noun}.", ("Are bicycles allowed in the {noun}?",)),
    ("dogs", "Dogs must stay outside the {noun}.", ("Can dogs come into the {noun}?", "Are dogs allowed?")),
    ("tickets", "Tickets cost {small} {money}.", ("How much do tickets cost?", "What is the price of a ticket?")),
    ("lessons", "Lessons start on {month} {date}.", ("When do lessons start?",)),
    ("the key", "The key is kept in the {colour} box.", ("Where is the key?", "Where is the key kept?")),
    ("indexes", "Indexes are rebuilt every {day}.", ("When are indexes rebuilt?",)),
    ("errors", "Errors are reported to {person}.", ("Who gets the errors?", "To whom are errors reported?")),
    ("the train", "The train to {city} leaves at {hour}:{minute}.", ("When does the train to {city} leave?",)),
    ("messages", "Messages longer than {small} bytes are rejected.", ("Which messages are rejected?",)),
    ("the workshop", "The workshop will be held in {city}.", ("Where will the workshop be held?",)),
    ("spare parts", "Spare parts cannot be returned.", ("Can I return spare parts?", "Can spare parts be returned?")),
    ("a job", "A job is stopped when it uses more than {small} megabytes.", ("When is a job stopped?",)),
)  # fmt: skip


def _fields(rng: Random) -> dict[str, str]:
    number = rng.randint
    return {
        "port": str(number(10, 65000)), "year": str(number(1700, 2025)), "person": _person(rng),
        "city": rng.choice(_CITIES), "hour": str(number(5, 11)), "late": str(number(14, 23)),
        "minute": rng.choice(("00", "15", "30", "45")), "day": rng.choice(_DAYS), "small": str(number(2, 5000)),
        "money": rng.choice(("dollars", "euros", "pounds", "francs")),
        "things": rng.choice(("users", "connections", "requests", "files", "guests", "rooms", "workers")),
        "colour": rng.choice(_COLOURS), "days": str(number(3, 365)), "month": rng.choice(_MONTHS),
        "date": str(number(1, 28)), "version": f"{number(0, 20)}.{number(0, 30)}.{number(0, 99)}",
        "code": rng.choice((invented_word(rng).upper() + "-", invented_word(rng))) + str(number(10, 9999)),
        "reason": rng.choice(_REASONS), "word": invented_word(rng), "language": rng.choice(_LANGUAGES),
        "digit": str(number(1, 40)), "noun": rng.choice(_NOUNS),
    }  # fmt: skip


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def invented_fact(rng: Random, about: str | None = None) -> Invented:
    """Make a random statement, about `about` if given."""
    fields = _fields(rng)
    if about is None and rng.random() < 0.2:
        subject, statement, questions = rng.choice(_GENERAL)
    else:
        statement, questions = rng.choice(RELATIONS)
        subject = about or entity(rng)
    # A question says "the office" or "your office" where the text says "our office".
    asked = rng.choice(("the ", "your ")) + subject[4:] if subject.startswith("our ") else subject
    return Invented(
        _capital(statement.format(e=subject, **fields)),
        tuple(_capital(question.format(e=asked, **fields)) for question in questions),
        subject,
    )


def as_pronoun(fact: Invented) -> Invented:
    """Return the statement with "It" as its subject, where it begins with the entity."""
    subject = _capital(fact.entity) + " "
    if not fact.sentence.startswith(subject):
        return fact
    return replace(fact, sentence="It " + fact.sentence.removeprefix(subject))
