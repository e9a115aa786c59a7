"""The aims, as shares of what the device reaches, and the figures that others have published."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Aim:
    """A figure that is to be at least `accept`, better `aim`; or at most, if it is a count of what must not happen."""

    label: str
    part: str
    figure: str
    key: str
    accept: float
    aim: float
    published: str = ""

    @property
    def is_count(self) -> bool:
        return self.accept == 0


AIMS = (
    Aim("8B decode 1 x 1,024", "decoder", "decode 1 x 1024", "of_limit", 0.75, 0.85, "5.1 ms (H100, with a graph)"),
    Aim("8B decode 32 x 1,024", "decoder", "decode 32 x 1024", "of_limit", 0.72, 0.80),
    Aim("8B decode 256 x 128", "decoder", "decode 256 x 128", "of_limit", 0.65, 0.75),
    Aim("8B decode 256 x 1,024", "decoder", "decode 256 x 1024", "of_limit", 0.70, 0.80),
    Aim("8B prefill 2,048", "decoder", "prefill 2048", "of_limit", 0.60, 0.70, "44,277 tokens/s (SGLang, H100)"),
    Aim("8B prefill 8,192", "decoder", "prefill 8192", "of_limit", 0.50, 0.60),
    Aim("8B fp8 decode 1", "decoder", "fp8 decode 1 x 1024", "of_limit", 0.65, 0.75),
    Aim("0.6B offline", "executor", "0.6B offline", "of_limit", 0.35, 0.50, "10,009 tokens/s (nano-vllm, A800)"),
    Aim("HTTP of the engine alone, 32", "server", "clients 32", "of_engine", 0.95, 0.95),
    Aim("HTTP of the engine alone, 256", "server", "clients 256", "of_engine", 0.88, 0.90),
    Aim("preemptions", "executor", "8B under pressure", "preemptions", 0, 0),
    Aim("failed requests", "server", "clients 256", "failed", 0, 0),
)


def judge(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each aim: what it is of, what is accepted, the aim, what is measured, the verdict, what others
    have published. Small shapes have no aims."""
    return [] if summary["is_tiny"] else [_judge(aim, summary) for aim in AIMS]


def _judge(aim: Aim, summary: dict[str, Any]) -> tuple[str, ...]:
    value = summary["parts"].get(aim.part, {}).get("figures", {}).get(aim.figure, {}).get(aim.key)
    if aim.is_count:
        verdict = "met" if value == 0 else "missed"
        return aim.label, "0", "0", *(("", "not measured") if value is None else (str(value), verdict)), aim.published
    accept, wanted = f"{aim.accept:.0%}", f"{aim.aim:.0%}"
    if value is None:
        return aim.label, accept, wanted, "", "not measured", aim.published
    verdict = "met" if value >= aim.aim else "accepted" if value >= aim.accept else "missed"
    return aim.label, accept, wanted, f"{value:.0%}", verdict, aim.published


def print_aims(summary: dict[str, Any]) -> None:
    for label, accept, wanted, value, verdict, published in judge(summary):
        beside = f"; published: {published}" if published else ""
        print(f"{label:30} {value:>6}  accept {accept:>4}, aim {wanted:>4}: {verdict}{beside}")
