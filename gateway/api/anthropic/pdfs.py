"""The text of PDFs in conversations."""

import asyncio
import binascii
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache, partial
from hashlib import blake2b
from importlib.util import find_spec

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.front.long_work import breathe, run_aside
from sluice.pipelines.rag.documents.parse import ParseLimits, parse_document
from sluice.pipelines.rag.types import DocumentFormat

LIMITS = ParseLimits(max_bytes=32 << 20, timeout_s=5.0)
"""Anthropic takes 32 MB, too."""
MOST = 16
"""PDFs of one request that are read, the first ones: each new one takes a process some 0.2 s."""
_AT_ONCE = 2
_MAX_KEPT_CHARS = 16 << 20
_PIECE_CHARS = 1 << 20
"""Base64 that is decoded at once. A multiple of 4."""


class PdfTexts:
    """Reads PDFs, and keeps the texts of the last ones: a session sends its documents again with each turn."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, str] = OrderedDict()
        """Texts by the digests of the base64; "" for a PDF that cannot be read."""
        self._num_chars = 0
        self._reading = asyncio.Semaphore(_AT_ONCE)

    async def read(self, sent: Sequence[str]) -> dict[str, str]:
        """Return the texts of PDFs in base64, by that; a PDF that cannot be read is not among them."""
        found = {each: await self._read(each) for each in list(dict.fromkeys(sent))[:MOST]}
        return {each: text for each, text in found.items() if text}

    async def _read(self, sent: str) -> str:
        digest = await run_aside(partial(_digest, sent))
        if digest not in self._kept:
            async with self._reading:
                if digest not in self._kept:  # nobody has read it meanwhile
                    return await self._read_new(digest, sent)
        self._kept.move_to_end(digest)
        return self._kept[digest]

    async def _read_new(self, digest: bytes, sent: str) -> str:
        text = ""
        try:
            content = await run_aside(partial(_decode, sent))
            text = (await parse_document(content, DocumentFormat.PDF, LIMITS)).text
        except ValueError:
            pass  # what is no base64 is no PDF
        except SluiceError as error:
            if error.code is ErrorCode.UNAVAILABLE:
                return ""
        self._keep(digest, text)
        return text

    def _keep(self, digest: bytes, text: str) -> None:
        self._kept[digest] = text
        self._num_chars += len(text) + len(digest)
        while self._num_chars > _MAX_KEPT_CHARS:
            oldest, dropped = self._kept.popitem(last=False)
            self._num_chars -= len(dropped) + len(oldest)


@cache
def reads_pdfs() -> bool:
    """Whether the package is installed that reads PDFs."""
    return find_spec("pypdfium2") is not None


def _digest(sent: str) -> bytes:
    return blake2b(sent.encode(errors="surrogatepass"), digest_size=16).digest()


def _decode(sent: str) -> bytes:
    """Return the bytes of a base64 text. Raises ValueError where it is none."""
    content = bytearray()
    for start in range(0, len(sent), _PIECE_CHARS):
        breathe()
        content += binascii.a2b_base64(sent[start : start + _PIECE_CHARS])
    return bytes(content)
