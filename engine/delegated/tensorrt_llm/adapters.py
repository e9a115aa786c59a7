"""LoRA adapters: those of the start, room for those that come at run time, what is checked of each, and their numbers.

TensorRT-LLM reads an adapter with the first request that names it, and knows it by its number from then on: it reads it
no second time, forgets none, and shares KV blocks between requests of one number alone. Weights that it has no place
for it leaves out without an error, and what does not fit may end its loop. So those that come later are checked whole
before it sees them.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from sluice.engine.delegated.tensorrt_llm.configuration.arguments import ArgumentSet, Resolution
from sluice.engine.delegated.tensorrt_llm.folder import LlmFolder
from sluice.engine.delegated.tensorrt_llm.library import TensorRtLlmLibrary
from sluice.engine.model_folder import read_json
from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.files import files_digest

_LORA = "lora_config"
_RANK, _MODULES = f"{_LORA}.max_lora_rank", f"{_LORA}.lora_target_modules"
_FLAG = "--allow-runtime-lora-updating"
_CONFIG_FILE = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_RUN_TIME_RANK = 64
"""The library's own default."""
# fmt: off
MODULE_NAMES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_dense",
    "gate_proj": "mlp_h_to_4h", "down_proj": "mlp_4h_to_h", "up_proj": "mlp_gate", "gate_up_proj": "mlp_gate_up",
    "w1": "moe_h_to_4h", "w2": "moe_4h_to_h", "w3": "moe_gate", "gate": "moe_router",
}
# fmt: on
"""HuggingFace's names of modules and TensorRT-LLM's."""
_READS_HIDDEN = ("attn_q", "attn_k", "attn_v", "mlp_h_to_4h", "mlp_gate")
_WRITES_HIDDEN = ("attn_dense", "mlp_4h_to_h")
_RUN_TIME_MODULES = _READS_HIDDEN + _WRITES_HIDDEN
"""Modules of dense models, those that take the hidden state and those that give it."""
_TENSOR = re.compile(r"(?P<place>.+\.(?P<layer>\d+)\.\w+\.(?P<module>[\w.]+))\.lora_(?P<side>[AB])\.weight")
"""The names that TensorRT-LLM reads; others it refuses or leaves out."""


# -- those of the start


def resolve_adapters(resolution: Resolution, folders: Iterable[str]) -> dict[str, str]:
    """Return the adapters' folders by name, and add the arguments that they, and those to come, need. `folders` are
    those of `lora_dir`. Raises NOT_FOUND or INVALID for folders that cannot be used, and where model or settings have
    no room."""
    arguments = resolution.arguments
    adapters = _find_adapters(resolution.config.lora_modules, folders)
    is_nemo = arguments.get(f"{_LORA}.lora_ckpt_source") == "nemo"
    if adapters or arguments.within(_LORA):
        if resolution.folder.plugins and not resolution.folder.plugins.get("lora_plugin"):
            raise invalid(
                "lora_modules",
                f"{resolution.folder.path} was compiled without LoRA; compile it with trtllm-build --lora_plugin auto, "
                "or serve the HuggingFace checkpoint",
            )
        arguments.add_default("enable_lora", True, "lora_modules")
    if adapters and not is_nemo:
        _fit(resolution, adapters)
    if resolution.config.enable_lora and not is_nemo:
        _make_room(resolution, adapters)
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


