"""LoRA adapters: read with the first request of their number, and kept for good."""

import json
import re
from pathlib import Path
from typing import Any

_KEY = re.compile(r".*\.\d+\.\w+\.(\w+\.)*(\w+)\.lora_(A|B)\.weight")


class LoopError(Exception):
    """A failure in the loop of the executor, which ends with it."""


class LoraManager:
    """The adapters that a worker has read."""

    def __init__(self, args: Any) -> None:
        self._config = args.lora_config
        self.is_enabled = bool(args.enable_lora or args.lora_config)
        self._known: set[int] = set()

    def load(self, request: Any) -> None:
        """Raises what is wrong with the files; LoopError where the loop finds it."""
        if request.adapter_id in self._known:
            return
        folder = Path(request.path)
        config = json.loads((folder / "adapter_config.json").read_text())
        rank = max(_ranks(folder / "adapter_model.safetensors"))
        _ = config["r"], config["lora_alpha"]
        if rank > (self._config.max_lora_rank if self._config else 64):
            raise LoopError(f"Assertion failed: Invalid low_rank ({rank})")
        self._known.add(request.adapter_id)


def _ranks(path: Path) -> list[int]:
    """Return the rank of each module. Weights of others are passed over with a warning."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    found: dict[str, dict[str, list[int]]] = {}
    for key, entry in header.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise KeyError(f"unsupported key {key} from HF LoRA weights")
        found.setdefault(key.rpartition(".lora_")[0], {})[match[3]] = entry["shape"]
    if any(len(sides) != 2 for sides in found.values()):
        raise ValueError("LoRA adapters must contain both 'in' and 'out' matrices for all layers")
    return [sides["A"][0] for sides in found.values()]
