"""What `sluice build` is told on the command line."""

import argparse
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from engine.config import Runtime
from gateway.options.option import OneLineParser
from gateway.options.option import Parse, choice, integer, enum_member

_DESCRIPTION = """\
Make a Triton model repository of a HuggingFace or NeMo checkpoint.

What is written to REPOSITORY (--layout ensemble, the default):
  NAME            the language model: checkpoint or compiled engine, tokenizer and config.pbtxt. Text, messages and
                  token ids go in; the OpenAI routes serve it under this name
  preprocessing, postprocessing, ensemble
                  the same as NVIDIA's stages around a token model, with their tensors: text in, text out.
                  They share NAME, which is loaded once. `--name tensorrt_llm` gives NVIDIA's repository name for name
  NAME/sluice-build.json
                  what was built of what, with versions: `sluice doctor` compares them with the machine's

CHECKPOINT is a folder (HuggingFace checkpoint, OpenVINO IR, TensorRT-LLM checkpoint or compiled engine, NeMo 2
checkpoint), a .nemo archive, or ORG/NAME[@REVISION] on the Hugging Face hub.
"""

_EPILOG = """\
Quantisation:
  openvino       none, int8, int4: the compressed weights take the place of the checkpoint's
  tensorrt_llm   none, fp8, nvfp4, int4_awq, w4a8_awq: by NVIDIA ModelOpt, into a HuggingFace checkpoint
  with --compile none, fp8, nvfp4, int8_sq, int4_awq, w4a8_awq, int8_wo, int4_wo: by TensorRT-LLM's quantize.py
  TensorRT-LLM's need an NVIDIA GPU, and the scripts that come with TensorRT-LLM and ModelOpt.

Compiled engines (--compile) end with TensorRT-LLM 1.2; later versions run the checkpoint itself, as 1.2 also does
without --compile.

examples:
  sluice build meta-llama/Llama-3.1-8B-Instruct --output /models --quantization int8 --runtime openvino
  sluice build ./llama --output /models --quantization fp8 --tensor-parallel-size 2 --runtime tensorrt_llm
  sluice build ./llama --output /models --compile --max-num-seqs 256 --max-model-len 8192 --dry-run
  sluice build llama3.nemo --nemo-model-id meta-llama/Meta-Llama-3-8B --output /models --dry-run > build.sh

--dry-run needs none of the tools, writes nothing, and prints a shell script of all commands, in order.
Exit codes: 0 when built, 1 where a step failed (nothing is left in REPOSITORY), 2 for what cannot be built as asked.
"""


class Layout(StrEnum):
    """Which models the repository gets."""

    ENSEMBLE = "ensemble"
    PREFIXED = "prefixed"
    SINGLE = "single"


