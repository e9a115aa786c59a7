"""Images of requests: what is taken, from where, and the names of the fields in refusals."""

import asyncio
import base64
import io
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from PIL import Image

from sluice.errors import SluiceError
from sluice.pipelines.text.images import MAX_BYTES, load_images
from sluice.pipelines.text.types import ImagePart

PATH = "messages[0].content[1].image_url"


def make_image(size: tuple[int, int] = (3, 2), kind: str = "PNG", mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, kind)
    return buffer.getvalue()


def data_url(content: bytes, head: str = "data:image/png;base64,") -> str:
    return head + base64.b64encode(content).decode()


async def load(url: str, *domains: str) -> bytes:
    [content] = await load_images([ImagePart(url, PATH)], domains)
    return content


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
async def test_images_come_as_they_are(kind: str) -> None:
    content = make_image(kind=kind)
    for head in ("data:image/png;base64,", "data:;base64,", "DATA:image/png;charset=utf-8;BASE64,"):
        assert await load(data_url(content, head)) == content


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png,abc", "must be a data: URL in base64"),
        ("data:image/png;base64,@", "is not valid base64"),
        (data_url(b""), "must be an image in PNG, JPEG, WEBP or GIF"),
        (data_url(make_image(kind="BMP")), "must be an image in PNG, JPEG, WEBP or GIF"),
        (data_url(make_image((99, 99))[:-40]), "is an image that cannot be read"),
        (data_url(bytes(MAX_BYTES + 1)), f"must be an image of at most {MAX_BYTES} bytes, got {MAX_BYTES + 1}"),
        (data_url(make_image((6000, 6000), mode="1")), "must be an image of at most 33554432 pixels"),
        (data_url(make_image((9000, 9000), mode="1")), "must be an image of at most 33554432 pixels"),
        ("", "must be a data: URL or an http(s) URL, got ''"),
        ("file:///etc/passwd", "must be a data: URL or an http(s) URL"),
        ("ftp://allowed.example/x", "must be a data: URL or an http(s) URL"),
        ("https://", "must be a data: URL or an http(s) URL"),
        ("http://other.example/x", "is on other.example; this server takes images from one of allowed.example"),
        ("http://allowed.example@other.example/x", "is on other.example; this server"),
    ],
)
async def test_refused(url: str, words: str) -> None:
    with pytest.raises(SluiceError) as caught:
        await load(url, "allowed.example")
    assert caught.value.message.startswith(f"{PATH} ")
    assert words in caught.value.message
    assert caught.value.param == PATH


async def test_the_images_of_a_prompt_have_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.pipelines.text.images.MAX_TOTAL_PIXELS", 2 * 3 * 2)
    parts = [ImagePart(data_url(make_image((3, 2))), f"images[{number}]") for number in range(3)]
    assert len(await load_images(parts[:2], ())) == 2
    with pytest.raises(SluiceError, match=r"^images\[2\] brings the images to more than 12 pixels in all"):
        await load_images(parts, ())


@asynccontextmanager
async def http_server(answer: bytes) -> AsyncIterator[int]:
    """Answers every request so; yields its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        writer.close()

    requests: list[bytes] = []
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
    assert all(b"Host: " in each or b"host: " in each for each in requests)


def http_answer(content: bytes, status: str = "200 OK", head: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\n{head}Connection: close\r\n\r\n".encode() + content


async def test_an_image_is_fetched_from_an_address_that_the_operator_listed() -> None:
    content = make_image()
    async with http_server(http_answer(content)) as port:
        assert await load(f"http://127.0.0.1:{port}/x.png", "127.0.0.1") == content


@pytest.mark.parametrize(
    ("host", "domains", "answer", "words"),
    [
        ("127.0.0.1", ("*",), b"", "is on 127.0.0.1, which is not on the public internet"),
        ("localhost", ("localhost",), b"", "is on localhost, which is not on the public internet"),
        ("[::ffff:127.0.0.1]", ("*",), b"", "which is not on the public internet"),
        ("[64:ff9b::7f00:1]", ("*",), b"", "which is not on the public internet"),
        ("127.0.0.1", ("127.0.0.1",), http_answer(b"", "302 Found", "Location: /y\r\n"), "127.0.0.1 answers 302"),
        ("127.0.0.1", ("127.0.0.1",), http_answer(bytes(MAX_BYTES + 1)), f"at most {MAX_BYTES} bytes, got more"),
        ("127.0.0.1", ("127.0.0.1",), http_answer(b"<html>"), "must be an image in PNG"),
        ("127.0.0.1", ("127.0.0.1",), b"", "cannot be fetched from 127.0.0.1"),
    ],
)
async def test_refused_hosts_and_answers(host: str, domains: tuple[str, ...], answer: bytes, words: str) -> None:
    async with http_server(answer) as port:
        with pytest.raises(SluiceError) as caught:
            await load(f"http://{host}:{port}/x.png", *domains)
    assert words in caught.value.message
    assert caught.value.param == PATH


async def test_a_host_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.pipelines.text.images.FETCH_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/x.png"
        with pytest.raises(SluiceError, match=r"cannot be fetched from 127\.0\.0\.1: no answer within 0\.1 s"):
            await load(url, "127.0.0.1")
