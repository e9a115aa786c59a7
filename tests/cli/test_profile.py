"""`sluice profile` on a real server: a file that Perfetto reads, and what may go wrong."""

import asyncio
import json
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from sluice.cli.profile import command
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.plane.profiler import Profiler
from sluice.gateway.telemetry.metrics import GatewayMetrics
from tests.gateway.repositories import empty_repository
from tests.server_process import ServerProcess
from tests.waiting import PATIENCE_S

Event = dict[str, Any]
REQUIRED = {"M": {"args"}, "X": {"ts", "dur"}, "C": {"ts", "args"}, "b": {"ts", "cat", "id"}, "e": {"ts", "cat", "id"}}


def check_format(events: list[Event]) -> None:
    """Check the rules of the trace event format: its fields, slices that nest, and async slices that end."""
    slices: dict[tuple[int, int], list[Event]] = defaultdict(list)
    stacks: dict[str, list[str]] = defaultdict(list)
    for event in events:
        assert {"name", "ph", "pid", "tid"} <= event.keys()
        assert event.keys() >= REQUIRED[event["ph"]], event
        assert event.get("ts", 0) >= 0
        match event["ph"]:
            case "X":
                slices[event["pid"], event["tid"]].append(event)
            case "C":
                assert all(isinstance(each, int | float) for each in event["args"].values())
            case "b":
                stacks[event["id"]].append(event["name"])
            case "e":
                assert stacks[event["id"]].pop() == event["name"]
    assert not any(stacks.values())
    for lane in slices.values():
        open_ends: list[float] = []
        for event in sorted(lane, key=lambda each: (each["ts"], -each["dur"])):
            while open_ends and open_ends[-1] <= event["ts"] + 0.01:
                open_ends.pop()
            end = event["ts"] + event["dur"]
            assert not open_ends or end <= open_ends[-1] + 0.01, event
            open_ends.append(end)


def test_a_profile_has_steps_tasks_and_requests(server: ServerProcess, tmp_path: Path) -> None:
    body = {"model": "tiny", "prompt": "x y z", "max_tokens": 4, "ignore_eos": True}
    is_done = threading.Event()

    def ask() -> None:
        number = 0
        with httpx.Client(timeout=PATIENCE_S) as client:
            while not is_done.is_set():
                headers = {"x-request-id": f"profiled-{number}"}
                client.post(
                    f"{server.base_url}/v1/completions",
                    json=body | {"prompt": f"{number} is a number"},
                    headers=headers,
                )
                number += 1

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        file = tmp_path / "trace.json"
        assert command([server.base_url, "--seconds", "1", "--output", str(file)]) == 0
    finally:
        is_done.set()
        asking.join()
    content = json.loads(file.read_text())
    events = content["traceEvents"]
    check_format(events)
    processes = {each["args"]["name"]: each["pid"] for each in events if each["name"] == "process_name"}
    assert processes.keys() == {"gateway", "engine tiny 1"}
    own = [each for each in events if each["pid"] == processes["engine tiny 1"] and each["ph"] == "X"]
    steps = [each for each in own if each["name"] == "step"]
    assert sum(each["args"]["decode"] for each in steps) > 0
    assert sum(each["args"]["prefill_tokens"] for each in steps) > 0
    assert {each["name"] for each in own} == {"step", "intake", "plan", "build", "run", "sample", "commit", "emit"}
    tasks = [each for each in events if each.get("cat") == "task"]
    assert any("run_asgi" in each["name"] for each in tasks)
    assert any(each["name"] == "event loop lag" for each in events)
    assert any(each["id"].startswith("profiled-") and each["name"] == "decode" for each in events if each["ph"] == "b")
    with server.client() as client:
        assert client.post("/v1/completions", json=body).status_code == 200


async def test_of_two_profiles_at_once_the_second_is_refused() -> None:
    profiler = Profiler(empty_repository(GatewayMetrics()), None)
    first = asyncio.create_task(profiler.record(0.01))
    await asyncio.sleep(0)
    with pytest.raises(SluiceError, match="a profile of this server is being recorded") as caught:
        await profiler.record(0.01)
    assert caught.value.code is ErrorCode.OVERLOADED
    await first
    assert "traceEvents" in await profiler.record(0.01)


def test_a_server_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["http://127.0.0.1:9", "--output", str(tmp_path / "none.json")]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("sluice profile: error: http://127.0.0.1:9")
    assert not (tmp_path / "none.json").exists()
