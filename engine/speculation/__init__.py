"""Draft tokens: guesses at what comes next, which the model checks many of in one step."""

from engine.speculation.drafter import Drafter, make_drafter
from engine.speculation.gate import TokenPrices

__all__ = ["Drafter", "TokenPrices", "make_drafter"]
