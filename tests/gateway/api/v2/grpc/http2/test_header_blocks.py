"""Header fields: read right whatever the client's table does, and written so that any client reads them."""

import logging
import random

import pytest
from hpack import Decoder, Encoder, NeverIndexedHeaderTuple

from sluice.gateway.front.http2.frames import Fields, HeaderBlockReader, write_fields
from tests.gateway.api.v2.grpc.http2.calls import serving_calls
from tests.gateway.api.v2.grpc.http2.client import connected

NAMES = [b":path", b"te", b"content-type", b"x-a", b"x-b", b"authorization", b"grpc-timeout", b"user-agent"]
VALUES = [b"", b"trailers", b"application/grpc", b"a" * 30, b"secret", b"1S", b"b" * 700, b"c" * 4500]


def random_fields(source: random.Random) -> Fields:
    return [(source.choice(NAMES), source.choice(VALUES)) for _ in range(source.randrange(6))]


def random_block(source: random.Random, encoder: Encoder, known: list[Fields]) -> bytes:
    if source.random() < 0.15:
        encoder.header_table_size = source.choice([0, 64, 200, 1000, 4096])
    fields = source.choice(known) if source.random() < 0.7 else random_fields(source)
    kind = NeverIndexedHeaderTuple if source.random() < 0.3 else lambda name, value: (name, value)
    return encoder.encode([kind(*each) for each in fields], huffman=source.random() < 0.5)


@pytest.mark.parametrize("seed", range(2))
def test_blocks_stand_for_the_same_fields_as_for_hpack(seed: int) -> None:
    """Blocks that repeat, that change the table, that change its size, and that nobody keeps, in any order."""
    source = random.Random(seed)
    encoder, decoder = Encoder(), Decoder(1 << 16)
    num_made = 0

    def make(fields: Fields) -> Fields:
        nonlocal num_made
        num_made += 1
        return fields

    reader = HeaderBlockReader(make)
    known = [random_fields(source) for _ in range(5)]
    for _ in range(300):
        block = random_block(source, encoder, known)
        expected = [tuple(each) for each in decoder.decode(block, raw=True)]
        found = reader.read_others(block) if source.random() < 0.1 else reader.read(block)
        assert found == expected
    assert num_made < 300, "no block was ever remembered"


def test_a_block_is_read_once_until_the_table_changes() -> None:
    made: list[Fields] = []
    reader = HeaderBlockReader(lambda fields: made.append(fields) or len(made))  # type: ignore[func-returns-value]
    encoder = Encoder()
    first = encoder.encode([(b"x-a", b"1")])
    again = encoder.encode([(b"x-a", b"1")])
    assert [reader.read(each) for each in (first, again, again, again)] == [1, 2, 2, 2]
    other = encoder.encode([(b"x-b", b"2")])
    assert reader.read(other) == 3
    moved = encoder.encode([(b"x-a", b"1")])
    assert moved != again
    assert reader.read(moved) == 4
    assert made[-1] == [(b"x-a", b"1")]
    assert made.pop() is not None and reader.read(again) == 4, "its index stands for x-b now"
    assert made[-1] == [(b"x-b", b"2")]


def test_no_more_blocks_are_kept_than_a_few() -> None:
    reader: HeaderBlockReader[Fields] = HeaderBlockReader(lambda fields: fields)
    for number in range(1000):
        block = b"\x10\x03x-a\x04%04d" % number  # a literal that no table keeps
        assert reader.read(block) == [(b"x-a", b"%04d" % number)]
    assert len(reader._kept) <= 64


@pytest.mark.parametrize("size", [0, 1, 126, 127, 128, 255, 16_383, 100_000])
def test_what_is_written_is_what_is_read(size: int) -> None:
    fields = [(b"name", b"v" * size), (b"n" * max(1, size), b"")]
    found = Decoder(1 << 20).decode(write_fields(fields, 200), raw=True)
    assert [tuple(each) for each in found] == [(b":status", b"200"), *fields]


async def test_keys_are_not_in_the_log_of_hpack(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever sets the whole log to DEBUG does not write keys into it."""
    caplog.set_level(logging.DEBUG)
    async with serving_calls() as calls, connected(calls.port) as client:
        block = client.block([])  # the client's own part logs what it encodes, too
        caplog.clear()
        assert logging.getLogger("hpack.hpack").getEffectiveLevel() == logging.INFO
        client.send(client.request(1, more=[("authorization", "Bearer very-secret")]), block)
        assert (await client.end_of(1)).status == 0
        assert (await client.ask(3)).status == 0
    assert "very-secret" not in caplog.text
