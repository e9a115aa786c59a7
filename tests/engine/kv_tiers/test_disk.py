"""The disk tier: what is found again, what is discarded, and what an error of the disk does."""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from sluice.engine.arrays import ByteArray
from sluice.engine.blocks import BlockHash, HashChain
from sluice.engine.kv_tiers import block_file
from sluice.engine.kv_tiers.block_file import BlockFile
from sluice.engine.kv_tiers.disk import BlockTransfer, DiskTier
from tests.waiting import wait_until

BLOCK_BYTES = 4096


def content_of(number: int) -> ByteArray:
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES).astype(np.uint8)


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def wait_for(tier: DiskTier, is_done: Callable[[], bool]) -> list[BlockTransfer]:
    """Return the transfers that end until `is_done`."""
    done = list[BlockTransfer]()

    def claim() -> bool:
        done.extend(tier.finished())
        tier.check()
        return is_done()

    wait_until(claim, "the disk's thread has not answered")
    return done


def write(tier: DiskTier, *numbers: int) -> None:
    for number in numbers:
        tier.write(name(number), 0, content_of(number))
        wait_for(tier, lambda: tier.num_writing == 0)


def read(tier: DiskTier, number: int) -> ByteArray:
    """Return the content of a block, nothing of one that is damaged."""
    content = np.zeros(BLOCK_BYTES, np.uint8)
    tier.read(name(number), 0, content)
    (transfer,) = wait_for(tier, lambda: tier.num_reading == 0)
    assert transfer.is_read
    return content[:0] if transfer.is_damaged or transfer.error is not None else content


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[Callable[..., DiskTier]]:
    tiers: list[DiskTier] = []

    def open_one(num_blocks: int = 4, identity: str = "model") -> DiskTier:
        tiers.append(DiskTier(tmp_path, identity, BLOCK_BYTES, num_blocks))
        return tiers[-1]

    yield open_one
    for tier in tiers:
        tier.close()


def test_the_least_recently_used_block_makes_room(open_tier: Callable[..., DiskTier]) -> None:
    tier = open_tier(num_blocks=3)
    write(tier, 1, 2, 3)
    assert np.array_equal(read(tier, 1), content_of(1)), "a use, so block 2 is now the oldest"
    write(tier, 4)
    assert [name(each) in tier for each in (1, 2, 3, 4)] == [True, False, True, True]
    assert all(np.array_equal(read(tier, each), content_of(each)) for each in (1, 3, 4))


def test_a_restart_finds_blocks_and_their_order(open_tier: Callable[..., DiskTier]) -> None:
    tier = open_tier()
    write(tier, 1, 2, 3)
    tier.holds(name(1))
    tier.close()
    tier = open_tier()
    assert len(tier) == 3
    assert all(np.array_equal(read(tier, each), content_of(each)) for each in (2, 3, 1))
    write(tier, 4, 5)
    assert name(2) not in tier


def test_blocks_of_adapters_are_found_after_a_restart_too(open_tier: Callable[..., DiskTier]) -> None:
    of_adapter = HashChain("", 4, adapter="digest").hashes([1, 2, 3, 4], 1)[0]
    of_none = HashChain("", 4).hashes([1, 2, 3, 4], 1)[0]
    tier = open_tier()
    for block_hash in (of_adapter, of_none):
        tier.write(block_hash, 0, content_of(1))
    wait_for(tier, lambda: tier.num_writing == 0)
    tier.close()
    tier = open_tier()
    assert of_adapter in tier
    assert of_none in tier


def test_a_smaller_tier_keeps_what_fits(open_tier: Callable[..., DiskTier], tmp_path: Path) -> None:
    tier = open_tier(num_blocks=4)
    write(tier, 1, 2, 3, 4)
    tier.close()
    tier = open_tier(num_blocks=2)
    assert len(tier) == 2
    assert (tmp_path / "kv-model-0.blocks").stat().st_size == 2 * BLOCK_BYTES
    assert sum(name(each) in tier and np.array_equal(read(tier, each), content_of(each)) for each in (1, 2, 3, 4)) == 2


def test_a_damaged_block_is_discarded(open_tier: Callable[..., DiskTier], tmp_path: Path) -> None:
    tier = open_tier()
    write(tier, 1, 2)
    tier.close()
    with (tmp_path / "kv-model-0.blocks").open("r+b") as file:
        file.seek(100)
        byte = file.read(1)[0]
        file.seek(100)
        file.write(bytes([byte ^ 1]))
    tier = open_tier()
    assert read(tier, 1).size == 0
    assert name(1) not in tier
    assert np.array_equal(read(tier, 2), content_of(2))
    assert not tier.is_off


