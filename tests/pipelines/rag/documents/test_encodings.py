"""The encoding of documents: labels, declarations of pages, and bytes that are wrong."""

import pytest
from webencodings.labels import LABELS

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.rag.documents import html, sandbox_worker
from sluice.pipelines.rag.documents.extract import find_declaration, find_encoding

SAMPLES = {
    "utf-8": ("naïve 文字", "utf-8"),
    "ibm866": ("Привет ░", "cp866"),
    "iso-8859-2": ("źdźbło", "iso8859-2"),
    "iso-8859-3": ("ĉapelo", "iso8859-3"),
    "iso-8859-4": ("ķēde", "iso8859-4"),
    "iso-8859-5": ("Привет", "iso8859-5"),
    "iso-8859-6": ("مرحبا", "iso8859-6"),
    "iso-8859-7": ("γειά €", "iso8859-7"),
    "iso-8859-8": ("שלום", "iso8859-8"),
    "iso-8859-8-i": ("שלום", "iso8859-8"),
    "iso-8859-10": ("ŋuovdag", "iso8859-10"),
    "iso-8859-13": ("žąsis „a“", "iso8859-13"),
    "iso-8859-14": ("ŵyth", "iso8859-14"),
    "iso-8859-15": ("œuvre 5 €", "iso8859-15"),
    "iso-8859-16": ("știință €", "iso8859-16"),
    "koi8-r": ("Привет", "koi8-r"),
    "koi8-u": ("їжак", "koi8-u"),
    "macintosh": ("œuvre ƒ", "mac-roman"),
    "windows-874": ("“ไทย”", "cp874"),
    "windows-1250": ("“źdźbło”", "cp1250"),
    "windows-1251": ("“Привет”", "cp1251"),
    "windows-1252": ("“quoted” 5 €", "cp1252"),
    "windows-1253": ("“γειά”", "cp1253"),
    "windows-1254": ("“Türkçe” ğ", "cp1254"),
    "windows-1255": ("“שלום”", "cp1255"),
    "windows-1256": ("“مرحبا”", "cp1256"),
    "windows-1257": ("“žąsis”", "cp1257"),
    "windows-1258": ("“Đ”", "cp1258"),
    "x-mac-cyrillic": ("Привет", "mac-cyrillic"),
    "gbk": ("朱镕基 㐀", "gb18030"),
    "gb18030": ("朱镕基 㐀 😀", "gb18030"),
    "big5": ("圍碁", "big5hkscs"),
    "euc-jp": ("手順", "euc_jp"),
    "iso-2022-jp": ("手順", "iso2022_jp"),
    "shift_jis": ("手順①", "cp932"),
    "euc-kr": ("단어 뷁", "cp949"),
}
"""A text for each encoding of the standard that pages can have, and Python's name of the encoding that it means."""
NOT_OF_PAGES = {"utf-16le", "utf-16be", "x-user-defined", "replacement"}


def page(label: str, body: bytes) -> bytes:
    return b'<!DOCTYPE html><html><head><meta charset="%s"></head><body><p>%s</p>' % (label.encode(), body)


def test_every_encoding_of_the_standard_has_a_sample() -> None:
    assert set(LABELS.values()) == SAMPLES.keys() | NOT_OF_PAGES


@pytest.mark.parametrize("label", [label for label, name in LABELS.items() if name not in NOT_OF_PAGES])
def test_a_page_is_read_by_what_its_label_means(label: str) -> None:
    text, codec = SAMPLES[LABELS[label]]
    assert html.read_html(page(label, text.encode(codec))).text == text


@pytest.mark.parametrize("label", ["utf-16", "utf-16be", "UNICODE", "ucs-2"])
def test_a_page_that_declares_utf_16_in_ascii_is_utf_8(label: str) -> None:
    assert html.read_html(page(label, "naïve".encode())).text == "naïve"


@pytest.mark.parametrize("label", ["iso-2022-kr", "hz-gb-2312", "replacement"])
def test_encodings_that_the_standard_gave_up_are_refused(label: str) -> None:
    with pytest.raises(SluiceError, match=f"'{label}', which the Encoding Standard no longer reads"):
        html.read_html(page(label, b"x"))


def test_characters_of_vendors_are_read_in_euc_jp() -> None:
    assert html.read_html(page("euc-jp", b"\xad\xa1 \xb4\xc1 \xf9\xa1 \xad\x20")).text == "① 漢 纊 �"


