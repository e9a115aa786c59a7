"""The images of a conversation: from data: URLs and allowed hosts to files that are images, within bounds."""

import asyncio
import binascii
import ipaddress
import re
import socket
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO

import httpx
from PIL import Image, UnidentifiedImageError

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.pipelines.text.types import ImagePart

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_BYTES = 20 << 20
"""Most bytes of an image's file."""
MAX_PIXELS = 1 << 25
"""Most pixels of an image: 100 MB in memory."""
MAX_TOTAL_PIXELS = 1 << 27
"""Most pixels of all images of a prompt, which the engine has in memory at once."""
FETCH_S = 10.0
"""How long fetching an image may take."""
ANY_DOMAIN = "*"
_OPTION = "--allowed-media-domains"
_DATA_URL = re.compile(r"data:[\w.+/-]*((?:;[\w.=+/-]+)*),", re.IGNORECASE)
_BASE64 = ";base64"
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_NUM_THREADS = 2

Image.MAX_IMAGE_PIXELS = MAX_PIXELS  # Pillow knows the size before it decodes, also of a GIF's frames
warnings.simplefilter("error", Image.DecompressionBombWarning)
_threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="images")


async def load_images(parts: Sequence[ImagePart], domains: Sequence[str]) -> tuple[bytes, ...]:
    """Return the files of the images. URLs are fetched from `domains` alone. Raises INVALID, naming the part."""
    files, num_pixels = [], 0
    for part in parts:
        content, added = await _load(part, domains)
        num_pixels += added
        if num_pixels > MAX_TOTAL_PIXELS:
            raise invalid(part.path, f"{part.path} brings the images to more than {MAX_TOTAL_PIXELS} pixels in all")
        files.append(content)
    return tuple(files)


async def _load(part: ImagePart, domains: Sequence[str]) -> tuple[bytes, int]:
    """Return the file of an image, and its number of pixels."""
    run = asyncio.get_running_loop().run_in_executor
    found = _DATA_URL.match(part.url)
    if found is not None:
        if not found[1].lower().endswith(_BASE64):
            raise invalid(part.path, f"{part.path} must be a data: URL in base64, got one without ;base64")
        return await run(_threads, partial(_decode, part, found.end()))
    content = await _fetch(part, domains)
    return content, await run(_threads, partial(count_pixels, content, part.path))


def _decode(part: ImagePart, start: int) -> tuple[bytes, int]:
    try:
        content = binascii.a2b_base64(part.url[start:], strict_mode=True)
    except ValueError as error:
        raise invalid(part.path, f"{part.path} is not valid base64: {error}") from None
    return content, count_pixels(content, part.path)


def count_pixels(content: bytes, path: str) -> int:
    """Return the number of pixels of an image, which is decoded, so that what reads it next can. Raises INVALID, naming
    `path`."""
    if len(content) > MAX_BYTES:
        raise invalid(path, f"{path} must be an image of at most {MAX_BYTES} bytes, got {len(content)}")
    try:
        with Image.open(BytesIO(content), formats=FORMATS) as image:
            image.load()
            return image.width * image.height
    except UnidentifiedImageError:
        raise invalid(path, f"{path} must be an image in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise invalid(path, f"{path} must be an image of at most {MAX_PIXELS} pixels") from None
    except Exception as error:  # a damaged file can raise anything in the library that reads it
        raise invalid(path, f"{path} is an image that cannot be read: {error}") from None


async def _fetch(part: ImagePart, domains: Sequence[str]) -> bytes:
    url = _parse_url(part, domains)
    try:
        async with asyncio.timeout(FETCH_S):
            return await _get(url, await _public_address(url, part.path, domains), part.path)
    except (httpx.HTTPError, OSError) as error:  # a timeout is an OSError
        reason = str(error) or f"no answer within {FETCH_S:g} s"
        raise invalid(part.path, f"{part.path} cannot be fetched from {url.host}: {reason}") from None


def _parse_url(part: ImagePart, domains: Sequence[str]) -> httpx.URL:
    try:
        url = httpx.URL(part.url)
    except httpx.InvalidURL:
        url = httpx.URL("")
    if url.scheme not in ("http", "https") or not url.host:
        raise invalid(part.path, f"{part.path} must be a data: URL or an http(s) URL, got {part.url[:40]!r}")
    if url.host not in domains and ANY_DOMAIN not in domains:
        what = f"one of {', '.join(domains)}" if domains else "data: URLs alone"
        raise invalid(part.path, f"{part.path} is on {url.host}; this server takes images from {what} ({_OPTION})")
    return url


async def _public_address(url: httpx.URL, path: str, domains: Sequence[str]) -> str:
    """Return an address of the URL's host: a public one, unless the operator listed the address itself. The request
    goes to this very address, so that a name cannot mean another one by then."""
    port = url.port or {"http": 80, "https": 443}[url.scheme]
    found = await asyncio.get_running_loop().getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
    address = str(found[0][4][0])
    if not _is_public(address.partition("%")[0]) and not (url.host == address and address in domains):
        message = f"{path} is on {url.host}, which is not on the public internet; list its address in {_OPTION}"
        raise invalid(path, message)
    return address


def _is_public(text: str) -> bool:
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):  # some stand for addresses of IPv4
        last = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else None
        address = address.ipv4_mapped or address.sixtofour or last or address
    return address.is_global and not address.is_multicast


async def _get(url: httpx.URL, address: str, path: str) -> bytes:
    """Redirects are not followed, since they may lead anywhere."""
    headers, extensions = {"host": url.netloc.decode()}, {"sni_hostname": url.host}
    content = bytearray()
    async with (
        httpx.AsyncClient(trust_env=False, timeout=FETCH_S) as client,
        client.stream("GET", url.copy_with(host=address), headers=headers, extensions=extensions) as response,
    ):
        if response.status_code != httpx.codes.OK:
            raise SluiceError(
                ErrorCode.INVALID, f"{path} cannot be fetched: {url.host} answers {response.status_code}", param=path
            )
        async for piece in response.aiter_bytes():
            content += piece
            if len(content) > MAX_BYTES:
                raise invalid(path, f"{path} must be an image of at most {MAX_BYTES} bytes, got more")
    return bytes(content)
