"""Logits to token ids."""

from engine.sampling.logprobs import prompt_logprobs
from engine.sampling.sampler import NO_TOKEN, Samples, sample
from engine.sampling.state import SamplingState

__all__ = ["NO_TOKEN", "Samples", "SamplingState", "prompt_logprobs", "sample"]
