"""The command line of `sluice build`, and the errors of a build."""

import argparse
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sluice.cli.errors import CommandError
from sluice.engine.config import Runtime
from sluice.gateway.options.option import USAGE_ERROR, OneLineParser, argument_type, choice, enum_member, integer

_DESCRIPTION = """\
Make a Triton model repository from a HuggingFace or NeMo checkpoint.

The command writes to REPOSITORY (--layout ensemble, the default):
  NAME            the language model: checkpoint or compiled engine, tokenizer and config.pbtxt. It takes text, messages
                  and token ids; the OpenAI routes serve it under this name
  preprocessing, postprocessing, ensemble
                  NVIDIA's stages around a token model, with NVIDIA's tensors: text in, text out. They share NAME, which
                  is loaded once. `--name tensorrt_llm` gives the repository the model names of NVIDIA's
  NAME/sluice-build.json
                  the manifest: source, settings and versions, which `sluice doctor` compares with the machine's

CHECKPOINT is a folder (HuggingFace checkpoint, OpenVINO IR, TensorRT-LLM checkpoint or compiled engine, NeMo 2
checkpoint), a .nemo archive, or ORG/NAME[@REVISION] on the Hugging Face hub.
"""

_EPILOG = """\
quantization:
  openvino       none, int8, int4: the compressed weights replace the checkpoint's
  tensorrt_llm   none, fp8, nvfp4, int4_awq, w4a8_awq: by NVIDIA ModelOpt, into a HuggingFace checkpoint
  with --compile none, fp8, nvfp4, int8_sq, int4_awq, w4a8_awq, int8_wo, int4_wo: by TensorRT-LLM's quantize.py
  The types of TensorRT-LLM need an NVIDIA GPU and the scripts that come with TensorRT-LLM and ModelOpt.

Compiled engines (--compile) end with TensorRT-LLM 1.2. Later versions run the checkpoint itself, as does 1.2 without
--compile.

examples:
  sluice build meta-llama/Llama-3.1-8B-Instruct --output /models --quantization int8 --runtime openvino
  sluice build ./llama --output /models --quantization fp8 --tensor-parallel-size 2 --runtime tensorrt_llm
  sluice build ./llama --output /models --compile --max-num-seqs 256 --max-model-len 8192 --dry-run
  sluice build llama3.nemo --nemo-model-id meta-llama/Meta-Llama-3-8B --output /models --dry-run > build.sh

--dry-run needs none of the tools and writes nothing. It prints a shell script of all commands, in order.
Exit codes: 0 when built, 1 where a step failed (REPOSITORY is left as it was), 2 for a build that cannot be made as
requested.
"""


class BuildError(CommandError):
    """A build that failed. The text tells the operator what is wrong and what to do."""


class UsageError(BuildError):
    """A build that cannot be made as requested. Another command line is needed."""

    code = USAGE_ERROR


class Layout(StrEnum):
    """The models that the repository gets."""

    ENSEMBLE = "ensemble"
    PREFIXED = "prefixed"
    SINGLE = "single"


