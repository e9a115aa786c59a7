"""Chooses how many tokens of prompts a step takes, from values alone: what they cost on this model and machine, and
whether streams wait for the step. A large chunk reads the weights once for many tokens; a small one ends soon."""

from typing import NamedTuple

TARGET_STEP_S = 0.04
"""Time of a step that streams are not to notice."""
MAX_RATIO = 3.0
"""Prompts may take so many times what decode takes alone, even past the target. A large model reaches no target, and
chunks that are too small would read its weights for little."""
LONGEST_STEP_S = 0.25
"""Time of a step in which nothing decodes: no stream waits for its end, but whoever comes meanwhile does."""

FIRST_CHUNK = 512
"""Tokens of a step while it is unknown what they take: large models take a second for them, small ones milliseconds."""
LARGEST_CHUNK = 2048
"""Beyond it a token is no cheaper, and the memory for the step's intermediate values grows on."""


class StepCosts(NamedTuple):
    """The durations of recent steps, in seconds."""

    decode_s: float = 0.0
    """A step that only decodes; 0 before the first."""
    prompt_token_s: float = 0.0
    """The time that one prompt token adds to a step; 0 before the first."""


class ChunkLimits(NamedTuple):
    """Bounds of a step's tokens of prompts."""

    least: int
    most: int
    is_chosen_by_load: bool = False
    """Whether `most` is only the most that is ever chosen. Otherwise steps without decode take as many."""


def choose_chunk(costs: StepCosts, limits: ChunkLimits, *, is_decoding: bool) -> int:
    """Return the most tokens of prompts for a step, in which others decode or not."""
    if not is_decoding and not limits.is_chosen_by_load:
        return limits.most
    if not costs.prompt_token_s:
        return min(FIRST_CHUNK, limits.most) if limits.is_chosen_by_load else limits.most
    allowed_s = max(TARGET_STEP_S - costs.decode_s, MAX_RATIO * costs.decode_s) if is_decoding else LONGEST_STEP_S
    return min(max(int(allowed_s / costs.prompt_token_s), limits.least), limits.most)
