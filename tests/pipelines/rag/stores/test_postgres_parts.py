"""Parts of the Postgres store that need no server."""

import pytest
from psycopg.conninfo import conninfo_to_dict

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.rag.stores.postgres.rows import MAX_QUERY_TERMS, extract_query_terms, extract_terms
from sluice.pipelines.rag.stores.postgres.search import IndexTrial, IndexTrials
from sluice.pipelines.rag.types import CollectionInfo, CollectionSpec
from sluice.state.postgres import parse_address

# --- URLs of Postgres stores


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("postgresql://me:s3cret@db.example:6543/rag", "Postgres store db.example:6543/rag"),
        ("postgres://me:s3cret@db.example/rag?sslmode=require", "Postgres store db.example:5432/rag"),
        ("postgresql://me:s3cret@[::1]/rag", "Postgres store ::1:5432/rag"),
        ("postgresql://me:s3cret@a:1,b:2/rag", "Postgres store a,b:1,2/rag"),
        ("postgresql:///rag?host=/var/run/postgresql", "Postgres store /var/run/postgresql:5432/rag"),
        ("postgresql://me:s3cret@db.example", "Postgres store db.example:5432/me"),
    ],
)
def test_the_name_tells_where_and_not_the_password(url: str, name: str) -> None:
    address = parse_address(url)
    assert address.name == name
    assert "s3cret" not in repr(address)


def test_options_are_libpqs_but_the_schema() -> None:
    address = parse_address("postgresql://me:p%40ss@h/d?schema=team%20a&sslmode=require&application_name=my%20app")
    conninfo = conninfo_to_dict(address.conninfo)
    assert address.schema == "team a"
    assert (conninfo["password"], conninfo["sslmode"], conninfo["application_name"]) == ("p@ss", "require", "my app")
    assert "schema" not in conninfo


@pytest.mark.parametrize(
    "url",
    [
        "",
        "rag.sqlite",
        "host=db.example password=s3cret",
        "mysql://me:s3cret@h/d",
        "postgresql://me:s3cret%zz@h/d",
        "postgresql://me:s3cret@h/d?no_such_option=1",
        "postgresql://me:s3cret@h:port/d",
        "postgresql://me:s3cret@[h/d",
    ],
)
def test_what_is_no_address_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(SluiceError, match="postgresql://user:password@host:port/database") as caught:
        parse_address(url)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, "store")
    assert "s3cret" not in caught.value.message


# --- search terms of texts and questions


@pytest.mark.parametrize(
    ("text", "words", "names"),
    [
        ("The quick fox.", ["the", "quick", "fox"], []),
        ("call str.partition() now", ["call", "str", "partition", "now"], ["str.partition"]),
        ("`max_num_seqs`", ["max", "num", "seqs"], ["max_num_seqs"]),
        ("--http-port 80", ["http", "port", "80"], ["http-port"]),
        ("POST /v1/rag/{collection}", ["post", "v1", "rag", "collection"], ["v1/rag"]),
        ("__init__ _private", ["init", "private"], ["__init__", "_private"]),
        ("C++, C# and .NET", ["c", "c", "and", "net"], ["c++", "c#"]),
        ("STRASSE Straße ﬁn", ["strasse", "strasse", "fin"], []),
        ("it's 'quoted' \\ ___ -- ...", ["it", "s", "quoted"], []),
        ("東京 naïve", ["東京", "naïve"], []),
        ("x" * 201 + " y", ["y"], []),
        ("", [], []),
    ],
)
def test_words_and_names(text: str, words: list[str], names: list[str]) -> None:
    terms = extract_terms(text)
    assert (list(terms.words), list(terms.names)) == (words, names)


def test_names_count_as_often_as_they_are_there() -> None:
    assert extract_terms("a.b c a.b").tsvector == "'a.b':1 'a.b':2"


def test_a_question_asks_for_each_term_once_and_for_few() -> None:
    terms = extract_query_terms("fox a_b fox a_b " + " ".join(f"word{number}" for number in range(1000)))
    assert terms.words[:3] == ["fox", "a", "b"]
    assert list(terms.names) == ["'a_b'"]
    assert len(terms.words) == MAX_QUERY_TERMS


@pytest.mark.parametrize("piece", ["a", "_", "a-", "a_", "+"])
def test_words_of_any_length_take_linear_time(piece: str) -> None:
    """Anyone may send a question, and its terms are extracted on the event loop. What is quadratic takes many minutes
    for one as long as this."""
    assert not extract_terms(piece * 400_000).names


# --- decisions whether an index is trusted


RIGHT = range(10)


def asked(trial: IndexTrial, *found: int) -> None:
    """Record as many questions as a decision takes. The index found these numbers of ten chunks, in turn."""
    for number in range(16):
        trial.record(range(found[number % len(found)]), RIGHT)


def test_an_index_that_finds_enough_is_trusted() -> None:
    trial = IndexTrial(100_000, 200)
    for _ in range(15):
        trial.record(RIGHT, RIGHT)
    assert not trial.is_decided
    trial.record(RIGHT, RIGHT)
    assert (trial.is_decided, trial.ef_search) == (True, 200)
    asked(trial, 0)
    assert (trial.is_decided, trial.ef_search) == (True, 200)


def test_an_index_that_finds_too_few_is_tried_with_a_greater_ef_search() -> None:
    trial = IndexTrial(100_000, 200)
    asked(trial, 9, 10)
    assert (trial.is_decided, trial.ef_search) == (False, 500)
    asked(trial, 10)
    assert (trial.is_decided, trial.ef_search) == (True, 500)


def test_an_index_that_never_finds_enough_is_given_up() -> None:
    trial = IndexTrial(100_000, 200)
    for ef_search in (500, 1000, None):
        asked(trial, 5)
        assert trial.ef_search == ef_search
    assert trial.is_decided


def test_questions_without_hits_do_not_count() -> None:
    trial = IndexTrial(100_000, 200)
    for _ in range(100):
        trial.record((), ())
    assert not trial.is_decided


def test_an_index_of_a_huge_collection_is_trusted_without_a_trial() -> None:
    assert IndexTrial(1_000_001, 200).is_decided


def test_a_collection_that_has_grown_is_tried_again() -> None:
    trials = IndexTrials(200)

    def info(num_chunks: int) -> CollectionInfo:
        return CollectionInfo(CollectionSpec("docs", "encoder", 384), 1, num_chunks, 0.0)

    first = trials.find(1, info(20_000))
    assert trials.find(1, info(40_000)) is first
    assert trials.find(2, info(20_000)) is not first
    again = trials.find(1, info(40_001))
    assert again is not first
    assert trials.find(1, info(10_000)) is again
