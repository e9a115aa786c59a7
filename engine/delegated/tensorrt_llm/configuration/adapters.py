"""LoRA adapters: which folders, under which names, and what TensorRT-LLM has to know of them before it starts."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from engine.delegated.tensorrt_llm.configuration.arguments import Resolution
from engine.delegated.tensorrt_llm.folder import LlmFolder
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


class LoraAdapter(NamedTuple):
    """The facts of an adapter_config.json."""

    rank: int
    modules: tuple[str, ...] | None
    """Its target_modules; None where they are a pattern."""


def resolve_adapters(resolution: Resolution, folders: Iterable[str]) -> dict[str, str]:
    """Return the adapters' folders by name, and add the arguments that they need. `folders` are those of `lora_dir`.
    Raises NOT_FOUND or INVALID for folders that cannot be used, and where model or settings have no room."""
    arguments = resolution.arguments
    adapters = _find_adapters(resolution.config.lora_modules, folders)
    if not adapters and not arguments.within(_LORA):
        return adapters
    _check_engine(resolution.folder)
    arguments.add_default("enable_lora", True, "lora_modules")
    if not adapters or arguments.get(f"{_LORA}.lora_ckpt_source") == "nemo":
        return adapters
    read = {name: _read_adapter(name, Path(path)) for name, path in adapters.items()}
    _resolve_rank(resolution, read)
    if not resolution.is_engine:
        arguments.add_default(f"{_LORA}.lora_dir", list(adapters.values()), "lora_modules")
        _resolve_modules(resolution, read)
    return adapters


def _find_adapters(modules: Mapping[str, str], folders: Iterable[str]) -> dict[str, str]:
    """Return folders by name: those of `modules`, and those in `folders`, which are called as they are."""
    found = dict(modules)
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise SluiceError(ErrorCode.NOT_FOUND, f"lora_dir: there is no folder {folder}", param="lora_dir")
        is_adapter = (folder / _CONFIG_FILE).is_file()
        adapters = [folder] if is_adapter else sorted(path.parent for path in folder.glob(f"*/{_CONFIG_FILE}"))
        if not adapters:
            message = f"lora_dir: neither {folder} nor a folder in it has an {_CONFIG_FILE}, as an adapter has"
            raise invalid("lora_dir", message)
        for each in adapters:
            if found.setdefault(each.name, str(each)) != str(each):
                message = f"two adapters are called {each.name}: {found[each.name]} and {each}"
                raise invalid("lora_dir", message)
    return found


def _read_adapter(name: str, folder: Path) -> LoraAdapter:
    file = folder / _CONFIG_FILE
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (FileNotFoundError, NotADirectoryError) as error:
        message = f"LoRA adapter {name}: {folder} has no {_CONFIG_FILE}; it must be a folder that PEFT wrote"
        raise SluiceError(ErrorCode.NOT_FOUND, message, param="lora_modules") from error
    except (ValueError, RecursionError) as error:
        raise _invalid(name, f"{file} is not a JSON object: {error}") from error
    if not any((folder / weights).is_file() for weights in _WEIGHTS):
        raise _invalid(name, f"{folder} has no weights; it must have {' or '.join(_WEIGHTS)}")
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    if not all(type(rank) is int and rank > 0 for rank in ranks):
        raise _invalid(name, f"{file}: r must be a whole number of 1 or more, got {config.get('r')!r}")
    modules = config.get("target_modules")
    return LoraAdapter(max(ranks), tuple(modules) if isinstance(modules, list) else None)


def _invalid(name: str, reason: str) -> SluiceError:
    return invalid("lora_modules", f"LoRA adapter {name}: {reason}")


def _check_engine(folder: LlmFolder) -> None:
    """Raise INVALID for an engine that was compiled without room for adapters."""
    plugins = (folder.build_config or {}).get("plugin_config")
    if isinstance(plugins, Mapping) and not plugins.get("lora_plugin"):
        raise invalid(
            "lora_modules",
            f"{folder.path} was compiled without LoRA; compile it with trtllm-build --lora_plugin auto, or serve the "
            "HuggingFace checkpoint",
        )


def _resolve_rank(resolution: Resolution, adapters: Mapping[str, LoraAdapter]) -> None:
    arguments = resolution.arguments
    name, largest = max(adapters.items(), key=lambda item: item[1].rank)
    if arguments.is_given(_RANK) and arguments.get(_RANK) < largest.rank:
        least = f"max_lora_rank must be at least {largest.rank}, the rank of adapter {name}"
        raise invalid(arguments.origin(_RANK), f"{least}, got {arguments.get(_RANK)}")
    arguments.add_default(_RANK, largest.rank, "lora_modules")


def _resolve_modules(resolution: Resolution, adapters: Mapping[str, LoraAdapter]) -> None:
    """TensorRT-LLM finds the modules of one adapter out itself, and must be given those of several."""
    if resolution.arguments.is_given(_MODULES) or len(adapters) == 1:
        return
    modules: dict[str, None] = {}
    for name, adapter in adapters.items():
        unknown = [each for each in adapter.modules or () if each not in _MODULE_NAMES]
        if adapter.modules is None or unknown:
            what = f"modules that have no name here ({', '.join(unknown)})" if unknown else "modules by a pattern"
            raise _invalid(name, f"it changes {what}; give the setting lora_target_modules")
        modules |= dict.fromkeys(_MODULE_NAMES[each] for each in adapter.modules)
    resolution.arguments.add_default(_MODULES, list(modules), "lora_modules")
