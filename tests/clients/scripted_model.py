"""A checkpoint whose answers follow a script, so that a session of an agent program has the calls that its test needs.

The chat template counts the turns of the assistant since the user named a session, and ends the prompt with the control
token of that turn. What follows are the pieces of its text, each a token of its own, and the end. A transformer of one
layer does this: each piece has a rank, attention finds the last one, and the LM head has its successor. Tokens between
the pieces, which a grammar forces, change nothing. All else is as with any model: template, tokenizer, the grammar of
the tools, readers, protocols. A grammar that forbids the text makes the test fail."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

SOURCE = Path(__file__).parents[2] / "models" / "rill" / "1"
"""The folder whose tokenizer reads what clients send."""
TEMPLATE = Path(__file__).with_name("scripted.jinja")
END = 5
"""The id of `<|end|>`."""
WIDTH = 128
IDENTITY = WIDTH - 3
"""Dimensions of the embedding by which tokens differ. The first is that of the last pieces, which the end follows."""
CONSTANT, RANK, FILLER = range(IDENTITY, WIDTH)
"""The other dimensions. The last makes up for the missing identity of other tokens, so that all have one length."""
MAX_RANK, SCORE_PER_RANK = 100, 30
PIECE_CHARS = 6
OPENING = "<tool_call>"
TITLE = "A title of the session"
"""The answer to a request without tools in a session that has some, which programs send for a title."""
Array = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Call:
    """A call of a tool, as an answer."""

    tool: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        text = json.dumps({"name": self.tool, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{text}\n</tool_call>"


Answer = Call | str


@dataclass(frozen=True)
class Session:
    """The answers of a session in their order. The last one is repeated."""

    answers: Sequence[Answer]
    has_tools: bool = True


def marker(name: str) -> str:
    """Return the words in a user's message that begin a session."""
    return f"[play {name}]"


def write_scripted_model(folder: Path, sessions: Mapping[str, Session]) -> None:
    """Write a checkpoint into `folder` that plays the sessions."""
    folder.mkdir(parents=True)
    tokenizer = json.loads((SOURCE / "tokenizer.json").read_text())
    chains = _Chains(tokenizer)
    chains.add("<|title|>", TITLE)
    for name, session in sessions.items():
        for index, answer in enumerate(session.answers):
            chains.add(_start(name, index), answer)
    chains.write(folder)
    settings = json.loads((SOURCE / "tokenizer_config.json").read_text())
    settings |= {"chat_template": _template(sessions), "model_max_length": 1 << 17}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text((SOURCE / "generation_config.json").read_text())


def _start(name: str, index: int) -> str:
    return f"<|play {name} {index}|>"


