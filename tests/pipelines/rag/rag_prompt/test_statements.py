from collections.abc import Sequence

import pytest

from sluice.pipelines.rag.rag_prompt.assembly import COMMON_CONTROL_TOKENS, ControlTokens
from sluice.pipelines.rag.rag_prompt.templates import Statement, find_best_statement, split_statements, subject_coverage


def best(question: str, statements: Sequence[Statement], places: Sequence[str] = ()) -> int:
    return find_best_statement(question, statements, places).index


def texts(text: str) -> list[str]:
    return [statement.text for statement in split_statements(text)]


def test_wrapped_lines_are_one_sentence_and_paragraphs_are_several() -> None:
    assert texts("It opens\nat 8:30. It\ncloses at 9.\n\nNo dogs") == [
        "It opens at 8:30.",
        "It closes at 9.",
        "No dogs",
    ]


def test_abbreviations_and_versions_end_no_sentence() -> None:
    assert texts("Use a cache, e.g. Redis 7.2 on Linux. It helps.") == [
        "Use a cache, e.g. Redis 7.2 on Linux.",
        "It helps.",
    ]


def test_quotes_and_brackets_stay_with_their_sentence() -> None:
    assert texts('He said "go." Then (it was.) We went.') == ['He said "go."', "Then (it was.)", "We went."]


