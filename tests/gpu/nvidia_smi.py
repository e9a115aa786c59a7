"""What nvidia-smi says of each GPU, and how our metrics differ from it."""

import csv
import re
from collections.abc import Iterator, Mapping

_MIB = 1 << 20
FIELDS = ("uuid", "index", "name", "driver_version", "memory.total", "memory.used", "memory.reserved", "power.limit")
COMMAND = ["nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
_TOLERANCE_BYTES = 256 * _MIB
"""How far the used memory may be apart: the two are not asked at the same time."""
_SAMPLE = re.compile(r"^(\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
Gpu = Mapping[str, str]


def parse(text: str) -> list[Gpu]:
    """Parse the answer to COMMAND, a row for each GPU."""
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    return [dict(zip(FIELDS, row, strict=True)) for row in rows]


def samples(page: str, name: str) -> dict[str, tuple[dict[str, str], float]]:
    """Return the samples of a family on a page of metrics, with their labels, by the GPU's uuid."""
    found = ((dict(_LABEL.findall(labels)), value) for each, labels, value in _SAMPLE.findall(page) if each == name)
    return {labels["gpu_uuid"]: (labels, float(value)) for labels, value in found if "gpu_uuid" in labels}


def value_of(page: str, name: str, uuid: str) -> float:
    """Return a GPU's value. Raises KeyError where the page has none."""
    return samples(page, name)[uuid][1]


def differences(gpus: list[Gpu], page: str) -> list[str]:
    """Return a sentence for each thing that the page says otherwise. Values that nvidia-smi does not know are equal."""
    shown = samples(page, "nv_gpu_memory_total_bytes").keys()
    missing = [f"{gpu['uuid']} is missing" for gpu in gpus if gpu["uuid"] not in shown]
    unknown = [f"nvidia-smi has no {uuid}" for uuid in shown - {gpu["uuid"] for gpu in gpus}]
    return [*missing, *unknown, *(each for gpu in gpus if gpu["uuid"] in shown for each in _differences(gpu, page))]


def _differences(gpu: Gpu, page: str) -> Iterator[str]:
    uuid = gpu["uuid"]
    labels = samples(page, "sluice_gpu_info")[uuid][0]
    for field in ("index", "name", "driver_version"):
        if labels.get(field) != gpu[field]:
            yield f"{uuid}: {field} is {labels.get(field)}, nvidia-smi has {gpu[field]}"
    # NVML's first version of the question counts the driver's own memory as used; nvidia-smi shows it apart.
    used = _number(gpu["memory.used"]) + _number(gpu["memory.reserved"])
    expected = (
        ("nv_gpu_memory_total_bytes", _number(gpu["memory.total"]) * _MIB, _MIB),
        ("nv_gpu_memory_used_bytes", used * _MIB, _TOLERANCE_BYTES),
        ("nv_gpu_power_limit", _number(gpu["power.limit"]), 1.0),
    )
    for name, value, tolerance in expected:
        found = samples(page, name).get(uuid)
        if value and (found is None or abs(found[1] - value) > tolerance):
            yield f"{uuid}: {name} is {None if found is None else found[1]:}, nvidia-smi has {value}"
    for name in ("nv_gpu_utilization", "nv_gpu_power_usage", "nv_energy_consumption"):
        found = samples(page, name).get(uuid)
        if found is not None and (found[1] < 0 or (name == "nv_gpu_utilization" and found[1] > 1)):
            yield f"{uuid}: {name} is {found[1]}"


def _number(text: str) -> float:
    """Read a number; 0 for [N/A] and the like."""
    return float(text) if re.fullmatch(r"[\d.]+", text) else 0.0
