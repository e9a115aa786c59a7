"""The share of questions about manual pages that the bundled model answers usefully. rill was trained on none of them.

The pages are this machine's own, rendered by `man`: a text of another kind than rill learned from, with options on
lines of their own and many short lists. An answer is useful if it has the words of the page that answer, and repetitive
if it says a run of words three times. No page answers an unanswerable question, which the model must decline.
"""

import asyncio
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import httpx
import orjson
import uvloop

from benchmarks.figures import BenchmarkError, Figure, ReportProgress, Target
from benchmarks.rag.answers import DATA, MAX_TOKENS, Reply
from benchmarks.server import running_server

QUESTIONS = DATA / "man_questions.jsonl"
PAGES = (
    *("base64", "bzip2", "chmod", "chown", "cmp", "comm", "cp", "csplit", "cut", "date", "dd", "df", "diff", "dmesg"),
    *("du", "env", "expr", "factor", "find", "flock", "fmt", "fold", "free", "gzip", "head", "install", "join", "kill"),
    *("ln", "logger", "lsblk", "mkdir", "mktemp", "mv", "nice", "nl", "nohup", "od", "paste", "rm", "sed", "seq"),
    *("shuf", "sleep", "sort", "split", "stat", "tac", "tail", "tar", "taskset", "tee", "timeout", "touch", "tr"),
    *("truncate", "uniq", "watch", "wc", "xargs", "yes"),
)
COLLECTION = "man"
_MIN_USEFUL, _MAX_ANSWERED = 75, 10
"""Targets, in percent: of the answerable questions answered, of the others answered."""
_RUN, _TIMES = 3, 3
"""A text is repetitive if it says the same `_RUN` words `_TIMES` times."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question. `answer` has texts of `page` of which a useful answer contains one; none if nothing answers it."""

    question: str
    page: str
    answer: tuple[str, ...]

    def is_answered_by(self, reply: Reply) -> bool:
        return any(_plain(each) in _plain(reply.text) for each in self.answer)


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def is_repetitive(text: str) -> bool:
    """Whether the text says a run of words again and again."""
    words = re.findall(r"\w+", text.lower())
    runs = Counter(tuple(words[start : start + _RUN]) for start in range(len(words) - _RUN + 1))
    return max(runs.values(), default=0) >= _TIMES


def questions() -> list[Question]:
    """Read all questions."""
    rows = map(orjson.loads, QUESTIONS.read_bytes().splitlines())
    return [Question(row["question"], row["page"], tuple(row["answer"])) for row in rows]


def render(page: str) -> str:
    """Render a manual page as plain text. Raises BenchmarkError if the machine does not have it."""
    command = ("env", "MANWIDTH=100", "LC_ALL=C.UTF-8", "man", "--pager=cat", "--encoding=utf8", page)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout:
        raise BenchmarkError(f"this machine has no manual page of {page}: {done.stderr.strip()[-200:]}")
    return re.sub(".\b|\x1b\\[[0-9;]*m", "", done.stdout)


def measure(out: Path, report: ReportProgress) -> list[Figure]:
    """Measure the shares of useful, declined and repetitive answers, and of unanswerable questions answered."""
    return uvloop.run(_measure(out.resolve(), report))


async def _measure(out: Path, report: ReportProgress) -> list[Figure]:
    with running_server(None, out / "rag" / "man.log", "--rag-store", ":memory:") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            documents = [{"id": f"{page}.1", "text": render(page), "title": page} for page in PAGES]
            (await client.post(f"/v1/rag/{COLLECTION}/documents", json={"documents": documents})).raise_for_status()
            asked = questions()
            pairs = list(zip(asked, await asyncio.gather(*(_ask(client, each) for each in asked)), strict=True))
    for question, reply in pairs:
        report(f"{_verdict(question, reply):10} {question.question} -> {reply.text}")
    known = [pair for pair in pairs if pair[0].answer]
    unknown = [reply for question, reply in pairs if not question.answer]
    useful = [question.is_answered_by(reply) for question, reply in known]
    found = [any(question.page == each for each in reply.sources) for question, reply in known]
    answered = [not reply.is_refusal for reply in unknown]
    return [
        _figure("right page among the sources", found),
        _figure("useful", useful, Target(_MIN_USEFUL, is_ceiling=False)),
        _figure("declined", [reply.is_refusal for _, reply in known]),
        _figure("unanswerable, answered", answered, Target(_MAX_ANSWERED, is_ceiling=True)),
        _figure("repetitive", [is_repetitive(reply.text) for _, reply in pairs], Target(0, is_ceiling=True)),
    ]


def _figure(label: str, claims: list[bool], target: Target | None = None) -> Figure:
    return Figure(f"manual pages: {label}", f"{len(claims)} questions", "%", (100 * sum(claims) / len(claims),), target)


def _verdict(question: Question, reply: Reply) -> str:
    if reply.is_refusal:
        return "declined"
    return "useful" if question.is_answered_by(reply) else "other"


async def _ask(client: httpx.AsyncClient, question: Question) -> Reply:
    """Ask over HTTP. The reply's sources are the names of their pages."""
    body = {"question": question.question, "max_tokens": MAX_TOKENS}
    answer = (await client.post(f"/v1/rag/{COLLECTION}/query", json=body)).raise_for_status().json()
    pages = tuple(source["document"].removesuffix(".1") for source in answer["sources"])
    return Reply(answer["answer"].strip(), pages)