@pytest.mark.parametrize("part", ["-", "*", "`", "*a ", "` ", "|-", "# ", "[", "(", "a(", ". ", "- ", "\n"])
def test_reading_takes_time_linear_in_the_text(part: str) -> None:
    """What is quadratic takes many minutes for a text as long as this."""
    split_statements(part * (200_000 // len(part)) + "x")


def test_fences_are_left_out_and_items_stand_alone() -> None:
    text = "# Head\nBefore them all:\n- one item here\n  that goes on\n2. two items here\n```sh\nrun this command\n```"
    assert texts(text) == ["Before them all:", "one item here that goes on", "two items here", "run this command"]


def test_a_row_of_a_table_says_what_it_is_about() -> None:
    text = "| part | value |\n|---|:---:|\n| battery | 470 Wh |\n| tyres | 10 inches | big |"
    assert texts(text) == ["part: value", "battery: 470 Wh", "tyres: 10 inches, big"]


def test_a_name_belongs_to_the_sentence_below_it() -> None:
    found = split_statements("deque.rotate(n=1)\n\nRotate it. Then stop.\n\nmaxlen")
    assert found == [Statement("deque.rotate(n=1)", "Rotate it."), Statement("", "Then stop."), Statement("", "maxlen")]


def test_a_heading_names_the_first_sentence_below_it() -> None:
    found = split_statements("# Valves\n\n## Main valve\n\nIt is shut. It leaks.\n\n## Open\n\nstate()\n\nReturn it.")
    expected = [("Main valve", "It is shut."), ("", "It leaks."), ("state()", "Return it.")]
    assert [(each.name, each.text) for each in found] == expected
    assert [each.section for each in found] == ["Main valve", "Main valve", "Open"]


def test_a_short_text_below_a_name_is_no_name() -> None:
    found = split_statements("errno.ENOANO\n\nNo anode\n\nerrno.EBADE\n\nInvalid exchange")
    assert found == [Statement("errno.ENOANO", "No anode"), Statement("errno.EBADE", "Invalid exchange")]


def test_markup_is_taken_off() -> None:
    [text] = texts("It is **not** a `cache`, but *one* (`two`) of “them”.")
    assert text == 'It is not a cache, but one (two) of "them".'


@pytest.mark.parametrize("text", ["a*b*c", "2 * 3 * 4", "snake_case_name", "x**2", "f(*args, **kwargs)", "__init__"])
def test_what_only_resembles_markup_stays(text: str) -> None:
    assert texts(f"It is {text} here.") == [f"It is {text} here."]


@pytest.mark.parametrize(
    "text", ["<|`end`|>", "<|*end*|>", "<|e`n`d|>", "`<|`end|>", "<|end`|>`", "[`INST`]", "</*s*>"]
)
def test_taking_markup_off_makes_no_control_token(text: str) -> None:
    escaped = ControlTokens(COMMON_CONTROL_TOKENS).escape(f"It is {text} or ({text}), {text}.")
    assert not any(COMMON_CONTROL_TOKENS.search(each) for each in texts(escaped))


def test_nothing_visible_is_lost() -> None:
    assert split_statements("") == split_statements("# Head\n---\n") == []
    assert texts("one\n\ntwo\n\nthree()") == ["one", "two", "three()"]


MANUAL = """\
SPLIT(1)                  User Commands                  SPLIT(1)

NAME
       split - split a file into pieces

SYNOPSIS
       split [OPTION]... [FILE [PREFIX]]

DESCRIPTION
       Output pieces of FILE; default size is 1000 lines.

       -x     use hex suffixes

       -d, --numeric

              use numeric suffixes

   Exit status:
       1      if a file is missing

GNU coreutils 9.1         September 2022                 SPLIT(1)
"""


def test_options_of_a_manual_page_stay_with_their_descriptions() -> None:
    assert [(each.section, each.text) for each in split_statements(MANUAL)] == [
        ("NAME", "split - split a file into pieces"),
        ("SYNOPSIS", "split [OPTION]... [FILE [PREFIX]]"),
        ("DESCRIPTION", "Output pieces of FILE; default size is 1000 lines."),
        ("DESCRIPTION", "-x use hex suffixes"),
        ("DESCRIPTION", "-d, --numeric use numeric suffixes"),
        ("Exit status", "1 if a file is missing"),
    ]


def test_an_option_without_a_description_is_a_statement() -> None:
    assert texts("--first\n\n--second\n\nOPTIONS\n\n-x") == ["--first", "--second", "-x"]


def test_a_line_that_repeats_the_title_is_not_taken_for_the_answer() -> None:
    found = split_statements(MANUAL)
    places = ["split"] * len(found)
    assert found[best("How many lines has a piece of split by default?", found, places)].text.startswith("Output")
    assert found[best("What does split do?", found, places)].section == "NAME"
    assert found[best("Which exit status does split have for a missing file?", found, places)].section == "Exit status"


def test_a_sentence_of_the_page_that_the_question_names_is_preferred() -> None:
    found = [Statement("", "A file that does not exist is truncated."), Statement("", "A missing file is created.")]
    assert best("What does truncate do with a file that does not exist?", found) == 0
    assert best("What does truncate do with a file that is missing?", found, ["find", "truncate"]) == 1


def test_support_is_the_share_of_the_questions_words_and_rare_ones_count_more() -> None:
    found = [Statement("", "The pump is red."), Statement("", "The pump is oiled monthly.")]
    assert find_best_statement("When is the pump oiled?", found).support == 1
    rare = find_best_statement("Which pump explodes?", found).support
    common = find_best_statement("Which pump is oiled and explodes?", found).support
    assert 0 < rare < common < 1
    assert find_best_statement("?", found).support == 0


def test_the_rarer_word_and_the_name_decide() -> None:
    found = [
        Statement("", "The pump is red."),
        Statement("", "The pump is oiled monthly."),
        Statement("valve", "It is shut."),
    ]
    assert best("When is the pump oiled?", found) == 1
    assert best("What does the valve do with a pump?", found) == 2
    assert best("Anything else?", found) == 0


def test_forms_of_a_word_are_one_word() -> None:
    found = [Statement("", "It is big."), Statement("", "The library closes at nine.")]
    assert best("When is the library closed?", found) == 1


def test_coverage_counts_the_subject_words_of_a_question() -> None:
    assert subject_coverage("Where is the report printer?", "The printers of reports") == 1.0
    assert subject_coverage("Where is the report printer?", "A printer") == 0.5
    assert subject_coverage("?", "A printer") == 0.0
