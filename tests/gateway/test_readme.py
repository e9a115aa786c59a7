"""The calls and clients of the README and docs/protocols.md, run as written, print what is shown there."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.paths import DOCS, ROOT
from tests.server_process import ServerProcess, running_server
from tests.waiting import PATIENCE_S

CUT = "…"
"""In an output it stands for text that is left out: what differs from run to run, or does not matter."""
EXAMPLE = re.compile(r"```(bash|python)\n((?:(?!```).)*)\n```\n```text\n(.*?)\n```", re.DOTALL)
TRIES = 5
"""A stream's pieces that wait for a slow client come in one event, so on a busy machine there may be fewer of them."""
PROTOCOLS = {
    "OpenAI, curl": "curl -N http://localhost:8000/v1/chat/completions",
    "OpenAI, client": "from openai import OpenAI",
    "v2, curl": "curl http://localhost:8000/v2/models/rill/generate",
    "v2, client": "import tritonclient.http",
    "gRPC, client": "import tritonclient.grpc",
}


def examples(document: Path) -> list[tuple[str, str, str]]:
    """Return the examples of a document: language, code and shown output."""
    return EXAMPLE.findall(document.read_text())


README = examples(ROOT / "README.md")
EXAMPLES = [*README, *examples(DOCS / "protocols.md")]

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("bundled") / "log"
    with running_server(ROOT / "models" / "rill", log, "--served-model-name", "rill") as running:
        running.wait_ready()
        yield running


@pytest.mark.parametrize("opening", PROTOCOLS.values(), ids=list(PROTOCOLS))
def test_the_readme_has_an_example_of_each_protocol(opening: str) -> None:
    assert sum(opening in code for _, code, _ in README) == 1


def test_every_code_block_is_an_example_with_its_output() -> None:
    for path in (ROOT / "README.md", DOCS / "protocols.md"):
        assert len(re.findall(r"^```(?:bash|python)$", path.read_text(), re.MULTILINE)) == len(examples(path)), path


def test_an_output_shows_more_than_it_leaves_out() -> None:
    assert all(len(shown.replace(CUT, "").strip()) >= 20 for _, _, shown in EXAMPLES)


RUN_EACH = """
import contextlib, io, json, sys
for code in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {"__name__": "__main__"})
    print(json.dumps(printed.getvalue()))
"""
"""Clients take a second to import, so one process runs the examples in Python."""


def run_python(*codes: str) -> list[str]:
    """Return what each example prints."""
    command = [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", RUN_EACH]
    done = subprocess.run(
        command, input=json.dumps(codes), capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def run_bash(code: str) -> str:
    code = code.replace("curl ", "curl -sS --max-time 20 ", 1)
    return subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout


class Runner:
    """Runs examples against a server."""

    def __init__(self, server: ServerProcess) -> None:
        self._http = server.base_url.removeprefix("http://")
        self._grpc = server.grpc_address

    def _addressed(self, code: str) -> str:
        return code.replace("localhost:8000", self._http).replace("localhost:8001", self._grpc)

    @cached_property
    def _of_python(self) -> dict[str, str]:
        codes = [code for language, code, _ in EXAMPLES if language == "python"]
        return dict(zip(codes, run_python(*map(self._addressed, codes)), strict=True))

    def run(self, language: str, code: str, *, is_again: bool) -> str:
        """Return the output of an example."""
        if language == "bash":
            return run_bash(self._addressed(code))
        return run_python(self._addressed(code))[0] if is_again else self._of_python[code]


@pytest.fixture(scope="module")
def runner(bundled: ServerProcess) -> Runner:
    return Runner(bundled)


def pattern(shown: str) -> str:
    """Return a regular expression for an output. Blank lines, which separate events, do not count."""
    return ".*?".join(re.escape(part) for part in without_blank_lines(shown).split(CUT))


def without_blank_lines(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if line)


@pytest.mark.parametrize(("language", "code", "shown"), EXAMPLES)
def test_an_example_prints_what_is_shown(runner: Runner, language: str, code: str, shown: str) -> None:
    outputs: list[str] = []
    for number in range(TRIES if "data: " in shown else 1):
        outputs.append(without_blank_lines(runner.run(language, code, is_again=number > 0)))
        if re.fullmatch(pattern(shown), outputs[-1], re.DOTALL):
            return
    raise AssertionError("\n\n".join(outputs))


def test_the_bundled_model_says_who_it_is_quotes_and_declines(bundled: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{bundled.base_url}/v1", api_key="unused")

    def ask(question: str) -> str | None:
        messages: list[Any] = [{"role": "user", "content": question}]
        choice = client.chat.completions.create(model="rill", messages=messages).choices[0]
        assert choice.finish_reason == "stop"
        return choice.message.content

    with client:
        assert "Rill" in (ask("Who are you?") or "")
        context = "The backup server runs every night at 02:30. The report printer is in room 12."
        ask_context = f"Context:\n{context}\n\nQuestion: {{}}\nAnswer:"
        assert ask(ask_context.format("When does the backup server run?")) == context.split(". ")[0] + "."
        assert ask(ask_context.format("Who founded Zantavor?")) == "The context does not answer this question."
