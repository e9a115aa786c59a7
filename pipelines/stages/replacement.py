"""`--native-text-stages`: NVIDIA's Python stages are known by their tensors and parameters, and served by our own."""

import logging
from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import ModelConfig

from pipelines.stages.fields import BLS, POSTPROCESSING, PREPROCESSING, Stage
from pipelines.stages.settings import only_nvidias
from sluice.errors import SluiceError

log = logging.getLogger(__name__)
PYTHON = "python"


@dataclass(frozen=True, slots=True)
class _Known:
    backend: str
    stage: Stage
    parameter: str
    """One that NVIDIA's configuration has and no other model with such tensors would."""
    output: str

    def is_of(self, config: ModelConfig) -> bool:
        if self.parameter not in config.parameters or not config.input:
            return False
        if self.output not in (each.name for each in config.output):
            return False
        try:
            self.stage.completed(config)
        except SluiceError:
            return False
        return True


_KNOWN = (
    _Known("preprocessing", PREPROCESSING, "tokenizer_dir", "INPUT_ID"),
    _Known("postprocessing", POSTPROCESSING, "tokenizer_dir", "OUTPUT"),
    _Known("tensorrt_llm_bls", BLS, "accumulate_tokens", "text_output"),
)


def with_native_stage(config: ModelConfig) -> ModelConfig:
    """`config` with the native backend, where it is one of NVIDIA's Python stages; else as it is."""
    known = next((each for each in _KNOWN if config.backend == PYTHON and each.is_of(config)), None)
    if known is None:
        return config
    parameter = only_nvidias(config)
    if parameter is not None:
        log.warning("model '%s' stays in Python: its parameter %s needs NVIDIA's own stage", config.name, parameter)
        return config
    native = ModelConfig()
    native.CopyFrom(config)
    native.backend, native.default_model_filename = known.backend, ""
    for tensor in native.input:
        # NVIDIA's oldest postprocessing wants log probabilities, which its token model gave asked for or not.
        tensor.optional = tensor.optional or tensor.name in known.stage.other_inputs
    log.info("model '%s': served by the native text stage '%s' in place of its model.py", config.name, known.backend)
    return native
