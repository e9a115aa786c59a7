"""Search terms of texts and questions."""

import time

import pytest

from pipelines.rag.stores.postgres.terms import MAX_QUERY_TERMS, extract_query_terms, extract_terms


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
    """Anyone may send a question, and its terms are extracted on the event loop."""
    started_s = time.process_time()
    extract_terms(piece * 10_000)
    assert time.process_time() - started_s < 1
