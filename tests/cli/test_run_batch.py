"""`sluice run-batch` with the bundled model, and what it says of files that it cannot use."""

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.cli.run_batch import command
from tests.server_process import MODEL

NUM_REQUESTS = 20


def write_requests(path: Path, model: str, **changes: Any) -> Path:
    """Write chat requests r0 to r19, of which r7 cannot be answered."""
    lines = []
    for i in range(NUM_REQUESTS):
        messages = [{"role": "user", "content": f"What is {i}?"}]
        body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 9 if i == 7 else 0}
        url = "/v1/chat/completions"
        lines.append(json.dumps({"custom_id": f"r{i}", "method": "POST", "url": url, "body": body, **changes}))
    path.write_text("\n".join(lines))
    return path


def ids(path: Path) -> list[str]:
    return sorted(json.loads(line)["custom_id"] for line in path.read_text().splitlines())


def test_a_run_goes_on_where_the_last_one_stopped(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first run is with the bundled model, which answers under the name that the requests give."""
    requests, output = write_requests(tmp_path / "in.jsonl", "gpt-4o"), tmp_path / "out.jsonl"
    errors = tmp_path / "out.jsonl.errors.jsonl"
    assert command([str(requests), "-o", str(output)]) == 1
    said = capsys.readouterr()
    assert f"{output}: 19 of 20 requests answered, 1 failed (see {errors}); " in said.out
    assert "the requests name the model 'gpt-4o'; rill answers them" in said.err
    everything = sorted(f"r{i}" for i in range(NUM_REQUESTS) if i != 7)
    assert ids(output) == everything and ids(errors) == ["r7"]
    first = json.loads(output.read_text().splitlines()[0])["response"]["body"]
    assert first["model"] == "gpt-4o" and first["choices"][0]["message"]["content"]

    whole = output.read_bytes()
    output.write_bytes(whole[: len(whole) // 2])  # as after kill -9 in the middle of a line
    num_left = whole[: len(whole) // 2].count(b"\n")
    write_requests(requests, MODEL)
    arguments = [str(requests), "-o", str(output), "--model", str(checkpoint), "--served-model-name", MODEL]
    assert command(arguments) == 1
    assert f"19 of 20 requests answered, {num_left + 1} of them by an earlier run, 1 failed" in capsys.readouterr().out
    assert ids(output) == everything and ids(errors) == ["r7"]
    assert output.read_bytes().startswith(whole[: whole.index(b"\n")])

    assert command(arguments) == 1  # nothing is left to do, and no model is loaded
    assert "0.0 requests/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "more", "said", "code"),
    [
        ("", (), "in.jsonl: the file has no requests", 1),
        ("{}\nx", (), "in.jsonl:2: the line must be a JSON object, got 'x'", 1),
        (None, (), "in.jsonl cannot be read: No such file", 2),
        ("{}", ("-i", "b"), "INPUT is required, once", 2),
        ("{}", ("--errors-file", "in.jsonl"), "INPUT, OUTPUT and ERRORS must be three files", 2),
        ("{}", ("--max-num-seqs", "0"), "--max-num-seqs must be a whole number from 1 to 4096, got '0'", 2),
        ("requests", ("--model", "gone"), "--model must be the folder of a HuggingFace checkpoint", 2),
        ("requests", ("--errors-file", "notes"), "line 1 of notes is no result of a batch", 1),
    ],
)
def test_what_cannot_be_used_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lines: str | None,
    more: tuple[str, ...],
    said: str,
    code: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes").write_text("mine")
    if lines == "requests":
        write_requests(Path("in.jsonl"), "rill")
    elif lines is not None:
        Path("in.jsonl").write_text(lines)
    assert command(["in.jsonl", "-o", "out.jsonl", *more]) == code
    assert f"sluice run-batch: error: {said}" in capsys.readouterr().err
    assert Path("notes").read_text() == "mine" and not Path("out.jsonl").exists()
