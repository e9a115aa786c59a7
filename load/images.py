"""Images for requests: PNGs of random blocks, no two alike, so that no cache of the server knows them."""

import base64
import io

import numpy as np

from sluice.load.config import LoadConfigError

BLOCK = 16
"""Pixels of a side of a block. Noise by the pixel would make files several times as large as a photograph's."""


def draw_images(rng: np.random.Generator, number: int, size: tuple[int, int]) -> tuple[str, ...]:
    """Draw PNG images of `size` (width, height), in base64."""
    return tuple(_draw(rng, size) for _ in range(number))


def _draw(rng: np.random.Generator, size: tuple[int, int]) -> str:
    try:
        from PIL import Image  # only here: runs without images need not wait for it
    except ImportError as error:
        raise LoadConfigError(f"--images needs Pillow ({error}): pip install 'sluice[images]'") from None

    width, height = (-(-each // BLOCK) for each in size)
    blocks = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
    whole = blocks.resize((width * BLOCK, height * BLOCK), Image.Resampling.NEAREST).crop((0, 0, *size))
    file = io.BytesIO()
    whole.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def image_size(text: str) -> tuple[int, int]:
    """Parse a size: `640x480`. Raises LoadConfigError."""
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and int(width) > 0 and int(height) > 0):
        raise LoadConfigError(f"{text!r}: write the size of an image as WIDTHxHEIGHT, e.g. 640x480")
    return int(width), int(height)
