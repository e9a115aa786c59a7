"""`pb_utils.ModelConfig`, which `auto_complete_config` gets, and lookups in a model's configuration."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

Properties = dict[str, Any]


class ModelConfig:
    """A configuration that the model may complete. Setters raise ValueError where it already has another value."""

    def __init__(self, model_config: str) -> None:
        self._model_config: Properties = msgspec.json.decode(model_config)

    @property
    def _name(self) -> str:
        return str(self._model_config["name"])

    def as_dict(self) -> Properties:
        return self._model_config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        given = self._model_config["max_batch_size"]
        if given > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {given}, but in auto-complete-config function for model "
                f"'{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._model_config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._model_config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{other}', but auto-complete-config function for "
                    f"model '{self._name}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._model_config.setdefault("dynamic_batching", {})

    def add_input(self, input: Mapping[str, Any]) -> None:
        self._add("input", input, ("name", "data_type", "dims", "optional"))

    def add_output(self, output: Mapping[str, Any]) -> None:
        self._add("output", output, ("name", "data_type", "dims"))

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        if any(key != "decoupled" for key in transaction_policy_dict):
            raise ValueError(
                "model transaction property in auto-complete-config function for model "
                f"'{self._name}' contains property other than 'decoupled'."
            )
        policy = self._model_config.setdefault("model_transaction_policy", {})
        if "decoupled" not in transaction_policy_dict:
            return
        decoupled = transaction_policy_dict["decoupled"]
        if policy.get("decoupled", decoupled) != decoupled:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model '{self._name}', "
                f"which is already set to '{policy['decoupled']}'."
            )
        policy["decoupled"] = decoupled

    def _add(self, kind: str, given: Mapping[str, Any], allowed: Sequence[str]) -> None:
        self._check_properties(kind, given, allowed)
        tensor = {**given, "dims": list(given["dims"])}
        for current in self._model_config[kind]:
            if current["name"] == tensor["name"]:
                self._check_agrees(kind, current, tensor)
                current.update(tensor)
                return
        self._model_config[kind].append(tensor)

    def _check_properties(self, kind: str, given: Mapping[str, Any], allowed: Sequence[str]) -> None:
        place = f"in auto-complete-config function for model '{self._name}'"
        if "name" not in given:
            raise ValueError(f"{kind} {place} is missing 'name' property.")
        if any(key not in allowed for key in given):
            known = ", ".join(f"'{name}'" for name in allowed[:-1]) + f" and '{allowed[-1]}'"
            raise ValueError(f"{kind} '{given['name']}' {place} contains property other than {known}.")
        for required in ("data_type", "dims"):
            if required not in given:
                raise ValueError(f"{kind} '{given['name']}' {place} is missing '{required}' property.")

    def _check_agrees(self, kind: str, current: Properties, tensor: Properties) -> None:
        name = tensor["name"]
        if current["data_type"] not in ("TYPE_INVALID", tensor["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype {current['data_type']} for "
                f"{kind} '{name}', model provides {tensor['data_type']}"
            )
        if current["dims"] and current["dims"] != tensor["dims"]:
            raise self._contradiction("dims", name, current, tensor)
        if "optional" in current and "optional" in tensor and current["optional"] != tensor["optional"]:
            raise self._contradiction("optional", name, current, tensor)

    def _contradiction(self, key: str, name: str, current: Properties, tensor: Properties) -> ValueError:
        return ValueError(
            f"model '{self._name}', tensor '{name}': the model expects {key} {tensor[key]} "
            f"but the model configuration specifies {key} {current[key]}"
        )


def get_input_config_by_name(model_config: Properties, name: str) -> Properties | None:
    return _named(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: Properties, name: str) -> Properties | None:
    return _named(model_config.get("output", ()), name)


def using_decoupled_model_transaction_policy(model_config: Properties) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def _named(tensors: Sequence[Properties], name: str) -> Properties | None:
    return next((each for each in tensors if each["name"] == name), None)
