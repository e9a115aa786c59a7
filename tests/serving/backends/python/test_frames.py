"""Frames over a socket, in any pieces, and segments of shared memory."""

import gc
import os
import socket
from collections import deque
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from sluice.serving.backends.python import shared_memory
from sluice.serving.backends.python.frames import (
    CancelRequests,
    Command,
    ExecuteBatch,
    NewSegments,
    WireRequest,
    WireTensor,
    WorkerFrameReader,
    encode_frame,
    fd_ancillary,
)
from sluice.serving.backends.python.shared_memory import MappedSegments, SegmentPool
from sluice.serving.tensors.tensor import Array

decoder = msgspec.msgpack.Decoder(Command)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def batch(size: int) -> ExecuteBatch:
    return ExecuteBatch([WireRequest(3, [WireTensor("X", "UINT8", (size,), bytes(size))], "id", outputs=("Y",))])


def test_frames_come_out_as_they_went_in(ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    commands: list[Command] = [
        batch(0),
        CancelRequests([1, 2]),
        batch(100),
        batch(3_000_000),
        CancelRequests([]),
        batch(700_000),
        batch(1),
    ]
    unsent = b"".join([encode_frame(each) for each in commands])
    far.setblocking(False)
    reader, step = WorkerFrameReader(near), 1
    received: list[Command] = []
    while len(received) < len(commands):
        try:
            unsent = unsent[far.send(unsent[:step]) :]
            step *= 2
        except BlockingIOError:
            pass
        reader.read()
        received += [decoder.decode(frame) for frame in reader.frames()]
    assert received == commands


def test_the_end_of_the_stream_is_told(ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    far.sendall(encode_frame(CancelRequests([1]))[:3])
    far.close()
    reader = WorkerFrameReader(near)
    assert reader.read()
    assert not list(reader.frames())
    assert not reader.read()


def test_files_that_nobody_took_are_closed(ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    before = len(os.listdir("/proc/self/fd"))
    fd = os.memfd_create("test")
    far.sendmsg([b"x"], fd_ancillary([fd]))
    os.close(fd)
    reader = WorkerFrameReader(near)
    reader.read()
    assert len(reader.fds) == 1
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before


def exchange(pool: SegmentPool, mapped: MappedSegments) -> None:
    notices, dropped = pool.take_notices()
    for new, fds in notices:
        if isinstance(new, NewSegments):
            mapped.add(new, deque(fds))
        else:
            mapped.add_forwarded(new, deque(fds))
    if dropped is not None:
        mapped.drop(dropped)


def data(size: int, value: int) -> Array:
    return np.full(size, value, np.uint8)


def test_a_segment_is_free_when_its_last_view_is_gone() -> None:
    calls: list[None] = []
    pool, mapped = SegmentPool(), MappedSegments(lambda: calls.append(None))
    stored = pool.store(data(200_000, 7))
    exchange(pool, mapped)
    view = mapped.read(stored)
    array = np.frombuffer(view, np.uint8)[10:20]
    del view
    gc.collect()
    assert not mapped.freed
    assert (array == 7).all()
    del array
    gc.collect()
    assert len(calls) == 1
    pool.free(mapped.take_freed())
    assert pool.store(data(150_000, 8)).segment == stored.segment
    assert pool.store(data(150_000, 9)).segment != stored.segment
    exchange(pool, mapped)
    pool.close()


def test_what_one_worker_sent_is_forwarded_to_the_next_and_not_copied() -> None:
    first, server = SegmentPool(), MappedSegments(lambda: None, can_forward=True)
    stored = first.store(data(3_000_000, 7))
    exchange(first, server)
    tensor = np.frombuffer(server.read(stored), np.uint8)

    pool, second = SegmentPool(), MappedSegments(lambda: None)
    forwarded = pool.store(tensor)
    assert not pool._maps
    exchange(pool, second)
    theirs = np.frombuffer(second.read(forwarded), np.uint8)
    assert (theirs == 7).all()
    theirs[:] = 8  # one model's writes to its input are invisible to others
    assert (tensor == 7).all()

    del tensor
    gc.collect()
    assert not server.freed, "the second worker still reads it"
    del theirs
    gc.collect()
    pool.free(second.take_freed())
    gc.collect()
    assert server.take_freed() == [stored.segment]
    assert not second._maps
    assert not second._readers
    first.close()


def test_a_part_of_a_segment_is_copied() -> None:
    first, server = SegmentPool(), MappedSegments(lambda: None, can_forward=True)
    stored = first.store(data(3_000_000, 7))
    exchange(first, server)
    tensor = np.frombuffer(server.read(stored), np.uint8)
    pool = SegmentPool()
    pool.store(tensor[1000:])
    assert pool._maps
    for _, fds in pool.take_notices()[0]:
        for fd in fds:
            os.close(fd)


def test_many_free_segments_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MAX_FREE_BYTES", 3 * 131_072)
    pool, mapped = SegmentPool(), MappedSegments(lambda: None)
    stored = [pool.store(data(100_000, number)) for number in range(5)]
    exchange(pool, mapped)
    for each in stored:
        assert mapped.read(each)[0] == each.segment
    gc.collect()
    pool.free(mapped.take_freed())
    _, dropped = pool.take_notices()
    assert dropped is not None
    assert len(dropped.numbers) == 2
    pool.close()


def test_new_segments_go_in_groups_that_the_kernel_takes() -> None:
    pool = SegmentPool()
    for _ in range(100):
        pool.store(data(70_000, 1))
    notices, _ = pool.take_notices()
    assert [len(fds) for _, fds in notices] == [64, 36]
    assert isinstance(notices[0][0], NewSegments)
    for _, fds in notices:
        for fd in fds:
            os.close(fd)
    pool.close()
