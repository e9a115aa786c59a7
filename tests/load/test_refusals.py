"""`sluice load` and its commands refuse wrong arguments before they send anything, with exit code 2 and a hint."""

import shlex

import pytest

from sluice.load.__main__ import command

TO = "--url http://127.0.0.1:1 --quiet"
REFUSED = {
    # values
    "--prompt-tokens 9..3": "1 <= low <= high",
    "--request-rate 0": "above 0",
    "--concurrency 0": "at least 1",
    "--header nonsense": "Name: value",
    "--extra-body [1]": "JSON object",
    "--slo speed=1": "ttft, itl, tpot and e2e",
    "--api grpc": "chat",
    "--api-k hush": "unrecognized",
    "--json /nowhere/run.json": "a folder that exists",
    "--turns 0": "1 <= low <= high",
    "--think-time -1": "write seconds",
    "--image-size 640": "WIDTHxHEIGHT",
    "--json-schema /nowhere.json": "/nowhere.json: No such file",
    "--tools /dev/null": "not JSON",
    "sweep": "one of the arguments --concurrency --request-rate is required",
    "sweep --concurrency 1,0": "at least 1",
    # what does not go together
    f"{TO} --tool-choice required": "--tool-choice goes with --tools",
    f"{TO} --api chat --tools builtin --turns 2": "--tools: with --turns",
    f"{TO} --api ollama_chat --tools builtin --tool-choice none": "Ollama's API has none",
    f"{TO} --concurrency 2 --processes 3": "at most one for each request in flight",
    f"{TO} --images 1": "--images: requests of --api completions cannot have it",
    # flags of perf_analyzer that only itself has
    "perf-analyzer -m m --shared-memory system": "unrecognized arguments: --shared-memory",
    "perf-analyzer": "required: -m",
}


@pytest.mark.parametrize(("line", "said"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_asked_is_explained(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = command(shlex.split(line))
    except SystemExit as end:
        assert isinstance(end.code, int)
        code = end.code
    assert code == 2
    assert said in capsys.readouterr().err
