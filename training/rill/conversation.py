"""The chat format: special tokens, chat template, and the weights of tokens in the loss."""

from __future__ import annotations

from dataclasses import dataclass

PAD, BOS, SYSTEM, USER, ASSISTANT, END = (
    "<|pad|>", "<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>",
)  # fmt: skip
SPECIAL_TOKENS = (PAD, BOS, SYSTEM, USER, ASSISTANT, END)  # ids are the positions
ANSWER_WEIGHT = 1.0
CHAT_TEMPLATE = (
    "<|bos|>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Questions with their answers.

    `prompt_weight` is the weight of a prompt token in the loss, where an answer token has 1: documentation in a prompt
    teaches English, invented facts do not. `choice_weight` is the weight of each of an answer's first tokens: they
    choose the passage, or decline, and the rest of a quote follows from them.
    """

    turns: tuple[tuple[str, str], ...]
    system: str = ""
    prompt_weight: float = 0.1
    choice_weight: float = 1.0

    def segments(self) -> list[tuple[str, float]]:
        """Return pieces of text with special tokens, each with its weight."""
        opening = f"{BOS}{SYSTEM}{self.system}{END}" if self.system else BOS
        parts = [(opening, 0.0)]
        for question, answer in self.turns:
            parts += [(USER + question + END, self.prompt_weight), (ASSISTANT, 0.0), (answer + END, ANSWER_WEIGHT)]
        return parts

    def messages(self) -> list[dict[str, str]]:
        """Return the messages that an API client would send, without the last answer."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for question, answer in self.turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return messages[:-1]
