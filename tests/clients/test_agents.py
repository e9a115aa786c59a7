"""Agent programs and the SDKs under them play a session of three tool calls, each with its own code and protocol."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import ROOT, ScriptedServer, run_program
from scripted_model import marker
from sessions import ANSWER, end_of

NODE = ROOT / "build" / "clients-node"
HEAVY = ROOT / "build" / "clients-heavy"
HEAVY_MODULES = HEAVY / "node" / "node_modules"
MODULES = NODE / "node_modules"
HERE = Path(__file__).parent
NUM_REQUESTS = 4
"""One for each call, and one for the last text."""
BLOCK_TOKENS = 32
MAX_TAIL_TOKENS = BLOCK_TOKENS + 8
"""The end of a prompt that the next one need not share: a part of a block, and what begins the answer."""


class Played:
    """A session that a program plays in its workspace."""

    def __init__(self, server: ScriptedServer, name: str, home: Path) -> None:
        self.name = name
        self.workspace = server.workspace(name)
        self.question = f"Do as notes.txt says. {marker(name)}"
        self._server = server
        self._home = home

    def run(self, *command: str | Path, num_requests: int = NUM_REQUESTS, **variables: str) -> None:
        """Run the program in the workspace. It wrote the file, got the last text, and every request was answered."""
        num_earlier = len(self._server.requests())
        run = run_program(command, self.workspace, HOME=str(self._home), **variables)
        said = f"{run.stdout[-4000:]}\n{run.stderr[-4000:]}"
        assert run.returncode == 0 and end_of(self.name) in run.stdout, said
        assert (self.workspace / "answer.txt").read_text() == ANSWER, said
        records = self._server.requests(num_earlier, num_requests)
        assert {record["status"] for record in records} == {200} and len(records) == num_requests, records
        turns = [record for record in records if "prompt_tokens" in record][-NUM_REQUESTS:]
        for earlier, later in pairwise(turns):
            assert later["cached_tokens"] >= earlier["prompt_tokens"] - MAX_TAIL_TOKENS, records


def test_claude_code(scripted: ScriptedServer, tmp_path: Path) -> None:
    played = Played(scripted, "claude-code", tmp_path)
    played.run(
        *(MODULES / ".bin" / "claude", "-p", played.question, "--dangerously-skip-permissions"),
        IS_SANDBOX="1",
        ANTHROPIC_BASE_URL=scripted.url,
        ANTHROPIC_AUTH_TOKEN="unused",
        ANTHROPIC_MODEL="scripted",
        ANTHROPIC_DEFAULT_HAIKU_MODEL="scripted",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_TELEMETRY="1",
    )


def test_codex(scripted: ScriptedServer, tmp_path: Path) -> None:
    played = Played(scripted, "codex", tmp_path)
    (tmp_path / "config.toml").write_text(
        f"""model = "scripted"
model_provider = "sluice"

[model_providers.sluice]
name = "Sluice"
base_url = "{scripted.url}/v1"
wire_api = "responses"
"""
    )
    command = (MODULES / ".bin" / "codex", "exec", "--skip-git-repo-check")
    played.run(*command, "--dangerously-bypass-approvals-and-sandbox", played.question, CODEX_HOME=str(tmp_path))


def test_opencode(scripted: ScriptedServer, tmp_path: Path) -> None:
    played = Played(scripted, "opencode", tmp_path)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{scripted.url}/v1"},
        "models": {"scripted": {}},
    }
    config = {"model": "sluice/scripted", "small_model": "sluice/scripted", "provider": {"sluice": provider}}
    (played.workspace / "opencode.json").write_text(json.dumps(config | {"autoupdate": False, "share": "disabled"}))
    command = (MODULES / ".bin" / "opencode", "run", played.question)
    # A request for the session's title comes beside the others.
    played.run(*command, num_requests=NUM_REQUESTS + 1, OPENCODE_DISABLE_MODELS_FETCH="1", OPENCODE_PURE="1")


@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("openai-node", "openai-node"),
        ("responses-node", "openai-node-responses"),
        ("anthropic-node", "anthropic-sdk-typescript"),
        ("ollama-js", "ollama-js"),
        ("ai-sdk-openai", "ai-sdk"),
        ("ai-sdk-anthropic", "ai-sdk"),
        ("langchain-js", "langchain"),
    ],
)
def test_a_node_program(scripted: ScriptedServer, tmp_path: Path, name: str, program: str) -> None:
    Played(scripted, name, tmp_path).run("node", NODE / f"{program}.mjs", scripted.url, name)


@pytest.mark.parametrize("name", ["langgraph", "smolagents", "ag2", "llm", "openai-agents"])
def test_a_python_program(scripted: ScriptedServer, tmp_path: Path, name: str) -> None:
    program = HERE / "programs" / f"play_{name.replace('-', '_')}.py"
    variables = {"OPENAI_AGENTS_DISABLE_TRACING": "1"}
    Played(scripted, name, tmp_path).run(sys.executable, program, scripted.url, name, **variables)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["crewai", "semantic-kernel"])
def test_a_heavy_program(scripted: ScriptedServer, tmp_path: Path, name: str) -> None:
    program = HERE / "programs" / f"play_{name.replace('-', '_')}.py"
    variables = {"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false", "OTEL_SDK_DISABLED": "true"}
    Played(scripted, name, tmp_path).run(HEAVY / name / "bin" / "python", program, scripted.url, name, **variables)


@pytest.mark.heavy
def test_aider(scripted: ScriptedServer, tmp_path: Path) -> None:
    """Aider has no tools: it edits files by the text of an answer."""
    played = Played(scripted, "aider", tmp_path)
    options = ("--yes-always", "--no-git", "--no-check-update", "--analytics-disable", "--no-show-model-warnings")
    played.run(
        *(HEAVY / "aider" / "bin" / "aider", "--model", "openai/scripted", "--edit-format", "whole", *options),
        *("--message", played.question, "answer.txt"),
        num_requests=1,
        OPENAI_API_BASE=f"{scripted.url}/v1",
        OPENAI_API_KEY="unused",
    )


@pytest.mark.heavy
def test_continue(scripted: ScriptedServer, tmp_path: Path) -> None:
    played = Played(scripted, "continue", tmp_path)
    config = tmp_path / "config.yaml"
    config.write_text(
        f"""name: Sluice
version: 1.0.0
schema: v1
models:
  - name: Sluice
    provider: openai
    model: scripted
    apiBase: {scripted.url}/v1
    apiKey: unused
    roles: [chat]
    capabilities: [tool_use]
"""
    )
    played.run(HEAVY_MODULES / ".bin" / "cn", "--config", config, "--auto", "-p", played.question)


@pytest.mark.heavy
def test_cline(scripted: ScriptedServer, tmp_path: Path) -> None:
    played = Played(scripted, "cline", tmp_path)
    program = HEAVY_MODULES / ".bin" / "cline"
    login = (program, "auth", "-p", "openai", "-k", "unused", "-m", "scripted", "-b", f"{scripted.url}/v1")
    assert run_program(login, tmp_path, HOME=str(tmp_path)).returncode == 0
    played.run(program, played.question)
