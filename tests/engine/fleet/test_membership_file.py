"""The file that gateways follow."""

from pathlib import Path

import pytest

from sluice.engine.fleet.membership.file import EngineEntry, EnginesFile, read_members, write_members
from sluice.errors import SluiceError


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    members = (EngineEntry("engine-0", "tcp://10.0.0.2:5557", 2.0), EngineEntry("engine-1", "tcp://10.0.0.1:5557"))
    assert write_members(path, EnginesFile(members, client_key="/k/gateway.key_secret", server_key="/k/e.key"))
    assert [EngineEntry(each.name, each.address, each.weight) for each in read_members(path)] == [*members]
    assert path.read_text() == (
        "engines:\n- name: engine-0\n  address: tcp://10.0.0.2:5557\n  weight: 2.0\n"
        "- name: engine-1\n  address: tcp://10.0.0.1:5557\nclient_key: /k/gateway.key_secret\nserver_key: /k/e.key\n"
    )
    assert [each.name for each in tmp_path.iterdir()] == ["engines.yaml"]


def test_the_same_list_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    assert write_members(path, EnginesFile((EngineEntry("a", "tcp://h:1"),)))
    before = path.stat().st_ino
    assert not write_members(path, EnginesFile((EngineEntry("a", "tcp://h:1"),)))
    assert path.stat().st_ino == before
    assert write_members(path, EnginesFile(()))
    assert read_members(path) == ()


def test_a_file_of_something_else_is_told(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    path.write_text("- name: a\n")
    with pytest.raises(SluiceError, match=r"engines\.yaml: Expected `object`, got `array`"):
        read_members(path)