class _Chains:
    """Tokens that follow each other, added to a tokenizer."""

    def __init__(self, tokenizer: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
        self._used = set(self._vocabulary)
        self._successors: dict[int, int] = {}
        self._ranks: dict[int, int] = {}
        self._rests: dict[int, int] = {}
        """First pieces by the same ones without the opening."""
        self._num_tokens = len(self._vocabulary)

    def add(self, start: str, answer: Answer) -> None:
        """Add the chain that begins with the control token `start`."""
        last = self._vocabulary[start] = self._take_id()
        self._ranks[last] = 1
        added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        self._tokenizer["added_tokens"].append({"id": last, "content": start, **added})
        first = last
        for rank, piece in enumerate(self._split(answer), 2):
            token = self._vocabulary[piece] = self._take_id()
            self._ranks[token] = rank
            self._successors[last] = last = token
        rest = self._first_piece(first).removeprefix(OPENING)
        if rest not in self._used:
            self._add_rest(first, rest)

    def _add_rest(self, start: int, rest: str) -> None:
        """Add a token like the first piece, without the opening that a grammar forces where a call is required."""
        self._used.add(rest)
        token = self._vocabulary[rest] = self._take_id()
        self._rests[token] = self._successors[start]

    def _first_piece(self, start: int) -> str:
        first = self._successors[start]
        return next(piece for piece, token in self._vocabulary.items() if token == first)

    def _take_id(self) -> int:
        self._num_tokens += 1
        return self._num_tokens - 1

    def _split(self, answer: Answer) -> list[str]:
        """Return the text in pieces that are no tokens yet: a token has one successor."""
        text, pieces, start = _as_vocabulary(str(answer)), list[str](), 0
        for cut in (*_cuts(answer), len(text)):
            piece = text[start:cut]
            if cut - start >= PIECE_CHARS and piece not in self._used and piece not in pieces:
                pieces.append(piece)
                start = cut
        if start < len(text):
            pieces.append(text[start:])
        while pieces[-1] in self._used and len(pieces) > 1:
            pieces[-2:] = ["".join(pieces[-2:])]
        assert self._used.isdisjoint(pieces) and len(set(pieces)) == len(pieces), f"two answers are the same: {text!r}"
        self._used.update(pieces)
        return pieces

    def write(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text(json.dumps(self._tokenizer))
        config = json.loads((SOURCE / "config.json").read_text())
        config |= {"vocab_size": self._num_tokens, "hidden_size": WIDTH, "intermediate_size": WIDTH}
        config |= {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": WIDTH}
        config |= {
            "max_position_embeddings": 1 << 17,
            "rope_theta": 1e9,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
        }
        (folder / "config.json").write_text(json.dumps(config))
        save_file(self._tensors(), folder / "model.safetensors")

    def _tensors(self) -> dict[str, Array]:
        """Return the weights. A token's embedding is its identity, the LM head's row of its successor the same."""
        embeddings = np.zeros((self._num_tokens, WIDTH), np.float32)
        embeddings[:, CONSTANT] = 1
        embeddings[:, FILLER] = IDENTITY**0.5
        head = np.zeros_like(embeddings)
        head[END, 0] = IDENTITY**0.5
        identities = np.random.default_rng(1).choice([-1, 1], (self._num_tokens, IDENTITY)).astype(np.float32)
        identities[:, 0] = 0
        for token, rank in self._ranks.items():
            is_last = token not in self._successors
            embeddings[token, :IDENTITY] = head[END, :IDENTITY] if is_last else identities[token]
            embeddings[token, RANK], embeddings[token, FILLER] = rank / MAX_RANK, 0
        for token, successor in self._successors.items():
            head[successor, :IDENTITY] = identities[token]
        for token, first in self._rests.items():
            embeddings[token] = embeddings[first]
            # The first piece itself is preferred where it may come.
            head[token] = 0.8 * head[first]
        return {"model.embed_tokens.weight": embeddings, "lm_head.weight": head, **_layer()}


def _layer() -> dict[str, Array]:
    """Return the norms, an MLP of zeros, and attention: it adds the identity of the token with the highest rank."""
    norm, zero = np.ones(WIDTH, np.float32), np.zeros((WIDTH, WIDTH), np.float32)
    query, key, value = zero.copy(), zero.copy(), zero.copy()
    # The last dimension turns so slowly that positions play no part in the score.
    query[-1, CONSTANT] = WIDTH**0.5
    key[-1, RANK] = MAX_RANK * SCORE_PER_RANK
    value[:IDENTITY, :IDENTITY] = np.eye(IDENTITY)
    projections = {"q": query, "k": key, "v": value, "o": np.eye(WIDTH, dtype=np.float32)}
    layer = "model.layers.0."
    tensors = {"model.norm.weight": norm}
    tensors |= {f"{layer}{name}.weight": norm for name in ("input_layernorm", "post_attention_layernorm")}
    tensors |= {f"{layer}mlp.{name}_proj.weight": zero for name in ("gate", "up", "down")}
    return tensors | {f"{layer}self_attn.{name}_proj.weight": each for name, each in projections.items()}


def _cuts(answer: Answer) -> Iterator[int]:
    """Yield the places where a piece may begin: those where a grammar leaves a choice, since what it forces comes in
    other tokens. In a call these are within the texts of its arguments."""
    text = str(answer)
    if isinstance(answer, str):
        yield from range(1, len(text))
        return
    end = text.index('"arguments"')
    for value in answer.arguments.values():
        if isinstance(value, str):
            spelled = json.dumps(value)[1:-1]
            start = text.index(spelled, end)
            end = start + len(spelled)
            yield from (place for place in range(start, end) if text[place - 1] != "\\")


def _as_vocabulary(text: str) -> str:
    """Return the text as a byte-level vocabulary spells it."""
    assert text.isascii() and text.replace("\n", "").isprintable(), f"a script has only printable ASCII: {text!r}"
    return text.replace(" ", "\u0120").replace("\n", "\u010a")


def _template(sessions: Mapping[str, Session]) -> str:
    """Return the chat template, in the way of Qwen's. It ends with the token of the turn to play."""
    plays = {
        name: {"marker": marker(name), "last": len(each.answers) - 1, "has_tools": each.has_tools}
        for name, each in sessions.items()
    }
    return TEMPLATE.read_text().replace("PLAYS", json.dumps(plays))
