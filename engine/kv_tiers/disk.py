"""The disk tier: blocks in a file, moved by a thread so that the engine's loop never waits for a disk."""

import logging
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from sluice.engine.arrays import ByteArray
from sluice.engine.blocks import BlockHash
from sluice.engine.kv_tiers.block_file import BlockFile, DamagedBlock, StoredBlock

log = logging.getLogger(__name__)

SAVE_S = 5.0
"""Least time between two indexes: what was written since the last one is lost with a process that is killed."""
MAX_SAVING = 0.02
"""Most of the time that goes into indexes; those of very many blocks come less often."""
RATE = 1.0 / 8
"""Weight of the latest read in the running mean of its time."""
JOIN_S = 2.0
"""Longest wait for the thread at the end. It can hang in a disk that does not answer."""


@dataclass(slots=True)
class BlockTransfer:
    """A block on its way to or from the disk, and how that ended."""

    is_read: bool
    stored: StoredBlock
    row: int
    """The host tier's row that has its content."""
    content: ByteArray
    seconds: float = 0.0
    is_damaged: bool = False
    error: Exception | None = None

    @property
    def block_hash(self) -> BlockHash:
        return self.stored.block_hash


class DiskTier:
    """The blocks of one file by hash, least recently used first out. Used by the engine thread alone, beside the thread
    of its own. An error of the disk turns the tier off for good: it is logged once, and serving goes on."""

    def __init__(self, folder: Path, identity: str, block_bytes: int, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.is_off = False
        self.num_reading = self.num_writing = 0
        self.read_s = 0.0
        """Seconds that a block takes to be read and checked; 0 before the first."""
        self._stored: OrderedDict[BlockHash, StoredBlock] = OrderedDict()
        """Least recently used first."""
        self._writing: dict[BlockHash, int] = {}
        self._reading: set[BlockHash] = set()
        self._free: list[int] = []
        self._num_used = 0
        """Slots at the beginning of the file that were ever used; `_free` has those of them that hold nothing."""
        self._is_saved = True
        self._save_again_at = time.monotonic() + SAVE_S
        self._thread: _TransferThread | None = None
        try:
            file = BlockFile(folder, identity, block_bytes)
        except OSError as error:
            self._turn_off(error)
            return
        try:
            self._load(file)
        except OSError as error:
            file.close()
            self._turn_off(error)
            return
        self._thread = _TransferThread(file)
        log.info("the KV tier on disk is %s: %d of %d blocks found", file.path, len(self), num_blocks)

    def _load(self, file: BlockFile) -> None:
        for each in file.load_index(self.num_blocks):
            self._stored[each.block_hash] = each
        used = {each.slot for each in self._stored.values()}
        self._num_used = max(used, default=-1) + 1
        self._free = [slot for slot in range(self._num_used) if slot not in used]

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._stored

    def holds(self, block_hash: BlockHash) -> bool:
        """Return whether the block is on the disk or on its way to it, which counts as a use."""
        if block_hash in self._stored:
            self._stored.move_to_end(block_hash)
            return True
        return block_hash in self._writing

    def is_reading(self, block_hash: BlockHash) -> bool:
        return block_hash in self._reading

    def write(self, block_hash: BlockHash, row: int, content: ByteArray) -> None:
        """Begin to write a block that the tier does not hold. It takes the place of the least recently used one. `row`
        and `content` must stay as they are until `finished` returns the transfer."""
        assert self._thread is not None and not self.is_off, "a tier that is off"
        slot = self._writing[block_hash] = self._take_slot()
        self.num_writing += 1
        self._thread.begin(BlockTransfer(False, StoredBlock(block_hash, slot, b""), row, content))

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        if self._num_used < self.num_blocks:
            self._num_used += 1
            return self._num_used - 1
        _, oldest = self._stored.popitem(last=False)
        return oldest.slot

    @property
    def has_room(self) -> bool:
        """Whether a block can be written: not if all slots are being written."""
        return not self.is_off and len(self._writing) < self.num_blocks

    def read(self, block_hash: BlockHash, row: int, content: ByteArray) -> None:
        """Begin to read a stored block into `content`. It counts as a use."""
        assert self._thread is not None and not self.is_off, "a tier that is off"
        self._stored.move_to_end(block_hash)
        self._reading.add(block_hash)
        self.num_reading += 1
        self._thread.begin(BlockTransfer(True, self._stored[block_hash], row, content))

    def finished(self) -> list[BlockTransfer]:
        """Return the transfers that have ended since the last call, well or not, and save the index when it is time."""
        if self._thread is None:
            return []
        done = self._thread.finished()
        for transfer in done:
            self._note(transfer)
        if not self._is_saved and not self.is_off and time.monotonic() >= self._save_again_at:
            self._save()
        return done

    def _note(self, transfer: BlockTransfer) -> None:
        block_hash = transfer.block_hash
        if transfer.is_read:
            self.num_reading -= 1
            self._reading.discard(block_hash)
            if transfer.is_damaged and self._stored.get(block_hash) == transfer.stored:
                del self._stored[block_hash]
                self._free.append(transfer.stored.slot)
            self.read_s += (RATE if self.read_s else 1.0) * (transfer.seconds - self.read_s)
        else:
            self.num_writing -= 1
            slot = self._writing.pop(block_hash, None)
            if transfer.error is None and slot is not None and not self.is_off:
                self._stored[block_hash] = transfer.stored
                self._is_saved = False
        if transfer.error is not None:
            self._turn_off(transfer.error)

    def _save(self) -> None:
        assert self._thread is not None
        self._is_saved = True
        self._save_again_at = time.monotonic() + max(SAVE_S, self._thread.save_s / MAX_SAVING)
        self._thread.save(list(self._stored.values()))

    def _turn_off(self, error: Exception) -> None:
        if not self.is_off:
            log.warning("the KV tier on disk is off from here on: %s", error)
        self.is_off = True
        self._stored.clear()
        self._writing.clear()
        self._free.clear()

    def close(self) -> None:
        """Save the index and end the thread."""
        if self._thread is None:
            return
        if not self.is_off:
            self._save()
        self._thread.close()
        self._thread, self.is_off = None, True

    def check(self) -> None:
        """Assert that each slot is in one place."""
        slots = [*self._free, *(each.slot for each in self._stored.values()), *self._writing.values()]
        assert len(set(slots)) == len(slots), "a slot is in two places"
        assert self.is_off or len(slots) == self._num_used <= self.num_blocks, "slots do not add up"
        assert not self._stored.keys() & self._writing.keys(), "a block is stored twice"


class _TransferThread:
    """Reads and writes in turn, reads first: a request waits for them."""

    def __init__(self, file: BlockFile) -> None:
        self._file = file
        self.save_s = 0.0
        """Seconds that the last index took."""
        self._reads: deque[BlockTransfer] = deque()
        self._writes: deque[BlockTransfer | list[StoredBlock]] = deque()
        self._wake: SimpleQueue[bool] = SimpleQueue()
        """True for each transfer, False at the end."""
        self._done: SimpleQueue[BlockTransfer] = SimpleQueue()
        # A disk that hangs must not hold the end of the process.
        self._thread = Thread(target=self._run, name="kv-disk", daemon=True)
        self._thread.start()

    def begin(self, transfer: BlockTransfer) -> None:
        (self._reads if transfer.is_read else self._writes).append(transfer)
        self._wake.put(True)

    def save(self, blocks: list[StoredBlock]) -> None:
        self._writes.append(blocks)
        self._wake.put(True)

    def finished(self) -> list[BlockTransfer]:
        return [self._done.get() for _ in range(self._done.qsize())]

    def close(self) -> None:
        """End the thread once it has done what was begun, and close the file."""
        self._wake.put(False)
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            log.warning("the disk of %s does not answer; its last KV blocks are lost", self._file.path)
        else:
            self._file.close()

    def _run(self) -> None:
        while self._wake.get():
            work = self._reads.popleft() if self._reads else self._writes.popleft()
            if isinstance(work, BlockTransfer):
                self._transfer(work)
                self._done.put(work)
            else:
                self._save(work)

    def _transfer(self, transfer: BlockTransfer) -> None:
        started = time.perf_counter()
        try:
            if transfer.is_read:
                self._file.read(transfer.stored, transfer.content)
            else:
                checksum = self._file.write(transfer.stored.slot, transfer.block_hash, transfer.content)
                transfer.stored = transfer.stored._replace(checksum=checksum)
        except DamagedBlock:
            transfer.is_damaged = True
        except Exception as error:  # whatever it is, the engine must get its row back
            transfer.error = error
        transfer.seconds = time.perf_counter() - started

    def _save(self, blocks: list[StoredBlock]) -> None:
        started = time.perf_counter()
        try:
            self._file.save_index(blocks)
        except OSError as error:  # the next write says that the disk is full, if it still is
            log.warning("the index of %s cannot be written: %s", self._file.path, error)
        self.save_s = time.perf_counter() - started
