"""The disk tier's file: slots of one size, and an index beside it that a later process reads."""

import fcntl
import json
import logging
import os
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from sluice.engine.arrays import ByteArray
from sluice.engine.blocks import BlockHash

log = logging.getLogger(__name__)

MAX_FILES = 64
"""Most engines of one model that share a folder; each has a file of its own."""
_CHECKSUM_BYTES = 16
_FORMAT = 1


class StoredBlock(NamedTuple):
    """An entry of the index."""

    block_hash: BlockHash
    slot: int
    checksum: bytes


class DamagedBlock(Exception):
    """The content of a slot is not what was written for that block."""


class BlockFile:
    """One open and locked file. `read` and `write` are used by one thread at a time.

    The file is read and written by position and not mapped: a full disk and a truncated file are errors then, where
    they would end the process otherwise. A checksum covers a block's hash and content, so that a slot which was written
    after the last index, or only in part, is found out.
    """

    def __init__(self, folder: Path, identity: str, block_bytes: int) -> None:
        """Open the first file of `identity` (a digest in hexadecimal) in `folder` that no other process has. Raises
        OSError where the folder cannot be written, or all files are taken."""
        self._block_bytes = block_bytes
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._identity = identity
        self._path, self._file = _open_first(folder, identity)
        self._index = self._path.with_suffix(".index")

    @property
    def path(self) -> Path:
        return self._path

    def write(self, slot: int, block_hash: BlockHash, content: ByteArray) -> bytes:
        """Write a block, and return its checksum. Raises OSError."""
        checksum = _checksum(block_hash, content)
        written, begin = 0, slot * self._block_bytes
        view = content.data
        while written < len(view):
            written += os.pwrite(self._file, view[written:], begin + written)
        return checksum

    def read(self, stored: StoredBlock, content: ByteArray) -> None:
        """Read a block into `content`, [block_bytes]. Raises DamagedBlock, OSError."""
        size = os.preadv(self._file, [content.data], stored.slot * self._block_bytes)
        if size != self._block_bytes or _checksum(stored.block_hash, content) != stored.checksum:
            raise DamagedBlock

    def save_index(self, blocks: Iterable[StoredBlock]) -> None:
        """Replace the index by one of `blocks`, least recently used first. Raises OSError."""
        lines = [f"{each.block_hash.hex()} {each.slot} {each.checksum.hex()}" for each in blocks]
        body = "\n".join(lines).encode()
        header = {
            "format": _FORMAT,
            "identity": self._identity,
            "block_bytes": self._block_bytes,
            "checksum": _digest(body).hex(),
        }
        unfinished = self._index.with_suffix(".unfinished")
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(json.dumps(header).encode() + b"\n" + body)
        unfinished.replace(self._index)

    def load_index(self, num_slots: int) -> list[StoredBlock]:
        """Return the blocks of the last index, least recently used first, and cut the file to `num_slots`. Nothing is
        returned of an index that is damaged or another model's; a warning says so. Raises OSError."""
        blocks: dict[int, StoredBlock] = {}
        try:
            for each in self._parse_index():
                if 0 <= each.slot < num_slots:
                    blocks[each.slot] = each
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError) as error:
            log.warning("the KV blocks in %s are discarded: the index is damaged or foreign (%s)", self._path, error)
            blocks = {}
        size = num_slots * self._block_bytes if blocks else 0
        if os.fstat(self._file).st_size > size:
            os.ftruncate(self._file, size)
        return list(blocks.values())

    def _parse_index(self) -> list[StoredBlock]:
        line, _, body = self._index.read_bytes().partition(b"\n")
        header = json.loads(line)
        expected = (_FORMAT, self._identity, self._block_bytes)
        found = (header["format"], header["identity"], header["block_bytes"])
        if found != expected:
            raise ValueError(f"it is of {found}, expected {expected}")
        if header["checksum"] != _digest(body).hex():
            raise ValueError("its checksum is wrong")
        entries = [line.split() for line in body.decode().splitlines()]
        return [StoredBlock(BlockHash(bytes.fromhex(h)), int(slot), bytes.fromhex(c)) for h, slot, c in entries]

    def close(self) -> None:
        """Close the file, and let another process have it."""
        os.close(self._file)


def _open_first(folder: Path, identity: str) -> tuple[Path, int]:
    for number in range(MAX_FILES):
        path = folder / f"kv-{identity}-{number}.blocks"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            continue
        except OSError:
            os.close(file)
            raise
        return path, file
    raise OSError(f"all {MAX_FILES} files of this model in {folder} are in use by other engines")


def _checksum(block_hash: BlockHash, content: ByteArray) -> bytes:
    return blake2b(content.data, key=block_hash, digest_size=_CHECKSUM_BYTES).digest()


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_CHECKSUM_BYTES).digest()
