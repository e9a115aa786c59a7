"""Plain text, and the decoding of bytes."""

import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.rag.documents import sandbox_worker
from sluice.pipelines.rag.documents.extract import decode_text


def test_paragraphs_are_what_blank_lines_part() -> None:
    extract = sandbox_worker.read_text(b"\none\ntwo\n \t\n\n  three\n\nfour\n\n")
    assert extract.text == "\none\ntwo\n \t\n\n  three\n\nfour\n\n"
    assert [extract.text[place:][:5] for place in extract.breaks] == ["three", "four\n"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings_and_line_ends(encoding: str) -> None:
    assert decode_text("é\r\nb\rc\n漢".encode(encoding)) == "é\nb\nc\n漢"


def test_utf_16_of_both_byte_orders() -> None:
    for bom, order in ((b"\xff\xfe", "le"), (b"\xfe\xff", "be")):
        assert decode_text(bom + "aé".encode(f"utf-16-{order}")) == "aé"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"abc\xe9def", "not UTF-8 text: byte 0xe9 at offset 3, nor"),
        (b"\xef\xbb\xbfab\xff", "byte 0xff at offset 5"),
        (b"caf\xc3\xa9\0x", "byte 0x00 at offset 5"),
        (b"\xff\xfea\0\0\xd8", "not UTF-16LE text: byte 0x00 at offset 4$"),
        (b"\xff\xfea\0\0\0", "byte 0x00 at offset 4$"),
    ],
)
def test_other_bytes_are_refused_by_their_offset(content: bytes, fault: str) -> None:
    with pytest.raises(SluiceError, match=fault) as caught:
        decode_text(content)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, "content")
