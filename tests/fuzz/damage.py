"""Damages bytes and texts as disks, networks and attackers do."""

from collections.abc import Sequence

from hypothesis import strategies as st

_NUMBERS = (b"0", b"-1", b"1", b"255", b"65536", b"2147483648", b"-2147483649", b"18446744073709551616", b"1e999")
_RAW = (b"", b"\0", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\xff\xfe", b"\r", b"\r\n\r\n", b"\\", b'"')


@st.composite
def damaged(draw: st.DrawFn, content: bytes, snippets: Sequence[bytes] = (), most: int = 4) -> bytes:
    """Change up to `most` places of a content: bits, cuts, repetitions, numbers, `snippets`."""
    for _ in range(draw(st.integers(0, most))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.sampled_from((0, 1, 2, 4, 16, 200, 5000))))
        piece = content[start:end]
        put = draw(st.sampled_from(("snippet", "number", "bit", "cut", "twice", "bytes", "end")))
        if put == "bit" and piece:
            changed = bytearray(piece)
            changed[draw(st.integers(0, len(piece) - 1))] ^= 1 << draw(st.integers(0, 7))
            piece = bytes(changed)
        elif put == "twice":
            piece *= draw(st.integers(2, 50))
        elif put == "end":
            content, piece = content[:start], b""
        elif put == "bytes":
            piece = draw(st.binary(max_size=8))
        elif put == "cut":
            piece = b""
        else:
            piece = draw(st.sampled_from(_NUMBERS if put == "number" or not snippets else (*snippets, *_RAW)))
        content = content[:start] + piece + content[end:]
    return content
