"""Stand-ins for NVIDIA's programs: they check their arguments and write files of the right names."""

import sys
from pathlib import Path

_COMMON = """\
import argparse, json, os, shutil, sys
from pathlib import Path
parser = argparse.ArgumentParser(allow_abbrev=False)
"""
CONVERT_CHECKPOINT = (
    _COMMON
    + """
for flag in ("--model_dir", "--output_dir", "--dtype"):
    parser.add_argument(flag, required=True)
for flag in ("--tp_size", "--pp_size"):
    parser.add_argument(flag, type=int, required=True)
arguments = parser.parse_args()
output = Path(arguments.output_dir)
output.mkdir()
assert (Path(arguments.model_dir) / "config.json").is_file()
config = {"architecture": "LlamaForCausalLM", "mapping": {"tp_size": arguments.tp_size}}
(output / "config.json").write_text(json.dumps(config))
for rank in range(arguments.tp_size * arguments.pp_size):
    (output / f"rank{rank}.safetensors").touch()
"""
)
HF_PTQ = (
    _COMMON
    + """
for flag in ("--pyt_ckpt_path", "--export_path", "--qformat", "--kv_cache_qformat", "--inference_tensor_parallel"):
    parser.add_argument(flag, required=True)
parser.add_argument("--calib_size")
parser.add_argument("--dataset")
arguments = parser.parse_args()
shutil.copytree(arguments.pyt_ckpt_path, arguments.export_path)
fields = {"quant_algo": arguments.qformat.upper(), "kv_cache_quant_algo": arguments.kv_cache_qformat}
(Path(arguments.export_path) / "hf_quant_config.json").write_text(json.dumps({"quantization": fields}))
"""
)
TRTLLM_BUILD = f"#!{sys.executable}\n" + (
    _COMMON
    + """
parser.add_argument("--checkpoint_dir", required=True)
parser.add_argument("--output_dir", required=True)
for flag in ("--gemm_plugin", "--use_paged_context_fmha"):
    parser.add_argument(flag)
for flag in ("batch_size", "num_tokens", "seq_len", "input_len", "beam_width"):
    parser.add_argument(f"--max_{flag}", type=int)
parser.add_argument("--workers", type=int, default=1)
arguments = parser.parse_args()
output = Path(arguments.output_dir)
output.mkdir(parents=True)
pretrained = json.loads((Path(arguments.checkpoint_dir) / "config.json").read_text())
build = {"max_batch_size": arguments.max_batch_size, "max_seq_len": arguments.max_seq_len}
config = {"version": "1.2.1", "pretrained_config": pretrained, "build_config": build}
(output / "config.json").write_text(json.dumps(config))
for rank in Path(arguments.checkpoint_dir).glob("rank*.safetensors"):
    (output / f"{rank.stem}.engine").touch()
"""
)
NEMO = (
    f"#!{sys.executable}\n"
    + """\
import os, shutil, sys
assert sys.argv[1:4] == ["llm", "export", "-y"], sys.argv
options = dict(word.split("=", 1) for word in sys.argv[4:])
assert options["target"] == "hf"
shutil.copytree(os.environ["NEMO_EXPORTS"], options["output_path"])
"""
)
NEMO_HANGS = (
    f"#!{sys.executable}\n"
    + """\
import os, sys
open(os.environ["NEMO_BEGAN"], "w").close()
sys.stdin.read()
"""
)
FAILS = "import sys\nsys.exit(3)\n"


def write_script(path: Path, text: str) -> Path:
    """Write a script for the interpreter."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def write_program(path: Path, text: str) -> Path:
    """Write a program that can be called by its name."""
    write_script(path, text).chmod(0o755)
    return path
