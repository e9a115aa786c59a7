from pathlib import Path

import pytest

from benchmarks.rag.answers import DATA, SETS, Question, Reply, figures_of, plain, read_questions

OPEN = Question("When?", "a.md", "It opens at 9:00.")
UNKNOWN = Question("Who?", "", "")
DECLINED = Reply("The context does not answer this question.")


def test_figures_count_exact_answers_refusals_and_answers_to_nothing() -> None:
    right = Reply("It opens at 9:00", ("The `shop` is new.\nIt **opens**\nat 9:00.",))
    wrong = Reply("It opens.", ("It is closed.",))
    replies = [right, wrong, DECLINED, wrong, DECLINED]
    questions = [OPEN, OPEN, OPEN, UNKNOWN, UNKNOWN]
    closed_book = [Reply("I do not know that."), right, wrong, wrong, wrong]
    found = {figure.name: figure.median for figure in figures_of("shops", questions, replies, closed_book)}
    third = pytest.approx(100 / 3)
    assert found == {
        "shops: answer among the sources": third,
        "shops: exact": third,
        "shops: declined": third,
        "shops: exact, no sources": third,
        "shops: declined, no sources": third,
        "shops: unanswerable, answered": 50.0,
    }


def test_typography_and_markup_do_not_count() -> None:
    assert plain("It’s a  `deque` –\n**new**.") == plain("It's a deque - new")
    assert plain("It is open.") != plain("It is not open.")


def test_the_offices_answers_stand_in_their_documents() -> None:
    for each in read_questions(DATA / "office_questions.jsonl"):
        assert bool(each.answer) == bool(each.document)
        if each.answer:
            assert plain(each.answer) in plain((DATA / "office" / each.document).read_text())


@pytest.mark.parametrize(("path", "least"), [(path, 50) for _, _, path in SETS])
def test_questions_are_questions_once(path: Path, least: int) -> None:
    questions = [each.question for each in read_questions(path)]
    assert len(set(questions)) == len(questions) >= least
