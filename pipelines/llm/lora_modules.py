"""LoRA adapters by name, as a parameter or vLLM's `multi_lora.json` has them."""

from pathlib import Path

import msgspec

from sluice.errors import invalid

FILE = "multi_lora.json"
"""Where Triton's vLLM backend has them, in the version's folder."""


def lora_modules(text: str) -> dict[str, str]:
    """Folders by name, from `NAME=FOLDER,NAME=FOLDER` or a JSON object. Raises ValueError with what it must be."""
    if text.lstrip().startswith("{"):
        try:
            return msgspec.json.decode(text, type=dict[str, str])
        except msgspec.DecodeError as error:
            raise ValueError(f"must be a JSON object of folders by name ({error})") from None
    found: dict[str, str] = {}
    for part in text.split(","):
        name, _, folder = (each.strip() for each in part.partition("="))
        if not name or not folder or name in found:
            raise ValueError("must be names of adapters with their folders, such as sql=/loras/sql,chat=/loras/chat")
        found[name] = folder
    return found


def read_lora_file(version_folder: Path) -> str | None:
    """The text of `multi_lora.json`; None where there is none. Raises SluiceError INVALID for one that is no such."""
    path = version_folder / FILE
    if not path.is_file():
        return None
    text = path.read_text("utf-8", errors="replace")
    try:
        lora_modules(text)
    except ValueError as error:
        raise invalid("lora_modules", f"{path} {error}") from None
    return text
