"""TensorRT-LLM as an engine process, with the arguments of `sluice.engine.process`."""

import sys

from sluice.engine.delegated.process import run
from sluice.engine.delegated.tensorrt_llm.llm import load_llm

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], load_llm))
