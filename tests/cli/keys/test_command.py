"""`sluice keys`, and a server that follows it."""

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from sluice.cli.keys.command import command
from sluice.gateway.tenancy.access.identity import Identity
from sluice.gateway.tenancy.access.keys import PREFIX, StoredKey, make_key
from sluice.gateway.tenancy.access.ring import KeyRing
from sluice.gateway.tenancy.access.store import open_keys


class Shell:
    """Runs commands over one store."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys

    def run(self, *arguments: str, code: int = 0) -> str:
        """Return what the command writes, on standard error where it fails."""
        assert command([*arguments, "--state-path", str(self.folder)]) == code
        captured = self._capsys.readouterr()
        return captured.err if code else captured.out


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path / "state", capsys)


def test_quiet_prints_the_key_alone(shell: Shell) -> None:
    text = shell.run("create", "--name", "ci", "--tenant", "research", "--requests-per-minute", "60", "--quiet")
    assert text.startswith(PREFIX)
    assert text.endswith("\n")
    assert len(text.split()) == 1
    shown = json.loads(shell.run("show", "ci", "--json"))
    assert (shown["tenant"], shown["limits"], shown["state"]) == ("research", {"requests_per_minute": 60}, "active")
    assert text.strip() not in shell.run("list", "--json") + shell.run("show", "ci") + shell.run("list")


def test_every_field(shell: Shell) -> None:
    options = {
        "--name": "app",
        "--weight": "2.5",
        "--priorities": "-5:10",
        "--expires-in": "30d",
        "--models": "a*, b",
        "--adapters": "x",
        "--groups": "inference,rag",
        "--networks": "10.0.0.0/8,::1",
        "--subject": "app.test",
        "--metadata": "team=blue",
        "--tokens-per-day": "1000",
        "--money-per-month": "12.5",
    }
    made = json.loads(shell.run("create", *map("=".join, options.items()), "--json"))
    assert made["key"].startswith(f"{PREFIX}{made['id']}-")
    assert made["expires_at"] == pytest.approx(made["created_at"] + 30 * 86_400, abs=5)
    wanted = {
        "weight": 2.5,
        "priorities": [-5, 10],
        "models": ["a*", "b"],
        "adapters": ["x"],
        "subject": "app.test",
        "groups": ["inference", "rag"],
        "networks": ["10.0.0.0/8", "::1"],
        "metadata": {"team": "blue"},
        "limits": {"tokens_per_day": 1000, "money_per_month": 12.5},
    }
    assert {name: made[name] for name in wanted} == wanted


def test_rotate_and_revoke(shell: Shell) -> None:
    first = shell.run("create", "--name", "ci", "--quiet").strip()
    second = shell.run("rotate", "ci", "--grace", "1h", "--quiet").strip()
    assert first != second
    assert first.split("-")[2] == second.split("-")[2], "the id stays"
    assert "there is no terminal to ask" in shell.run("revoke", "ci", code=2)
    assert shell.run("revoke", "ci", "--yes") == "key ci revoked\n"
    assert "no key 'ci'" in shell.run("revoke", "ci", "--yes", code=1)
    assert shell.run("list", "--json") == ""
    assert json.loads(shell.run("list", "--all", "--json"))["state"] == "revoked"


async def test_servers_know_what_the_command_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ring = KeyRing(open_keys(str(tmp_path / "keys.sqlite")))
    await ring.refresh()
    assert not ring.has_keys
    assert await asyncio.to_thread(command, ["create", "--name", "a", "--quiet", "--state-path", str(tmp_path)]) == 0
    await ring.refresh()
    found = ring.find(capsys.readouterr().out.strip().encode())
    assert found is not None and found.name == "a"
    await ring.close()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["create", "--name", "x", "--groups", "all"], 2, "groups are inference, embeddings"),
        (["create", "--name", "x", "--weight", "0"], 2, "weight must be above 0"),
        (["rotate", "none"], 1, "no key 'none'"),
        (["show", "none", "--keys-store", "none"], 2, "there is no store of keys"),
        (["list", "--keys-store", "redis://127.0.0.1:1/0"], 1, "cannot be used"),
    ],
)
def test_what_is_refused(shell: Shell, arguments: list[str], code: int, said: str) -> None:
    assert said in shell.run(*arguments, code=code)


@pytest.mark.parametrize(
    "arguments",
    [["create"], ["create", "--name", "x", "--expires-in", "soon"], ["create", "--name", "x", "--model", "a"]],
)
def test_bad_options_end_it(shell: Shell, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        shell.run(*arguments)
    assert ended.value.code == 2


def test_an_update_changes_what_it_names(shell: Shell) -> None:
    text = shell.run(
        "create", "--name", "ci", "--models", "a*", "--networks", "10.0.0.0/8", "--tokens-per-day", "5",
        "--requests-per-minute", "60", "--expires-in", "1d", "--quiet",
    )  # fmt: skip
    before = json.loads(shell.run("show", "ci", "--json"))
    shown = shell.run("update", "ci", "--models", "b*,c", "--tokens-per-day", "9", "--unset", "networks,expires_at")
    assert "b*, c" in shown
    changes = {"models": ["b*", "c"], "limits": {"requests_per_minute": 60, "tokens_per_day": 9}}
    after = json.loads(shell.run("show", "ci", "--json"))
    assert after == before | changes | {"networks": [], "expires_at": None}
    after = json.loads(shell.run("update", after["id"], "--unset", "requests_per_minute,tokens_per_day", "--json"))
    assert after["limits"] == {}
    ring = KeyRing(open_keys(str(shell.folder / "keys.sqlite")))
    asyncio.run(ring.refresh())
    found = ring.find(text.strip().encode())
    assert found is not None
    assert found.models == ("b*", "c")


def test_an_update_refuses_what_no_key_has(shell: Shell) -> None:
    shell.run("create", "--name", "ci", "--quiet")
    assert "weight must be above 0" in shell.run("update", "ci", "--weight", "0", code=2)
    assert "name cannot change" in shell.run("update", "ci", "--unset", "name", code=2)
    assert "'color'" in shell.run("update", "ci", "--unset", "color", code=2)
    assert "no key 'other'" in shell.run("update", "other", "--weight", "2", code=1)


@pytest.mark.parametrize("form", [[], ["--quiet"]])
def test_the_command_says_that_a_key_has_admin_rights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: list[str]
) -> None:
    for name, groups, is_said in (("boss", "admin,inference", True), ("ci", "inference", False)):
        command(["create", "--name", name, "--groups", groups, *form, "--state-path", str(tmp_path)])
        assert (f"the key {name} has admin rights" in capsys.readouterr().err) == is_said


def test_groups_are_listed_by_name(shell: Shell) -> None:
    shell.run("create", "--name", "boss", "--groups", "admin,metrics")
    assert "admin,metrics" in shell.run("list")
    assert "groups:                admin, metrics\n" in shell.run("show", "boss")


def test_a_key_of_an_older_version_is_shown_as_one_whose_groups_were_never_named(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    record = msgspec.to_builtins(make_key(Identity(name="old")).stored)
    del record["identity"]["groups"]
    asyncio.run(_add(shell.folder, msgspec.convert(record, StoredKey)))
    assert "admin,embeddings,inference,metrics,rag,repository (never named)" in shell.run("list")
    assert command(["show", "old", "--state-path", str(shell.folder)]) == 0
    assert "sluice keys update old --groups" in capsys.readouterr().err
    shell.run("update", "old", "--groups", "inference")
    assert "never named" not in shell.run("list")


async def _add(folder: Path, key: StoredKey) -> None:
    store = open_keys(str(folder / "keys.sqlite"))
    await store.add(key)
    await store.close()
