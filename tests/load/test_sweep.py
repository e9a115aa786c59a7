"""`sluice load sweep`, on a scripted server."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluice.load import sweep
from sluice.load.summary import Distribution
from sluice.load.sweep import Point, pareto_front
from tests.load.scripted_server import Wire, command_against, good_stream, run_against


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_PAUSE_S", 0.0)


async def paced_stream(wire: Wire) -> None:
    """Send tokens apart from each other, so that they have a time."""
    wire.start_stream()
    for _ in range(wire.body["max_tokens"]):
        wire.token()
        await asyncio.sleep(0.002)
    wire.finish(wire.body["max_tokens"])


def point(load: float, tpot_ms: float, tokens_per_s: float) -> Point:
    run = run_against(good_stream)
    tpot = Distribution.of_seconds([tpot_ms / 1e3])
    summary = replace(run.summary, tpot_ms=tpot, output_tokens_per_s=tokens_per_s)
    return Point(load, replace(run, summary=summary), num_gpus=2)


def test_the_front_has_what_no_other_load_beats_in_both() -> None:
    points = [point(1, 10.0, 100.0), point(2, 20.0, 300.0), point(4, 25.0, 290.0), point(8, 50.0, 400.0)]
    assert [each.load for each in pareto_front(points)] == [1, 2, 8]
    assert points[1].tokens_per_s_per_user == pytest.approx(50.0)
    assert points[1].tokens_per_s_per_gpu == 150.0


def swept(tmp_path: Path, *flags: str) -> tuple[dict[str, Any], str, int]:
    files = [tmp_path / "sweep.json", tmp_path / "sweep.html"]
    words = (*flags, "--num-requests", "6", "--json", str(files[0]), "--html", str(files[1]), "--quiet")
    status, server = command_against(paced_stream, "sweep", "--url", "URL", "--output-tokens", "3", *words)
    assert status == 0
    prompts = [json.dumps(wire.body["prompt"]) for wire in server.wires]
    assert len(set(prompts)) == len(prompts), "no run repeats a prompt of another"
    return json.loads(files[0].read_bytes()), files[1].read_text(), len(server.wires)


def test_each_concurrency_is_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document, page, num_requests = swept(tmp_path, "--concurrency", "4,1,2", "--num-gpus", "4")
    assert [row["load"] for row in document["points"]] == [1, 2, 4]
    assert [row["report"]["config"]["pace"]["concurrency"] for row in document["points"]] == [1, 2, 4]
    assert num_requests == 18
    assert all(row["num_gpus"] == 4 for row in document["points"])
    assert "tokens/s/GPU" in capsys.readouterr().out
    for title in ("TTFT in ms against the load", "Pareto"):
        assert title in page


def test_each_rate_is_a_run(tmp_path: Path) -> None:
    document, _, _ = swept(tmp_path, "--request-rate", "100,200.5")
    assert [row["report"]["config"]["pace"]["request_rate"] for row in document["points"]] == [100, 200.5]
    assert document["unit"] == "requests/s"
