"""What the scripted model answers in each session."""

from collections.abc import Mapping
from pathlib import Path

from scripted_model import Call, Session

NOTES, ANSWER = "The answer is forty-two.\n", "forty-two\n"
COUNT = "wc -c answer.txt"


FUNCTION_SESSIONS = (
    *("openai-node", "responses-node", "anthropic-node", "ollama-js", "langchain-js"),
    *("ai-sdk-openai", "ai-sdk-anthropic"),
    *("langgraph", "smolagents", "ag2", "llm", "openai-agents", "crewai"),
)
"""Sessions with the functions of `node/tools.mjs` and `programs/tools.py`."""


def end_of(name: str) -> str:
    """Return the last answer of a session."""
    return f"That is all of {name}."


def write_sessions(workspaces: Path) -> Mapping[str, Session]:
    """Return the sessions by their names. Files are in the folder of that name in `workspaces`."""

    def path(name: str, file: str) -> str:
        return str(workspaces / name / file)

    def functions(name: str) -> tuple[Call, ...]:
        notes, answer = path(name, "notes.txt"), path(name, "answer.txt")
        return (
            Call("read_notes", {"file": notes}),
            Call("write_answer", {"file": answer, "content": ANSWER}),
            Call("count_bytes", {"file": answer}),
        )

    calls = {name: functions(name) for name in FUNCTION_SESSIONS} | {
        "claude-code": (
            Call("Read", {"file_path": path("claude-code", "notes.txt")}),
            Call("Write", {"file_path": path("claude-code", "answer.txt"), "content": ANSWER}),
            Call("Bash", {"command": COUNT, "description": "Count bytes"}),
        ),
        "codex": (
            Call("exec_command", {"cmd": "cat notes.txt"}),
            Call("exec_command", {"cmd": "echo forty-two > answer.txt"}),
            Call("exec_command", {"cmd": COUNT}),
        ),
        "opencode": (
            Call("read", {"filePath": path("opencode", "notes.txt")}),
            Call("write", {"content": ANSWER, "filePath": path("opencode", "answer.txt")}),
            Call("bash", {"command": COUNT}),
        ),
        "continue": (
            Call("Read", {"filepath": path("continue", "notes.txt")}),
            Call("Write", {"filepath": path("continue", "answer.txt"), "content": ANSWER}),
            Call("Bash", {"command": COUNT}),
        ),
        "cline": (
            Call("read_files", {"files": [{"path": path("cline", "notes.txt")}]}),
            Call("editor", {"path": path("cline", "answer.txt"), "new_text": ANSWER}),
            Call("run_commands", {"commands": [COUNT]}),
        ),
    }
    files = ("read_notes", "write_answer", "count_bytes")
    calls["semantic-kernel"] = tuple(
        Call(f"Files-{file}", call.arguments) for file, call in zip(files, functions("semantic-kernel"), strict=True)
    )
    ends = {"smolagents": Call("final_answer", {"answer": end_of("smolagents")})}
    edit = f"answer.txt\n```\n{ANSWER}```\n\n{end_of('aider')}"
    texts = {"aider": Session((edit,), has_tools=False)}
    return texts | {name: Session((*each, ends.get(name, end_of(name)))) for name, each in calls.items()}