def test_a_slot_that_was_written_after_the_index_is_discarded(
    open_tier: Callable[..., DiskTier], tmp_path: Path
) -> None:
    """A process that is killed leaves the index of some seconds ago beside the blocks of now."""
    tier = open_tier(num_blocks=1)
    write(tier, 1)
    tier.close()
    old_index = (tmp_path / "kv-model-0.index").read_bytes()
    tier = open_tier(num_blocks=1)
    write(tier, 2)
    tier.close()
    (tmp_path / "kv-model-0.index").write_bytes(old_index)
    tier = open_tier(num_blocks=1)
    assert name(1) in tier
    assert read(tier, 1).size == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: b"",
        lambda text: text[: len(text) // 2],
        lambda text: text[:-1] + (b"1" if text[-1:] == b"0" else b"0"),
        lambda text: b"\xff\xfe no index\n" + text,
        lambda text: b"[]\n" + text,
        lambda text: text.replace(b'"format": 1', b'"format": 2'),
        lambda text: text.replace(b'"identity": "model"', b'"identity": "other"'),
    ],
)
def test_a_damaged_or_foreign_index_is_discarded_with_a_warning(
    open_tier: Callable[..., DiskTier],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[bytes], bytes],
) -> None:
    tier = open_tier()
    write(tier, 1, 2)
    tier.close()
    index = tmp_path / "kv-model-0.index"
    index.write_bytes(damage(index.read_bytes()))
    tier = open_tier()
    assert len(tier) == 0
    assert not tier.is_off
    assert "damaged or foreign" in caplog.text
    write(tier, 3)
    assert np.array_equal(read(tier, 3), content_of(3))


def test_a_missing_file_of_blocks_gives_no_block(open_tier: Callable[..., DiskTier], tmp_path: Path) -> None:
    tier = open_tier()
    write(tier, 1)
    tier.close()
    (tmp_path / "kv-model-0.blocks").unlink()
    tier = open_tier()
    assert read(tier, 1).size == 0
    assert name(1) not in tier


def test_two_engines_of_one_folder_have_a_file_each(open_tier: Callable[..., DiskTier], tmp_path: Path) -> None:
    first, second = open_tier(), open_tier()
    write(first, 1)
    write(second, 2)
    assert name(2) not in first
    assert np.array_equal(read(first, 1), content_of(1))
    assert np.array_equal(read(second, 2), content_of(2))
    assert {path.name for path in tmp_path.glob("*.blocks")} == {"kv-model-0.blocks", "kv-model-1.blocks"}


def test_the_tier_is_off_where_all_files_are_taken(
    open_tier: Callable[..., DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_file, "MAX_FILES", 1)
    assert not open_tier().is_off
    assert open_tier().is_off


def test_other_models_have_other_files(open_tier: Callable[..., DiskTier]) -> None:
    tier = open_tier(identity="one")
    write(tier, 1)
    tier.close()
    assert len(open_tier(identity="two")) == 0
    assert len(open_tier(identity="one")) == 1


def test_files_are_the_owners_alone(open_tier: Callable[..., DiskTier], tmp_path: Path) -> None:
    tier = open_tier()
    write(tier, 1)
    tier.close()
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_a_full_disk_turns_the_tier_off_once(
    open_tier: Callable[..., DiskTier], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier()
    write(tier, 1)
    real = os.pwrite

    def refuse(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    caplog.set_level(logging.WARNING)
    for number in (2, 3):
        tier.write(name(number), 0, content_of(number))
    assert len(wait_for(tier, lambda: tier.num_writing == 0)) == 2, "the rows of both come back"
    monkeypatch.setattr(os, "pwrite", real)
    assert tier.is_off
    assert not tier.has_room
    assert len(tier) == 0
    assert caplog.text.count("No space left on device") == 1


def test_a_folder_that_cannot_be_made_turns_the_tier_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    tier = DiskTier(tmp_path / "file" / "folder", "model", BLOCK_BYTES, 4)
    assert tier.is_off
    assert "is off from here on" in caplog.text
    assert tier.finished() == []
    tier.close()


def test_a_write_in_parts_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, real = BlockFile(tmp_path, "model", BLOCK_BYTES), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:1000], offset))
    checksum = file.write(1, name(1), content_of(1))
    found = np.zeros(BLOCK_BYTES, np.uint8)
    file.read(block_file.StoredBlock(name(1), 1, checksum), found)
    assert (found == content_of(1)).all()
    file.close()
