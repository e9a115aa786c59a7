"""`sluice tenants`: limits of tenants in the store of the keys."""

import asyncio
import json
from pathlib import Path

import pytest

from sluice.cli.keys.tenants import command
from sluice.gateway.tenancy.access.identity import QuotaLimits
from sluice.gateway.tenancy.access.ring import KeyRing
from sluice.gateway.tenancy.access.store import open_keys


def test_limits_are_set_shown_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str, code: int = 0) -> str:
        assert command([*arguments, "--state-path", str(tmp_path)]) == code
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    assert run("list") == ""
    assert run("set", "research", "--tokens-per-day", "5000") == "research: tokens_per_day=5000\n"
    set_again = json.loads(run("set", "research", "--money-per-month", "2.5", "--json"))
    assert set_again == {"object": "tenant", "name": "research", "limits": {"money_per_month": 2.5}}
    ring = KeyRing(open_keys(str(tmp_path / "keys.sqlite")))
    asyncio.run(ring.refresh())
    assert ring.tenants == {"research": QuotaLimits(money_per_month=2.5)}
    assert not ring.has_keys
    assert "limits.tokens_per_day must be a number of at least 0" in run("set", "a", "--tokens-per-day", "-1", code=2)
    assert "must be one tenant" in run("set", "*", "--tokens-per-day", "1", code=2)
    assert run("set", "research") == "research: no limits\n"
    assert run("list") == ""
