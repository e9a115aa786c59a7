"""A model's own sampling defaults, from its generation_config.json."""

from pathlib import Path
from typing import Any

import msgspec

from engine.types import SamplingParams
from pipelines.text.types import SamplingOverrides
from sluice.errors import ErrorCode, SluiceError


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for a request that does not say. Fields the checkpoint leaves out have OpenAI's defaults."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0

    def resolve(self, sent: SamplingOverrides, max_tokens: int) -> SamplingParams:
        """What the client sent over these defaults; `max_tokens` as decided by the caller."""
        fields = msgspec.structs.asdict(self) | _present(sent) | {"max_tokens": max_tokens}
        return SamplingParams(**fields)


class _GenerationConfig(msgspec.Struct, kw_only=True):
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None


def load_sampling_defaults(model_path: Path) -> SamplingDefaults:
    """Read `generation_config.json`, which a checkpoint may lack.

    `do_sample: false` means greedy. Raises SluiceError UNAVAILABLE for a file that does not hold what it should.
    """
    path = model_path / "generation_config.json"
    if not path.exists():
        return SamplingDefaults()
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_GenerationConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise SluiceError(ErrorCode.UNAVAILABLE, f"cannot read {path}: {error}") from error
    fields = _present(config)
    if fields.pop("do_sample", True) is False:
        fields["temperature"] = 0.0
    return SamplingDefaults(**fields)


def _present(struct: msgspec.Struct) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(struct).items() if value is not None}
