"""`multipart/form-data` with one file, whose contents go to the disk as they arrive."""

from collections import defaultdict
from collections.abc import AsyncIterable
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.answers.batches.store import FileUpload

FORM_BYTES = 64 << 10
"""Bytes that a form may have beside its file."""
_MAX_FIELDS = 32
_MAX_BOUNDARY_BYTES = 70
"""The longest boundary of RFC 2046."""


@dataclass(slots=True)
class FileForm:
    """The fields of a form, and what is known of its file; `filename` None: it had none."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


class FormReader:
    """Reads one form. The parser calls back for each piece that it finds in the bytes it is fed."""

    def __init__(self, content_type: str, upload: FileUpload) -> None:
        """Raises INVALID for another content type."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 1 <= len(boundary) <= _MAX_BOUNDARY_BYTES:
            what = "multipart/form-data with the fields file and purpose"
            raise invalid("content-type", f"the body must be {what}, got {content_type[:80]!r}")
        self._form = FileForm()
        self._upload = upload
        self._headers: defaultdict[bytes, bytearray] = defaultdict(bytearray)
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._name = ""
        self._value = bytearray()
        self._num_value_bytes = 0
        self._is_file = False
        self._has_ended = False
        self._arrived: list[bytes] = []
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._on_header_name,
                "on_header_value": self._on_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._on_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    async def read(self, pieces: AsyncIterable[bytes]) -> FileForm:
        """Read the whole body. Raises INVALID for a form that cannot be read, and as `FileUpload.write`."""
        async for piece in pieces:
            try:
                self._parser.write(piece)
            except FormParserError as error:
                raise SluiceError(ErrorCode.INVALID, f"the form cannot be read: {error}") from None
            if self._arrived:
                arrived, self._arrived = self._arrived, []
                await self._upload.write(b"".join(arrived))
        if not self._has_ended:
            raise SluiceError(ErrorCode.INVALID, "the form cannot be read: it ends before its last boundary")
        return self._form

    def _begin_part(self) -> None:
        self._headers.clear()
        self._value.clear()

    def _on_header_name(self, piece: bytes, start: int, end: int) -> None:
        self._header_name += piece[start:end]

    def _on_header_value(self, piece: bytes, start: int, end: int) -> None:
        self._header_value += piece[start:end]

    def _end_header(self) -> None:
        self._headers[bytes(self._header_name).lower()] = self._header_value
        self._header_name, self._header_value = bytearray(), bytearray()

    def _end_headers(self) -> None:
        _, options = parse_options_header(bytes(self._headers[b"content-disposition"]))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = b"filename" in options or self._name == "file"
        if not self._is_file:
            return
        if self._name != "file" or self._form.filename is not None:
            raise invalid(
                "file", f"the form must have one file, in its field 'file', got another in {self._name!r:.80}"
            )
        self._form.filename = options.get(b"filename", b"").decode("utf-8", "replace") or "file"

    def _on_data(self, piece: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._arrived.append(piece[start:end])
            return
        self._num_value_bytes += end - start
        if self._num_value_bytes > FORM_BYTES:
            raise invalid(self._name, f"the fields of the form may have {FORM_BYTES} bytes beside its file")
        self._value += piece[start:end]

    def _end_part(self) -> None:
        if not self._is_file:
            if len(self._form.fields) == _MAX_FIELDS:
                raise SluiceError(ErrorCode.INVALID, f"the form may have {_MAX_FIELDS} fields")
            self._form.fields[self._name] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._has_ended = True
