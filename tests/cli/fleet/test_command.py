"""The command line of `sluice fleet`."""

from types import SimpleNamespace

import pytest

from sluice.cli.fleet import command as fleet
from sluice.gateway.options.option import OptionError


def engine_words(*argv: str) -> tuple[str, ...]:
    return fleet.engine_command(fleet._parse(["up", *argv]))


def test_options_of_the_engine_are_passed_on() -> None:
    words = engine_words("/models/m", "--replicas", "3", "--max-num-seqs", "8", "--dtype=f32", "--insecure")
    assert words[:4] == ("-m", "sluice.cli", "engine", "/models/m")
    assert set(words[4:]) == {"--max-num-seqs=8", "--dtype=f32", "--insecure"}


def test_keys_are_passed_on_together() -> None:
    words = engine_words("--curve-key", "k", "--allowed-clients", "a")
    assert set(words[3:]) == {"--curve-key=k", "--allowed-clients=a"}
    with pytest.raises(OptionError, match="--curve-key and --allowed-clients belong together"):
        engine_words("--curve-key", "k")


def test_the_bundled_model_needs_no_name() -> None:
    assert engine_words("--insecure") == ("-m", "sluice.cli", "engine", "--insecure")


def test_without_ray_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "find_spec", lambda name: None)
    assert fleet.command(["status"]) == 1
    assert capsys.readouterr().err == "sluice fleet: error: Ray is not installed: pip install 'sluice[ray]'\n"


def test_a_fleet_is_complete_with_all_its_engines_ready() -> None:
    ready, starting = SimpleNamespace(state="ready"), SimpleNamespace(state="starting")
    for engines, expected in (
        ({"a": ready}, False),
        ({"a": ready, "b": ready}, True),
        ({"a": ready, "b": starting}, False),
    ):
        report = SimpleNamespace(replicas=2, engines=engines)
        assert fleet.is_complete(report) is expected  # type: ignore[arg-type]
