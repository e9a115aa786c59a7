"""The README's calls, run as written against the bundled model, print what the README shows."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.paths import ROOT
from tests.server_process import ServerProcess, running_server

README = (ROOT / "README.md").read_text()
CALLS: list[tuple[str, str]] = re.findall(r"```bash\n(curl (?:(?!```).)*)\n```\n```text\n(.*?)\n```", README, re.DOTALL)

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("bundled") / "log"
    with running_server(ROOT / "models" / "rill", log, "--served-model-name", "rill") as running:
        running.wait_ready()
        yield running


def events_of(output: str) -> list[Any]:
    """Return every event or object of an answer, without fields that differ from run to run."""
    payloads = [line.removeprefix("data: ") for line in output.splitlines() if line]
    events = [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]
    return [event if isinstance(event, str) else _lasting(event) for event in events]


def _lasting(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in ("id", "created")}


def text_of(events: list[Any]) -> str:
    """Return the text of all events: how tokens share events depends on how fast they are read."""
    text = ""
    for event in events:
        if isinstance(event, dict):
            text += event.get("text_output", "")
            text += "".join(choice["delta"].get("content", "") for choice in event.get("choices", []))
    return text


def test_the_readme_has_a_streamed_call_for_each_protocol() -> None:
    commands = [command for command, _ in CALLS]
    assert any("/v1/chat/completions" in command and '"stream": true' in command for command in commands)
    assert any("/generate_stream" in command for command in commands)


@pytest.mark.parametrize(("command", "shown"), CALLS)
def test_a_call_of_the_readme_prints_what_it_shows(bundled: ServerProcess, command: str, shown: str) -> None:
    command = command.replace("http://localhost:8000", bundled.base_url).replace("curl ", "curl -sS --max-time 20 ", 1)
    output = subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout
    actual, expected = events_of(output), events_of(shown)
    assert text_of(actual) == text_of(expected)
    assert (actual[0].keys(), actual[-1]) == (expected[0].keys(), expected[-1])


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