@pytest.mark.parametrize(
    ("head", "label"),
    [
        (b"<meta charset=gbk>", "gbk"),
        (b"<META CHARSET = 'gbk' />", "gbk"),
        (b"<meta/charset=gbk>", "gbk"),
        (b"<meta charset=' gbk '>", " gbk "),
        (b"<meta charset=gbk charset=big5>", "gbk"),
        (b"<meta charset=klingon><meta charset=gbk>", "gbk"),
        (b"<meta http-equiv=Content-Type content='text/html; charset=gbk'>", "gbk"),
        (b"<meta content='text/html; charset = \"gbk\"; x=y' http-equiv=content-type>", "gbk"),
        (b"<meta http-equiv=content-type content='charset charset=gbk'>", "gbk"),
        (b"<meta name=description content='charset=gbk in PHP'><meta charset=utf-8>", "utf-8"),
        (b"<!-- <meta charset=gbk> --><meta charset=utf-8>", "utf-8"),
        (b"<!--><meta charset=gbk>-->", "gbk"),
        (b"<meta data-charset=gbk charset=utf-8>", "utf-8"),
        (b"<p title='<meta charset=gbk>'><meta charset=utf-8>", "utf-8"),
        (b"</p title='<meta charset=gbk>'><meta charset=utf-8>", "utf-8"),
        (b"<!x <meta charset=gbk><meta charset=utf-8>", "utf-8"),
        (b"</ <meta charset=gbk><meta charset=utf-8>", "utf-8"),
        (b"<3 <meta charset=gbk>", "gbk"),
        (b"<?xml version='1.0' encoding='gbk'?><html>", "gbk"),
        (b"<?xml version='1.0' encoding='gbk'?><meta charset=utf-8>", "utf-8"),
        (b" <?xml version='1.0' encoding='gbk'?>", ""),
        (b"<meta charset=utf-16le>", "utf-8"),
        (b"<meta charset=x-user-defined>", "windows-1252"),
        (b"<metacharset=gbk>", ""),
        (b"<meta http-equiv=refresh content='charset=gbk'>", ""),
        (b"<meta content='charset=gbk'>", ""),
        (b"<meta http-equiv=content-type content='charset=\"gbk'>", ""),
        (b"<meta charset=gbk", ""),
        (b"<meta x='<meta charset=gbk>", ""),
        (b"<!-- <meta charset=gbk>", ""),
        (b"<meta charset=>", ""),
        ("<?xml ".encode("utf-16-le"), "utf-16le"),
        ("<?xml ".encode("utf-16-be"), "utf-16be"),
    ],
)
def test_a_page_declares_its_encoding_as_the_html_standard_says(head: bytes, label: str) -> None:
    assert find_declaration(head) == label


def test_a_byte_order_mark_counts_for_more_than_the_senders_word_and_that_for_more_than_the_page() -> None:
    gbk = page("utf-8", "文字".encode("gbk"))
    assert html.read_html(gbk, "gbk").text == "文字"
    assert html.read_html(b"\xef\xbb\xbf" + page("gbk", "文字".encode()), "gbk").text == "文字"


def test_a_declaration_after_the_first_kilobyte_counts_where_the_page_is_not_utf_8() -> None:
    comment = b"<!-- %s -->" % (b"x" * 2000)
    assert html.read_html(comment + page("windows-1251", "Привет".encode("cp1251"))).text == "Привет"
    assert html.read_html(comment + page("windows-1251", "Привет".encode())).text == "Привет"


@pytest.mark.parametrize(
    ("content", "encoding", "text"),
    [
        (page("utf-8", "naïve \xff文".encode().replace(b"\xc3\xbf", b"\xff")), "", "naïve �文"),
        (page("gbk", "文字".encode("gbk") + b"\xff"), "", "文字�"),
        (page("utf-8", b"a\0b"), "", "a�b"),
        ("<p>naïve 文".encode() + b"\xff", "", "naïve 文�"),
        (b"<p>caf\xff", "utf-8", "caf�"),
    ],
)
def test_a_bad_byte_of_a_page_is_replaced(content: bytes, encoding: str, text: str) -> None:
    assert html.read_html(content, encoding).text == text


@pytest.mark.parametrize("content", [b"<p>caf\xe9", "<p>Привет".encode("cp1251"), "<p>hi".encode("utf-16-le")])
def test_a_page_that_is_not_utf_8_and_declares_nothing_is_refused(content: bytes) -> None:
    with pytest.raises(SluiceError, match=r"not UTF-8 text: byte .* name another encoding as charset"):
        html.read_html(content)


@pytest.mark.parametrize("format", ["text", "markdown"])
def test_text_is_read_in_the_encoding_that_the_sender_names(format: str) -> None:
    assert sandbox_worker.read_document(format, b"caf\xe9 \x93x\x94", 100, "windows-1252").text == "café “x”"
    assert sandbox_worker.read_document(format, b"\xef\xbb\xbfcaf\xc3\xa9", 100, "windows-1252").text == "café"


def test_a_bad_byte_of_text_is_refused_by_its_offset() -> None:
    with pytest.raises(SluiceError, match="not EUC-KR text: byte 0xff at offset 4") as caught:
        sandbox_worker.read_document("text", "단어".encode("cp949") + b"\xff", 100, "euc-kr")
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, "content")


def test_python_codecs_that_the_standard_does_not_have_are_no_encodings() -> None:
    for label in ("hex", "idna", "punycode", "unicode_escape", "utf-7", "utf-32", "rot13", "cp037", "klingon", ""):
        assert find_encoding(label) == ""
