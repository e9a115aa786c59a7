"""The speculation benchmark measures each workload with and without drafts."""

import pytest

from benchmarks import speculation
from sluice.gateway.checkpoint import find_checkpoint

pytestmark = pytest.mark.slow


def test_each_workload_is_measured_without_drafts_and_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "NUM_REQUESTS", 2)
    monkeypatch.setattr(speculation, "STREAMS", (2,))
    monkeypatch.setattr(speculation, "MAX_TOKENS", 24)
    figures = {(f.name, f.subject): f for f in speculation.measure(1, find_checkpoint(None))}
    assert figures["drafts accepted", "copied, 2 at a time"].median > 50, "the model quotes, and drafts foresee it"
    assert figures["drafts a token", "copied, 2 at a time"].median > 0.2
    assert figures["speculation", "unforeseeable, 2 at a time"].target is not None
    off, on = (figures["tokens/s", f"copied, 2 at a time, {kind}"].median for kind in ("off", "ngram"))
    assert figures["speculation", "copied, 2 at a time"].median == pytest.approx(on / off)