def _fit(resolution: Resolution, adapters: Mapping[str, str]) -> None:
    """Add the rank and the modules of adapters. TensorRT-LLM finds the modules of one adapter out itself, and must be
    given those of several."""
    arguments = resolution.arguments
    told = {name: _read_told(name, Path(path)) for name, path in adapters.items()}
    name, (largest, _) = max(told.items(), key=lambda item: item[1][0])
    if arguments.is_given(_RANK) and arguments.get(_RANK) < largest:
        least = f"max_lora_rank must be at least {largest}, the rank of adapter {name}"
        raise invalid(arguments.origin(_RANK), f"{least}, got {arguments.get(_RANK)}")
    arguments.add_default(_RANK, largest, "lora_modules")
    if resolution.is_engine:
        return
    arguments.add_default(f"{_LORA}.lora_dir", list(adapters.values()), "lora_modules")
    if arguments.is_given(_MODULES) or len(told) == 1:
        return
    names: dict[str, None] = {}
    for name, (_, modules) in told.items():
        unknown = [each for each in modules or () if each not in MODULE_NAMES]
        if modules is None or unknown:
            what = f"modules that have no name here ({', '.join(unknown)})" if unknown else "modules by a pattern"
            raise _of(name, "lora_modules", f"it changes {what}; give the setting lora_target_modules")
        names |= dict.fromkeys(MODULE_NAMES[each] for each in modules)
    arguments.add_default(_MODULES, list(names), "lora_modules")


def _read_told(name: str, folder: Path) -> tuple[int, list[str] | None]:
    """Return the rank and the modules, None where they are a pattern, that PEFT wrote into an adapter's folder. Raises
    NOT_FOUND or INVALID with what is missing or wrong."""
    file = folder / _CONFIG_FILE
    if not file.is_file():
        message = f"{folder} has no {_CONFIG_FILE}; it must be a folder that PEFT wrote"
        raise _of(name, "lora_modules", message, ErrorCode.NOT_FOUND)
    try:
        config = read_json(file)
    except SluiceError as error:
        raise _of(name, "lora_modules", error.message) from error
    if not any((folder / weights).is_file() for weights in _WEIGHTS):
        raise _of(name, "lora_modules", f"{folder} has no weights; it must have {' or '.join(_WEIGHTS)}")
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    if not all(type(rank) is int and rank > 0 for rank in ranks):
        message = f"{file}: r must be a whole number of 1 or more, got {config.get('r')!r}"
        raise _of(name, "lora_modules", message)
    modules = config.get("target_modules")
    return max(ranks), modules if isinstance(modules, list) else None


def _of(name: str, param: str, message: str, code: ErrorCode = ErrorCode.INVALID) -> SluiceError:
    return SluiceError(code, f"LoRA adapter {name}: {message}", param=param)


# -- room for those to come


@dataclass(frozen=True, slots=True)
class LoraRoom:
    """The adapters that a loaded model has room for."""

    max_rank: int
    modules: frozenset[str]
    names: Mapping[str, str]
    """TensorRT-LLM's names of modules by those of the checkpoint."""
    folder: LlmFolder

    def check(self, name: str, path: str) -> None:
        """Raise SluiceError for an adapter that cannot be used with this model, or not as a whole."""
        rank, modules = read_facts(name, path, self.names, self.folder)
        if rank > self.max_rank:
            message = f"its rank must be at most {self.max_rank}, got {rank}; the setting max_lora_rank raises it"
            raise _of(name, "lora_path", message)
        if others := modules - self.modules:
            message = f"it changes {_listed(others)}, and the model was started with room for {_listed(self.modules)}"
            hint = "the setting lora_config.lora_target_modules adds them"
            raise _of(name, "lora_path", f"{message}; {hint}")


def _make_room(resolution: Resolution, adapters: Mapping[str, str]) -> None:
    """Add the arguments that leave room for adapters at run time; `adapters` are those of the start. A compiled engine
    has the room that it was built with."""
    arguments = resolution.arguments
    if resolution.is_engine:
        if (built := _built_lora(resolution.folder)) is not None:
            arguments.add_default("enable_lora", True, _FLAG)
            _widen(arguments, _RANK, built.get("max_lora_rank") or _RUN_TIME_RANK)
        return
    names = _names(arguments.get("lora_config.trtllm_modules_to_hf_modules"))
    facts = [read_facts(name, path, names, resolution.folder) for name, path in adapters.items()]
    arguments.add_default("enable_lora", True, _FLAG)
    _widen(arguments, _RANK, max([_RUN_TIME_RANK, *(rank for rank, _ in facts)]))
    _widen(arguments, _MODULES, sorted({*_RUN_TIME_MODULES}.union(*(modules for _, modules in facts))))
    room = LoraRoom(arguments.whole_number(_RANK), frozenset(arguments.get(_MODULES)), names, resolution.folder)
    for name, path in adapters.items():
        room.check(name, path)