class Dtype(StrEnum):
    """Precision of the weights and the computation, by torch's names."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


_DTYPES = {**{each.value: each for each in Dtype}, "bf16": Dtype.BFLOAT16, "f16": Dtype.FLOAT16, "f32": Dtype.FLOAT32}
_DTYPES |= {"half": Dtype.FLOAT16, "float": Dtype.FLOAT32}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """The parsed command line. None stands for the default of the model or the runtime."""

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


def parse_options(argv: list[str]) -> BuildOptions:
    """Parse the command line. Exits the process for bad arguments and after --help."""
    return BuildOptions(**vars(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="sluice build",
        usage="sluice build CHECKPOINT --output REPOSITORY [OPTIONS]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint to build from, see above")
    _add_output(parser.add_argument_group("what is written"))
    _add_model(parser.add_argument_group("how the model runs"))
    _add_tools(parser.add_argument_group("NVIDIA's tools"))
    return parser


def _add_output(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="REPOSITORY",
        help="model repository to write to; it may hold other models",
    )
    group.add_argument("--name", metavar="NAME", help="name of the model. Default: the checkpoint's")
    group.add_argument(
        "--layout",
        type=argument_type(enum_member(Layout)),
        default=Layout.ENSEMBLE,
        metavar="LAYOUT",
        help="ensemble: as above; prefixed: the stages are NAME_preprocessing, NAME_postprocessing and NAME_ensemble, "
        "for several models in one repository; single: NAME alone. Default: ensemble",
    )
    group.add_argument(
        "--link",
        dest="is_linked",
        action="store_true",
        help="link to the checkpoint's files instead of copying them",
    )
    group.add_argument("--force", dest="is_forced", action="store_true", help="replace models that exist already")
    group.add_argument(
        "--dry-run", dest="is_dry", action="store_true", help="print every command as a shell script, and do nothing"
    )


def _add_model(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--runtime",
        type=argument_type(enum_member(Runtime)),
        default=Runtime.AUTO,
        metavar="RUNTIME",
        help="openvino, tensorrt_llm, or auto: the one that `sluice serve` would choose here. Default: auto",
    )
    group.add_argument("--quantization", default="none", metavar="TYPE", help="see below. Default: none")
    group.add_argument(
        "--dtype",
        type=argument_type(_dtype),
        default=Dtype.AUTO,
        metavar="TYPE",
        help="auto, bfloat16 (or bf16), float16 (f16, half; TensorRT-LLM only) or float32 (f32, float). Default: auto, "
        "the checkpoint's",
    )
    group.add_argument(
        "--kv-cache-dtype",
        default="auto",
        metavar="TYPE",
        help="auto; fp8 for tensorrt_llm; bf16, f32 or u8 for openvino. Default: auto",
    )
    for flag, layers in (("tensor", "that share each layer"), ("pipeline", "among which the layers are divided")):
        group.add_argument(
            f"--{flag}-parallel-size",
            type=argument_type(integer(1)),
            default=1,
            metavar="N",
            help=f"number of GPUs {layers}. Default: 1",
        )
    group.add_argument(
        "--max-model-len",
        type=argument_type(integer(2)),
        metavar="TOKENS",
        help="most tokens of prompt and answer together",
    )
    group.add_argument(
        "--max-num-seqs", type=argument_type(integer(1, 4096)), metavar="N", help="most requests in one step"
    )
    group.add_argument(
        "--max-num-batched-tokens", type=argument_type(integer(1)), metavar="TOKENS", help="most tokens in one step"
    )
    group.add_argument(
        "--max-beam-width", type=argument_type(integer(1)), default=1, metavar="N", help="most beams (tensorrt_llm)"
    )
    group.add_argument(
        "--compile",
        dest="is_compiled",
        action="store_true",
        help="compile TensorRT engines for the GPU of this machine",
    )
    group.add_argument(
        "--calib-size",
        type=argument_type(integer(1)),
        default=512,
        metavar="N",
        help="number of texts to calibrate with. Default: 512",
    )
    group.add_argument(
        "--calib-dataset",
        metavar="DATASET",
        help="texts to calibrate with: a name on the hub or a folder. Default: the tool's",
    )
    group.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="folder of the tokenizer, where CHECKPOINT has none (engines)"
    )
    group.add_argument(
        "--cache-path",
        metavar="FOLDER",
        help="cache of optimum-intel's conversions, as for `sluice serve`. Default: SLUICE_CACHE_PATH, ~/.cache/sluice",
    )


def _add_tools(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--tensorrt-llm-version",
        metavar="VERSION",
        help="TensorRT-LLM that the commands are for. Default: the installed one, else the newest release",
    )
    group.add_argument(
        "--tensorrt-llm-examples",
        type=Path,
        metavar="FOLDER",
        help="TensorRT-LLM's examples, of the same version. Default: their place in NVIDIA's images",
    )
    group.add_argument("--modelopt-examples", type=Path, metavar="FOLDER", help="NVIDIA ModelOpt's examples")
    group.add_argument(
        "--nemo-folder",
        type=Path,
        default=Path("/opt/NeMo"),
        metavar="FOLDER",
        help="NeMo's sources, for .nemo archives. Default: /opt/NeMo, their place in its images",
    )
    group.add_argument(
        "--nemo-model-id",
        metavar="ID",
        help="hub model that a .nemo archive was trained from, such as meta-llama/Meta-Llama-3-8B",
    )


def _dtype(text: str) -> Dtype:
    return _DTYPES[choice(*_DTYPES)(text)]