class Dtype(StrEnum):
    """Precision of the weights and the computation, in the words of torch."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


_DTYPES = {**{each.value: each for each in Dtype}, "bf16": Dtype.BFLOAT16, "f16": Dtype.FLOAT16, "f32": Dtype.FLOAT32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line, read. None means: as the model or the runtime has it."""

    checkpoint: str
    output: Path
    name: str | None = None
    runtime: Runtime = Runtime.AUTO
    layout: Layout = Layout.ENSEMBLE
    quantization: str = "none"
    dtype: Dtype = Dtype.AUTO
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_beam_width: int = 1
    is_compiled: bool = False
    calib_size: int = 512
    calib_dataset: str | None = None
    tokenizer: Path | None = None
    is_linked: bool = False
    cache_path: str | None = None
    tensorrt_llm_version: str | None = None
    tensorrt_llm_examples: Path | None = None
    modelopt_examples: Path | None = None
    nemo_folder: Path = Path("/opt/NeMo")
    nemo_model_id: str | None = None
    is_forced: bool = False
    is_dry: bool = False

    @property
    def num_gpus(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


def parse(argv: list[str]) -> Options:
    """Exits where the arguments cannot be understood, and after --help."""
    return Options(**vars(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="sluice build",
        usage="sluice build CHECKPOINT --output REPOSITORY [OPTIONS]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="what to build from, see above")
    _add_output(parser.add_argument_group("what is written"))
    _add_model(parser.add_argument_group("how the model runs"))
    _add_tools(parser.add_argument_group("tools of NVIDIA's"))
    return parser


def _add_output(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--output", type=Path, required=True, metavar="REPOSITORY", help="model repository; it may hold other models"
    )
    group.add_argument("--name", metavar="NAME", help="the model's name. Default: the checkpoint's")
    group.add_argument(
        "--layout",
        type=_parsed(enum_member(Layout)),
        default=Layout.ENSEMBLE,
        metavar="LAYOUT",
        help="ensemble: as above; prefixed: the stages are NAME_preprocessing, NAME_postprocessing and NAME_ensemble, "
        "for several models in one repository; single: NAME alone. Default: ensemble",
    )
    group.add_argument(
        "--link",
        dest="is_linked",
        action="store_true",
        help="symbolic links to the checkpoint's files instead of copies",
    )
    group.add_argument("--force", dest="is_forced", action="store_true", help="replace models that are there already")
    group.add_argument(
        "--dry-run", dest="is_dry", action="store_true", help="print every command, as a shell script, and do nothing"
    )


def _add_model(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--runtime",
        type=_parsed(enum_member(Runtime)),
        default=Runtime.AUTO,
        metavar="RUNTIME",
        help="openvino, tensorrt_llm, or auto, what `sluice serve` would take here. Default: auto",
    )
    group.add_argument("--quantization", default="none", metavar="TYPE", help="see below. Default: none")
    group.add_argument(
        "--dtype",
        type=_parsed(_dtype),
        default=Dtype.AUTO,
        metavar="TYPE",
        help="auto, bfloat16, float16 (TensorRT-LLM's alone) or float32. Default: auto, as the checkpoint has it",
    )
    group.add_argument(
        "--kv-cache-dtype",
        default="auto",
        metavar="TYPE",
        help="auto; fp8 for tensorrt_llm; bf16, f32 or u8 for openvino. Default: auto",
    )
    for flag, what in (("tensor", "that share each layer"), ("pipeline", "that have the layers in turn")):
        group.add_argument(
            f"--{flag}-parallel-size", type=_parsed(integer(1)), default=1, metavar="N", help=f"GPUs {what}. Default: 1"
        )
    group.add_argument(
        "--max-model-len", type=_parsed(integer(2)), metavar="TOKENS", help="longest prompt and answer together"
    )
    group.add_argument("--max-num-seqs", type=_parsed(integer(1, 4096)), metavar="N", help="most requests in one step")
    group.add_argument(
        "--max-num-batched-tokens", type=_parsed(integer(1)), metavar="TOKENS", help="most tokens in one step"
    )
    group.add_argument(
        "--max-beam-width", type=_parsed(integer(1)), default=1, metavar="N", help="most beams (tensorrt_llm)"
    )
    group.add_argument(
        "--compile", dest="is_compiled", action="store_true", help="TensorRT engines, for the GPU of this machine"
    )
    group.add_argument(
        "--calib-size", type=_parsed(integer(1)), default=512, metavar="N", help="texts to calibrate with. Default: 512"
    )
    group.add_argument(
        "--calib-dataset", metavar="DATASET", help="whose texts: a name on the hub or a folder. Default: the tool's"
    )
    group.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="the tokenizer, where CHECKPOINT has none (engines)"
    )
    group.add_argument(
        "--cache-path",
        metavar="FOLDER",
        help="as for `sluice serve`: keeps what optimum-intel makes. Default: SLUICE_CACHE_PATH, ~/.cache/sluice",
    )


def _add_tools(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--tensorrt-llm-version",
        metavar="VERSION",
        help="which TensorRT-LLM the commands are for. Default: the installed one, else the newest release",
    )
    group.add_argument(
        "--tensorrt-llm-examples",
        type=Path,
        metavar="FOLDER",
        help="TensorRT-LLM's examples, of the same version. Default: where NVIDIA's images have them",
    )
    group.add_argument("--modelopt-examples", type=Path, metavar="FOLDER", help="NVIDIA ModelOpt's examples")
    group.add_argument(
        "--nemo-folder",
        type=Path,
        default=Path("/opt/NeMo"),
        metavar="FOLDER",
        help="NeMo's sources, for .nemo archives. Default: /opt/NeMo, as in its images",
    )
    group.add_argument(
        "--nemo-model-id",
        metavar="ID",
        help="which model of the hub a .nemo archive is of, such as meta-llama/Meta-Llama-3-8B",
    )


def _dtype(text: str) -> Dtype:
    return _DTYPES[choice(*_DTYPES)(text)]


def _parsed(parse: Parse) -> Any:
    """As argparse wants it, which shows the text of its own kind of error alone."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"must be {error}, got {text!r}") from None

    return convert