def find_room(arguments: Mapping[str, Any], folder: LlmFolder) -> LoraRoom | None:
    """Return the room of a model that was started with these arguments; None without it."""
    config, built = arguments.get("lora_config"), _built_lora(folder)
    if not arguments.get("enable_lora") or config is None or getattr(config, "lora_ckpt_source", "hf") != "hf":
        return None
    modules = (built or {}).get("lora_target_modules") or config.lora_target_modules
    names = _names(config.trtllm_modules_to_hf_modules)
    return LoraRoom(config.max_lora_rank, frozenset(modules), names, folder) if modules else None


def _built_lora(folder: LlmFolder) -> Mapping[str, Any] | None:
    """Return how an engine was compiled for adapters; None for one that was not, and for other models."""
    build: Mapping[str, Any] = folder.build_config or {}
    return build.get("lora_config") or {} if (build.get("plugin_config") or {}).get("lora_plugin") else None


def _widen(arguments: ArgumentSet, target: str, value: Any) -> None:
    """Put `value` in the place of a default."""
    arguments.add_default(target, arguments.get(target, value), _FLAG)
    if not arguments.is_given(target):
        arguments.replace(target, value)


def _names(mapping: Mapping[str, str | list[str]] | None) -> Mapping[str, str]:
    """Return the library's names by the checkpoint's, of a mapping the other way round, or the usual ones."""
    lists = {name: [found] if isinstance(found, str) else found for name, found in (mapping or {}).items()}
    return {theirs: name for name, found in lists.items() for theirs in found} or MODULE_NAMES


# -- what is checked


def read_facts(name: str, path: str, names: Mapping[str, str], model: LlmFolder) -> tuple[int, frozenset[str]]:
    """Return the rank of an adapter and the library's names of its modules, of its configuration and the shapes of its
    matrices. Raises SluiceError for one that is damaged, is not LoRA alone or is of another model."""
    try:
        return _read_facts(Path(path), names, model)
    except SluiceError as error:
        raise _of(name, "lora_path", error.message, error.code) from error


def _read_facts(folder: Path, names: Mapping[str, str], model: LlmFolder) -> tuple[int, frozenset[str]]:
    # It needs safetensors, which comes with TensorRT-LLM, and a start without adapters does not.
    from sluice.engine.models.weights.lora import CONFIG_FILE, find_weights, read_config
    from sluice.engine.models.weights.mapped import map_tensors

    config, path = read_config(folder / CONFIG_FILE), find_weights(folder)
    for field in ("r", "lora_alpha"):
        if not isinstance(value := config.get(field), int | float) or not value > 0:
            raise invalid("lora_path", f"{folder / CONFIG_FILE}: {field} must be a number above 0, got {value!r}")
    if config.get("alpha_pattern"):
        message = f"{folder / CONFIG_FILE}: alpha_pattern must not be set: TensorRT-LLM scales all modules alike"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, message)
    pairs: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {}
    for tensor_name, tensor in map_tensors(path).items():
        found = _TENSOR.fullmatch(tensor_name)
        module = None if found is None else names.get(_leaf(found["module"]))
        if found is None or module is None:
            message = f"{path}: TensorRT-LLM has no place for {tensor_name}; it takes lora_A and lora_B of"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, f"{message} {_listed(names)}")
        if model.num_layers is not None and int(found["layer"]) >= model.num_layers:
            raise invalid("lora_path", f"{path}: {tensor_name} is of a layer beyond the model's {model.num_layers}")
        pairs.setdefault((found["place"], module), {})[found["side"]] = tensor.shape
    if not pairs:
        raise invalid("lora_path", f"{path} has no tensors")
    ranks = {_check_pair(path, place, module, sides, model.hidden_size) for (place, module), sides in pairs.items()}
    return max(ranks), frozenset(module for _, module in pairs)


