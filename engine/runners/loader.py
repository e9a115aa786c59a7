"""Which runtime serves a model directory."""

import logging

from engine.config import EngineConfig
from engine.runners.base import Runner

log = logging.getLogger(__name__)


def load_runner(config: EngineConfig) -> Runner:
    """Load `config.model_path` in the runtime made for what it is. Raises SluiceError with what is wrong."""
    from engine.runners.openvino.runner import load_runner as load_openvino

    log.info("runtime openvino: %s is a HuggingFace checkpoint, to run on the CPU", config.model_path)
    return load_openvino(config)
