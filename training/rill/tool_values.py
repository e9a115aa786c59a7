"""Values for the arguments of tool calls: as a question words them, and as JSON."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from training.rill.synthetic import invented_word
from training.rill.text import words

Value = tuple[str, Any]
"""A value as text of a question and as JSON."""

_CITIES = (
    *words("""Paris Oslo Lima Cairo Tokyo Berlin Madrid Quito Dublin Vienna Prague Lisbon Athens Nairobi Toronto Boston
    Denver Zurich Geneva Warsaw Rome Seoul Delhi Hanoi Chicago Seattle Sydney Melbourne Munich Hamburg Milan Naples
    Kyoto Osaka Dallas Austin Atlanta Havana Bogota Manila Jakarta Dubai Doha Riga Vilnius Krakow Porto Seville"""),
    "New York", "San Francisco", "San Francisco, CA", "Los Angeles", "Boston, MA", "Austin, TX", "Rio de Janeiro",
    "Buenos Aires", "Cape Town", "Hong Kong", "Mexico City", "Tel Aviv", "Paris, France", "Oslo, Norway",
)  # fmt: skip
_PEOPLE = words(
    """Alice Bruno Carla David Elena Farid Grace Hanna Ivan Julia Karim Laura Marco Nadia Oscar Paula Quentin Rosa
    Samir Tanya Umar Vera Walter Xenia Yusuf Zoe Peter Linda Omar Sofia Maria Tom Anna Max Lena Bob John Sarah Mike"""
)
_CURRENCIES = words("USD EUR GBP JPY CHF CAD AUD NOK SEK INR CNY BRL dollars euros pounds yen francs")
_SYMBOLS = words("AAPL GOOG MSFT AMZN TSLA META NFLX IBM INTC AMD ORCL SAP NKE KO PEP BA DIS V MA T NVDA")
_LANGUAGES = words("French German Spanish Italian Norwegian Japanese Chinese Arabic Russian Dutch Polish English Greek")
_COUNTRIES = words("France Japan Brazil Kenya Canada Norway Egypt India Peru Spain Italy China Mexico Chile Ghana")
_TOPICS = words(
    """cats dogs python recipes football music space history trains gardens tides robots volcanoes bread chess coffee
    elections energy glaciers insurance jazz painting whales wine hotels flights shoes laptops databases"""
)
_ADJECTIVES = words("quarterly weekly urgent new old annual monthly final red blue fast cheap open lost important")
_NOUNS = words(
    """report meeting invoice backup budget plan review lunch dinner workshop interview release order survey party call
    server printer lecture course contract ticket summary agenda draft offer"""
)
_TEXTS = (
    "I will be late", "See you tomorrow", "The meeting is at noon", "Please call me back", "Happy birthday",
    "The report is done", "Dinner is ready", "I am on my way", "Thank you for your help", "Good morning",
    "The server is down", "Where are you", "Buy milk and bread", "The build failed", "How are you", "Water the plants",
)  # fmt: skip
_MONTHS = words("January February March April May June July August September October November December")
_DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday tomorrow today tonight")
_DISHES = words("pizza lasagna curry soup pancakes ramen tacos risotto salad goulash paella chili")
_ROOMS = ("kitchen", "bedroom", "living room", "office", "garage", "bathroom", "hall", "cellar")
_SERVICES = words("web api nginx redis postgres auth billing search worker cache mail gateway")
_EXTENSIONS = words("txt csv json md log py png pdf yaml")
# Values of the evaluation, which training never shows.
NEW_CITIES = (
    *words("Helsinki Lagos Montreal Santiago Bergen Tbilisi Perth Nantes Leipzig Calgary Tunis Salzburg"),
    "San Diego, CA", "Las Vegas", "Addis Ababa", "Graz, Austria",
)  # fmt: skip
_NEW_PEOPLE = words("Ingrid Pablo Noor Dmitri Fiona Hugo Priya Stella Viktor Wanda")
_NEW_TOPICS = words("penguins bicycles tornadoes opera tea lighthouses kayaks mushrooms satellites pottery")
_NEW_TEXTS = (
    "The package has arrived",
    "I forgot my keys",
    "Lunch is at one",
    "The tests are green",
    "Call your mother",
)
_NEW_SYMBOLS = words("UBER PYPL CSCO QCOM SHEL HSBC SONY ADBE CRM LMT")


def _pick(rng: Random, is_new: bool, trained: tuple[str, ...], new: tuple[str, ...] = ()) -> str:
    return rng.choice(new if is_new and new else trained)


def _city(rng: Random, is_new: bool) -> str:
    if not is_new and rng.random() < 0.25:
        return invented_word(rng).capitalize()
    return _pick(rng, is_new, _CITIES, NEW_CITIES)


def _person(rng: Random, is_new: bool) -> str:
    first = _pick(rng, is_new, _PEOPLE, _NEW_PEOPLE)
    return f"{first} {invented_word(rng).capitalize()}" if rng.random() < 0.3 else first


def _email(rng: Random, is_new: bool) -> str:
    name = _pick(rng, is_new, _PEOPLE, _NEW_PEOPLE).lower()
    host = rng.choice(("example", "mail", "work", invented_word(rng)))
    return f"{name}{rng.choice(('', '', f'.{invented_word(rng)}', str(rng.randint(1, 99))))}@{host}." + rng.choice(
        ("com", "org", "net", "io")
    )


def _topic(rng: Random, is_new: bool) -> str:
    x, topic = rng.random(), _pick(rng, is_new, _TOPICS, _NEW_TOPICS)
    if x < 0.25:
        return f"{topic} in {_city(rng, is_new)}"
    if x < 0.5:
        return f"{rng.choice(_ADJECTIVES)} {topic}"
    return f"{invented_word(rng)} {topic}" if x < 0.65 else topic


def _title(rng: Random, is_new: bool) -> str:
    x = rng.random()
    if x < 0.3:
        return f"{rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}"
    if x < 0.55:
        return f"{rng.choice(_NOUNS).capitalize()} with {_person(rng, is_new)}"
    if x < 0.8:
        return f"{_pick(rng, is_new, _TOPICS, _NEW_TOPICS)} {rng.choice(_NOUNS)}".capitalize()
    return rng.choice(_NOUNS).capitalize()


def _date(rng: Random, _: bool) -> str:
    month, day = rng.choice(_MONTHS), rng.randint(1, 28)
    return rng.choice(
        (
            f"{rng.randint(2020, 2031)}-{rng.randint(1, 12):02}-{day:02}",
            f"{month} {day}",
            rng.choice(_DAYS),
            f"{day} {month}",
        )
    )


def _time(rng: Random, _: bool) -> str:
    hour = rng.randint(1, 23)
    return rng.choice((f"{hour}:{rng.choice(('00', '15', '30', '45'))}", f"{hour % 12 + 1} pm", f"{hour % 12 + 1} am"))


def _symbol(rng: Random, is_new: bool) -> str:
    if rng.random() < 0.4:
        return "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(2, 4)))
    return _pick(rng, is_new, _SYMBOLS, _NEW_SYMBOLS)


def _path(rng: Random, _: bool) -> str:
    parts = [rng.choice((invented_word(rng), rng.choice(_NOUNS))) for _ in range(rng.randint(1, 3))]
    name = f"{parts.pop()}.{rng.choice(_EXTENSIONS)}"
    return rng.choice(("/", "", "/home/", "/tmp/", "./")) + "/".join((*parts, name))


def _url(rng: Random, _: bool) -> str:
    return f"https://{invented_word(rng)}.{rng.choice(('com', 'org', 'io'))}/{rng.choice(_NOUNS)}"


def _code(rng: Random, _: bool) -> str:
    digits = str(rng.randint(100, 99999))
    return rng.choice((digits, f"A-{digits}", f"{invented_word(rng)[:3].upper()}{digits}", f"ord_{digits}"))


def _word(rng: Random, is_new: bool) -> str:
    return rng.choice((invented_word(rng), _pick(rng, is_new, _TOPICS, _NEW_TOPICS), rng.choice(_NOUNS)))


def _chosen(options: tuple[str, ...]) -> Callable[[Random, bool], str]:
    return lambda rng, _: rng.choice(options)


def _sum(rng: Random, _: bool) -> str:
    parts = [str(rng.choice((rng.randint(2, 99), rng.randint(100, 999)))) for _ in range(rng.randint(2, 3))]
    return rng.choice((" {} ", "{}")).format(rng.choice("+-*/")).join(parts)


def _text(rng: Random, is_new: bool) -> str:
    return _pick(rng, is_new, _TEXTS, _NEW_TEXTS)


_STRINGS: dict[str, Callable[[Random, bool], str]] = {
    "city": _city, "person": _person, "email": _email, "topic": _topic, "title": _title, "date": _date, "time": _time,
    "symbol": _symbol, "path": _path, "url": _url, "code": _code, "word": _word, "text": _text,
    "currency": _chosen(_CURRENCIES), "language": _chosen(_LANGUAGES), "country": _chosen(_COUNTRIES),
    "dish": _chosen(_DISHES), "room": _chosen(_ROOMS), "service": _chosen(_SERVICES),
    "sum": _sum,
    "zone": _chosen(("UTC", "CET", "EST", "Europe/Oslo", "Asia/Tokyo", "America/New_York", "Europe/Paris", "PST")),
}  # fmt: skip
ENUMS: dict[str, tuple[str, ...]] = {
    "degrees": ("celsius", "fahrenheit"), "priority": ("low", "medium", "high"), "size": ("small", "medium", "large"),
    "environment": ("staging", "production"), "length": ("km", "miles"), "colour": ("red", "green", "blue", "white"),
    "format": ("pdf", "csv", "json"), "order": ("ascending", "descending"), "mode": ("fast", "safe", "quiet"),
}  # fmt: skip


def _integer(rng: Random) -> int:
    return rng.choice((rng.randint(2, 12), rng.randint(2, 99), rng.randint(100, 999), rng.randint(1000, 99999)))


def _number(rng: Random) -> int | float:
    return rng.choice((rng.randint(2, 500), round(rng.uniform(0.1, 99), 1), round(rng.uniform(1, 500), 2)))


def draw(kind: str, rng: Random, is_new: bool) -> Value:
    """Draw a value of a kind: a key of `ENUMS`, "integer", "small", "number", "flag" or a kind of string."""
    if kind in ENUMS:
        chosen = rng.choice(ENUMS[kind])
        return rng.choice((chosen, chosen, chosen.capitalize())) if kind == "degrees" else chosen, chosen
    if kind in {"integer", "small", "number"}:
        number = _integer(rng) if kind == "integer" else rng.randint(2, 20) if kind == "small" else _number(rng)
        return str(number), number
    if kind == "flag":
        is_on = rng.random() < 0.5
        return "with" if is_on else "without", is_on
    text = _STRINGS[kind](rng, is_new)
    return text, text


def json_type(kind: str) -> str:
    named = {"small": "integer", "integer": "integer", "number": "number", "flag": "boolean"}
    return named.get(kind, "string")
