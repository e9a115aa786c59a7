"""LoRA adapters: which folders, under which names, and what TensorRT-LLM has to know of them before it starts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.delegated.tensorrt_llm.configuration.wishes import Strength, Wishes
from engine.delegated.tensorrt_llm.folder import ModelFolder
from sluice.errors import ErrorCode, SluiceError, invalid

_LORA = "lora_config"
_RANK = f"{_LORA}.max_lora_rank"
_MODULES = f"{_LORA}.lora_target_modules"
_CONFIG_FILE = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

_MODULE_NAMES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_dense",
    "gate_proj": "mlp_h_to_4h",
    "down_proj": "mlp_4h_to_h",
    "up_proj": "mlp_gate",
    "gate_up_proj": "mlp_gate_up",
    "w1": "moe_h_to_4h",
    "w2": "moe_4h_to_h",
    "w3": "moe_gate",
    "gate": "moe_router",
}
"""HuggingFace's names of modules and TensorRT-LLM's."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """What an adapter's adapter_config.json tells."""

    rank: int
    modules: tuple[str, ...] | None
    """Its target_modules; None where they are a pattern."""


def find_adapters(modules: Mapping[str, str], folders: Iterable[str]) -> dict[str, str]:
    """Folders of adapters by name: those of `modules`, and those in `folders`, whose own names are theirs.

    Raises SluiceError NOT_FOUND for a folder that is not there, INVALID for one without adapters and for two of one
    name.
    """
    found = dict(modules)
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise SluiceError(ErrorCode.NOT_FOUND, f"lora_dir: there is no folder {folder}", param="lora_dir")
        inside = [folder] if (folder / _CONFIG_FILE).is_file() else _adapters_in(folder)
        if not inside:
            message = f"lora_dir: neither {folder} nor a folder in it has an {_CONFIG_FILE}, as an adapter has"
            raise invalid("lora_dir", message)
        for each in inside:
            if found.setdefault(each.name, str(each)) != str(each):
                message = f"two adapters are called {each.name}: {found[each.name]} and {each}"
                raise invalid("lora_dir", message)
    return found


def _adapters_in(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob(f"*/{_CONFIG_FILE}"))


def read_adapter(name: str, folder: Path) -> Adapter:
    """Raises SluiceError NOT_FOUND or INVALID with what is missing in the folder."""
    try:
        told = msgspec.json.decode((folder / _CONFIG_FILE).read_bytes(), type=dict[str, Any])
    except (FileNotFoundError, NotADirectoryError) as error:
        message = f"LoRA adapter {name}: {folder} has no {_CONFIG_FILE}; it must be a folder that PEFT wrote"
        raise SluiceError(ErrorCode.NOT_FOUND, message, param="lora_modules") from error
    except msgspec.DecodeError as error:
        raise _invalid(name, f"{folder / _CONFIG_FILE} is not a JSON object: {error}") from error
    if not any((folder / file).is_file() for file in _WEIGHTS):
        raise _invalid(name, f"{folder} has no weights; it must have {' or '.join(_WEIGHTS)}")
    ranks = [told.get("r"), *(told.get("rank_pattern") or {}).values()]
    if not all(type(rank) is int and rank > 0 for rank in ranks):
        raise _invalid(name, f"{folder / _CONFIG_FILE}: r must be a whole number of 1 or more, got {told.get('r')!r}")
    modules = told.get("target_modules")
    return Adapter(max(ranks), tuple(modules) if isinstance(modules, list) else None)


def _invalid(name: str, reason: str) -> SluiceError:
    return invalid("lora_modules", f"LoRA adapter {name}: {reason}")


def resolve(wishes: Wishes, adapters: Mapping[str, str], folder: ModelFolder, *, is_engine: bool) -> None:
    """Wish for what the adapters need. Raises SluiceError INVALID where model or settings have no room for them."""
    if not adapters and not wishes.within(_LORA):
        return
    _check_engine(folder)
    wishes.add("enable_lora", True, "lora_modules", Strength.DEFAULT)
    if not adapters or wishes.get(f"{_LORA}.lora_ckpt_source") == "nemo":
        return
    read = {name: read_adapter(name, Path(path)) for name, path in adapters.items()}
    _wish_for_rank(wishes, read)
    if not is_engine:
        wishes.add(f"{_LORA}.lora_dir", list(adapters.values()), "lora_modules", Strength.DEFAULT)
        _wish_for_modules(wishes, read)


def _check_engine(folder: ModelFolder) -> None:
    """An engine has room for adapters only where it was compiled so."""
    if folder.build_config is None:
        return
    plugins = folder.build_config.get("plugin_config")
    if isinstance(plugins, Mapping) and not plugins.get("lora_plugin"):
        raise invalid(
            "lora_modules",
            f"{folder.path} was compiled without LoRA; compile it with trtllm-build --lora_plugin auto, or serve the "
            "HuggingFace checkpoint",
        )


def _wish_for_rank(wishes: Wishes, adapters: Mapping[str, Adapter]) -> None:
    name, largest = max(adapters.items(), key=lambda item: item[1].rank)
    if wishes.is_asked(_RANK) and wishes.get(_RANK) < largest.rank:
        raise invalid(
            wishes.origin(_RANK),
            f"max_lora_rank must be at least {largest.rank}, the rank of adapter {name}, got {wishes.get(_RANK)}",
        )
    wishes.add(_RANK, largest.rank, "lora_modules", Strength.DEFAULT)


def _wish_for_modules(wishes: Wishes, adapters: Mapping[str, Adapter]) -> None:
    """TensorRT-LLM finds them out for one adapter, and must be told those of several."""
    if wishes.is_asked(_MODULES) or len(adapters) == 1:
        return
    modules: dict[str, None] = {}
    for name, adapter in adapters.items():
        unknown = [each for each in adapter.modules or () if each not in _MODULE_NAMES]
        if adapter.modules is None or unknown:
            what = f"modules that have no name here ({', '.join(unknown)})" if unknown else "modules by a pattern"
            raise _invalid(name, f"it changes {what}; give the setting lora_target_modules")
        modules |= dict.fromkeys(_MODULE_NAMES[each] for each in adapter.modules)
    wishes.add(_MODULES, list(modules), "lora_modules", Strength.DEFAULT)
