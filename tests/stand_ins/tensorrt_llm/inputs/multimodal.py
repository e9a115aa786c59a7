"""The output of a processor of images: tensors (bytes here), and hashes that tell images apart in the cache."""

import itertools
from dataclasses import dataclass, field
from typing import Any

SHARED: dict[str, bytes] = {}
"""Shared memory by name: what no worker has opened yet stays."""
_NAMES = itertools.count(1)


@dataclass
class MultimodalInput:
    """One entry an image."""

    multimodal_hashes: list[list[int]]
    multimodal_positions: list[int]
    multimodal_lengths: list[int]


@dataclass
class MultimodalParams:
    """The images of a request on their way to a worker."""

    multimodal_input: MultimodalInput | None = None
    multimodal_data: dict[str, Any] | None = field(default_factory=dict)

    def has_content(self) -> bool:
        return bool(self.multimodal_input or self.multimodal_data)

    def to_handle(self, element: str) -> None:
        """Put the tensors into shared memory."""
        self._change(element, _share)

    def to_tensor(self, element: str) -> None:
        """Take the tensors out of shared memory, which is free then."""
        self._change(element, _open)

    def _change(self, element: str, change: Any) -> None:
        assert element == "multimodal_data"
        images = (self.multimodal_data or {})["image"]
        images["pixel_values"] = [change(each) for each in images["pixel_values"]]


def _share(tensor: bytes) -> dict[str, Any]:
    name = f"stand-in-{next(_NAMES)}"
    SHARED[name] = tensor
    return {"method_key": 2, "storage_handle": name}


def _open(handle: dict[str, Any]) -> bytes:
    return SHARED.pop(handle["storage_handle"])
