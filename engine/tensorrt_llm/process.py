"""TensorRT-LLM as an engine process: `python -m engine.tensorrt_llm.process`, with `engine.process`' arguments."""

import sys


def main(argv: list[str]) -> int:
    """Serve until told to stop or left alone. Returns the exit code."""
    raise NotImplementedError


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
