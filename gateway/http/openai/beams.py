"""Beam search, of which a model that has it tells the best beam."""

from gateway.http.openai.schemas import GenerationRequest
from sluice.errors import SluiceError, invalid

_LIMIT = "the most that this server decodes with is a beam width of 1; ask for several answers with n"


def wants_beams(fields: GenerationRequest) -> bool:
    return bool(fields.use_beam_search) or fields.beam_width not in (None, 1)


def beam_width_of(fields: GenerationRequest) -> int | None:
    """How many beams are asked for: with `use_beam_search` by `beam_width` or `best_of`. None: no search."""
    if not wants_beams(fields):
        return None
    return fields.beam_width or fields.best_of or fields.n or 1


def check_beams(fields: GenerationRequest, max_beam_width: int) -> None:
    """Raises INVALID for a search that a model with at most so many beams cannot do."""
    width = beam_width_of(fields)
    if width is None:
        return
    if max_beam_width == 1:
        raise _no_beams(fields)
    if width < 2:
        raise invalid("use_beam_search", "use_beam_search needs best_of or beam_width, of at least 2: the beams")
    if width > max_beam_width:
        name = _name_of_width(fields)
        raise invalid(name, f"{name} must be at most {max_beam_width}, the beams of this model, got {width}")
    if (fields.n or 1) > 1:
        reason = "the best beam is the answer; say how many there are with best_of or beam_width"
        raise invalid("n", f"n must be 1 with a beam search, got {fields.n}: {reason}")


def _no_beams(fields: GenerationRequest) -> SluiceError:
    if fields.use_beam_search:
        return invalid("use_beam_search", f"use_beam_search must be false: {_LIMIT}")
    return invalid("beam_width", f"beam_width must be 1, got {fields.beam_width}: {_LIMIT}")


def _name_of_width(fields: GenerationRequest) -> str:
    if fields.beam_width is not None:
        return "beam_width"
    return "best_of" if fields.best_of is not None else "n"
