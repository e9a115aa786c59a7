"""The alerts of a sample: health at once, what bounds the server after two looks at its metrics."""

from pathlib import Path

from pytest import MonkeyPatch

from sluice.engine.config import EngineConfig
from sluice.gateway.watch.live import alerts
from sluice.gateway.watch.live.alerts import AlertJudge
from tests.cli.live_gateway import MODEL, PacedRunner, live_gateway


def test_alerts_are_what_the_doctor_says(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "JUDGED_S", 0.0)
    engine = EngineConfig(model_path="none", max_num_seqs=1)
    with live_gateway(tmp_path, PacedRunner(step_s=0.02), engine=engine) as gateway:
        judge = AlertJudge(gateway.server)
        gateway.complete(max_tokens=900)
        gateway.complete(max_tokens=900)
        gateway.wait_until(lambda: gateway.engines[0].stats.num_waiting == 1)
        gateway.server.rooms.join(notice=lambda: "a store is away")
        assert [each.kind for each in gateway.run(judge.judge())] == ["degraded"]
        found = {each.kind: each for each in gateway.run(judge.judge())}
    assert found["degraded"].text == "a store is away"
    assert found["queue"].subject == MODEL and found["queue"].level == "warn"
    assert "--max-num-seqs" in found["queue"].remedy
