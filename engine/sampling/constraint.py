"""What a constraint on the output (a grammar) offers to sampling."""

from typing import Protocol

from engine.runners.base import FloatArray


class Constraint(Protocol):
    """One sequence's place in its grammar. Used from the engine's thread."""

    def prepare(self) -> None:
        """Begin to work out, in the background, which tokens may come next.

        Called before the forward pass, so that it costs no time of its own. Without it `apply` does the work.
        """
        ...

    def apply(self, row: FloatArray) -> None:
        """Set the logits [vocab_size] of all tokens that may not come next to -inf, in place."""
        ...

    def accept(self, token_id: int) -> None:
        """The token that was chosen."""
        ...
