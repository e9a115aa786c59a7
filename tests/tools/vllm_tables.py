"""Generates the table of docs/moving-from-vllm.md from the settings of vLLM's adapter."""

from collections import defaultdict

from sluice.engine.delegated.vllm.settings import LEFT_OUT
from tests.tools.markdown import codes, table


def _left_out() -> str:
    by_reason = defaultdict(list)
    for name, reason in LEFT_OUT.items():
        by_reason[reason].append(f"--{name.replace('_', '-')}")
    return table(("Flags of vLLM", "Why they are refused"), ([codes(flags), why] for why, flags in by_reason.items()))


TABLES = {"vllm-left-out": _left_out}