def _check_pair(path: Path, place: str, module: str, sides: Mapping[str, tuple[int, ...]], hidden: int | None) -> int:
    """Return the rank of two matrices."""
    match sides.get("A"), sides.get("B"):
        case (int(rank), int(num_in)), (int(num_out), int(other)) if rank == other > 0:
            num = num_in if module in _READS_HIDDEN else num_out if module in _WRITES_HIDDEN else hidden
            if hidden in (None, num):
                return rank
    expected = f"[rank, in] and [out, rank] of a model with hidden_size {hidden}"
    message = f"{path}: lora_A and lora_B of {place} must be {expected}, got {sides.get('A')} and {sides.get('B')}"
    raise invalid("lora_path", message)


def _leaf(module: str) -> str:
    """Return the last part of a module's name, by which it is known; not that of a shared expert."""
    return module if "shared_expert" in module else module.rpartition(".")[2]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


# -- while it serves


class Adapters:
    """The adapters that requests may name."""

    def __init__(self, library: TensorRtLlmLibrary, folders: Mapping[str, str], room: LoraRoom | None) -> None:
        """`folders` are those of the start, by name. Without `room` they stay as they are."""
        self._library = library
        self._room = room
        self._fresh = count(1)
        self._numbers: dict[str, int] = {}
        """By digest: the same files keep their number, and so the blocks and the weights that the library has."""
        self._requests: dict[str, Any] = {}
        self.digests: dict[str, str] = {}
        """As `EngineInfo.adapter_digests`."""
        for name, path in sorted(folders.items()):
            self._add(name, *self._identify(name, path))

    def request(self, name: str) -> Any:
        """Return the library's request for an adapter. Whoever has it goes on when the name means another."""
        return self._requests[name]

    def name_of(self, number: int) -> str:
        """Return the name under which requests have the adapter of a number now."""
        return next((name for name, made in self._requests.items() if made.lora_int_id == number), f"adapter {number}")

    async def load(self, name: str, path: str, prove: Callable[[Any], Awaitable[None]]) -> None:
        """See `DelegatedRuntime.load_adapter`. `prove` generates a token with the library's request."""
        if self._room is None:
            message = f"this model was started without room for LoRA adapters; {_FLAG} makes it, and --lora_plugin auto"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, f"{message} where an engine is compiled", param="lora_name")
        await asyncio.to_thread(self._room.check, name, path)
        made, digest = await asyncio.to_thread(self._identify, name, path)
        try:
            await prove(made)
        except TimeoutError:
            message = f"LoRA adapter {name}: no token came with it; try again when fewer requests run"
            raise SluiceError(ErrorCode.UNAVAILABLE, message, param="lora_path") from None
        except SluiceError as error:
            raise invalid("lora_path", f"TensorRT-LLM does not take LoRA adapter {name} in {path}: {error}") from error
        self._add(name, made, digest)

    def unload(self, name: str) -> None:
        """The library keeps its weights in the host's memory."""
        del self._requests[name], self.digests[name]

    def _identify(self, name: str, path: str) -> tuple[Any, str]:
        digest = files_digest(Path(path)) or path
        return self._library.lora_request(name, self._numbers.get(digest) or next(self._fresh), path), digest

    def _add(self, name: str, made: Any, digest: str) -> None:
        """A number that failed is used for nothing else: the library may know half of it."""
        self._numbers[digest] = made.lora_int_id
        self._requests[name], self.digests[name] = made, digest
