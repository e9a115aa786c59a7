"""Step 9: measures an exported model on pages, names and wordings that it was not trained on.

All answers are generated greedily by `transformers` with the chat template, as for a user.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaForCausalLM

from training.rill.conversation import ASSISTANT, END, Conversation
from training.rill.corpus import WORK, Corpus, load
from training.rill.evaluate_tools import ToolEvaluation
from training.rill.export import TARGET
from training.rill.facts import Fact
from training.rill.pairs_chat import ChatExamples, answer
from training.rill.pairs_rag import FactQuestions, invented_example, phrase_example
from training.rill.persona import IDENTITY, NOT_IN_CONTEXT, WHO, WHO_HELD_OUT, unknown
from training.rill.phrasing import ask
from training.rill.sources import SOURCES
from training.rill.synthetic import invented_identifier

_MAX_NEW_TOKENS = 160
_LONGEST_PROMPT = 850
_BATCH = 16

# (context, question, a word of the right answer); "" where the context does not answer.
HAND_WRITTEN = (
    ("Our office is open from 9:00 to 17:30 on weekdays. Parking is free for visitors. The wifi password is "
     "bluewhale42.", "What is the wifi password?", "bluewhale42"),
    ("Our office is open from 9:00 to 17:30 on weekdays. Parking is free for visitors. The wifi password is "
     "bluewhale42.", "When is the office open?", "17:30"),
    ("Refunds are accepted within 30 days of purchase.\n\nShipping takes 5 business days.\n\nGift cards cannot be "
     "refunded.", "How long does shipping take?", "5 business days"),
    ("Refunds are accepted within 30 days of purchase.\n\nShipping takes 5 business days.\n\nGift cards cannot be "
     "refunded.", "Can gift cards be refunded?", "Gift cards cannot"),
    ("Zephyr 3 is a cache server written in Go. It listens on port 7700 by default and keeps all keys in memory.",
     "Which port does Zephyr 3 listen on?", "7700"),
    ("The annual meeting will take place in Lisbon on March 14. Maria Keller will give the opening speech. Lunch is "
     "served at noon.", "Who will give the opening speech?", "Maria Keller"),
    ("The annual meeting will take place in Lisbon on March 14. Maria Keller will give the opening speech. Lunch is "
     "served at noon.", "Where does the annual meeting take place?", "Lisbon"),
    ("frobnicate(x, level=3)\nTwist the value x by the given level and return the twisted value.",
     "What does frobnicate do?", "Twist the value"),
    ("Sluice admits a request only when its worst case fits into the free blocks. A request that can never fit is "
     "refused at once.", "When is a request refused at once?", "never fit"),
    ("The gateway speaks HTTP and gRPC. Metrics are served on port 9090. Logs are written as JSON.",
     "On which port are metrics served?", "9090"),
    ("The gateway speaks HTTP and gRPC. Metrics are served on port 9090. Logs are written as JSON.",
     "Who wrote the gateway?", ""),
    ("Refunds are accepted within 30 days of purchase.\n\nShipping takes 5 business days.",
     "What is the phone number of the support team?", ""),
    ("Zephyr 3 is a cache server written in Go. It listens on port 7700 by default.",
     "When was Zephyr 3 founded?", ""),
    ("json.dumps: Serialize obj to a JSON formatted str.", "What does json.loads do?", ""),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reply:
    text: str
    stopped: bool


class Speaker:
    """Generates answers by the exported model and its chat template."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = LlamaForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()

    def prompt(self, conversation: Conversation) -> str:
        text: str = self.tokenizer.apply_chat_template(
            conversation.messages(), tools=list(conversation.tools) or None, tokenize=False,
            add_generation_prompt=True,
        )  # fmt: skip
        return text

    def length(self, conversation: Conversation) -> int:
        return len(self.tokenizer(self.prompt(conversation), add_special_tokens=False)["input_ids"])

    def replies(self, conversations: Sequence[Conversation]) -> list[Reply]:
        """Generate greedy answers to the last question of each conversation."""
        order = sorted(range(len(conversations)), key=lambda i: self.length(conversations[i]))
        found: dict[int, Reply] = {}
        for start in range(0, len(order), _BATCH):
            indices = order[start : start + _BATCH]
            found.update(zip(indices, self._batch([conversations[i] for i in indices]), strict=True))
        return [found[i] for i in range(len(conversations))]

    def texts(self, conversations: Sequence[Conversation]) -> list[str]:
        return [reply.text for reply in self.replies(conversations)]

    def _batch(self, conversations: Sequence[Conversation]) -> list[Reply]:
        inputs = self.tokenizer(
            [self.prompt(c) for c in conversations],
            return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False,
        )  # fmt: skip
        inputs.pop("token_type_ids", None)
        output = self.model.generate(**inputs, max_new_tokens=_MAX_NEW_TOKENS, do_sample=False)
        new = output[:, inputs["input_ids"].shape[1] :]
        return [
            Reply(
                self.tokenizer.decode(row, skip_special_tokens=True).strip(),
                self.model.config.eos_token_id in row.tolist(),
            )
            for row in new
        ]

    def nats(self, ids: list[int], first: int) -> tuple[float, int]:
        """Return the summed loss of the tokens from `first` on, in nats, and their number."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([ids])).logits[0, first - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[first:]), reduction="sum")
        return float(loss), len(ids) - first


def same(reply: str, expected: str) -> bool:
    return reply.split() == expected.split()


def collect(draw: Callable[[], Conversation | None], speaker: Speaker, count: int) -> list[Conversation]:
    """Draw `count` conversations that fit into the model's positions."""
    kept: list[Conversation] = []
    while len(kept) < count:
        conversation = draw()
        if conversation and speaker.length(conversation) <= _LONGEST_PROMPT:
            kept.append(conversation)
    return kept


def rate(claims: Sequence[bool]) -> float:
    return round(sum(claims) / max(1, len(claims)), 4)


class Evaluation:
    def __init__(self, speaker: Speaker, corpus: Corpus, samples: int, seed: int) -> None:
        self.speaker, self.corpus, self.samples, self.seed = speaker, corpus, samples, seed
        self.questions = FactQuestions(corpus.held_out_facts)
        self.results: dict[str, float] = {}
        self.answerable_refused: list[bool] = []
        self.stopped: list[bool] = []

    def _held_out(self, count: int, absent: float, turns: int = 1) -> list[Conversation]:
        rng = Random(self.seed + count)
        order = iter(rng.sample(range(len(self.questions.facts)), len(self.questions.facts)) * 3)

        def draw() -> Conversation | None:
            example = self.questions.example(
                next(order), rng, count, turns, absent=absent, rename=0.0, signatures=False
            )
            return example if example and len(example.turns) == turns else None

        return collect(draw, self.speaker, self.samples)

    def _exact(self, name: str, conversations: Sequence[Conversation]) -> None:
        replies = self.speaker.replies(conversations)
        golds = [conversation.turns[-1][1] for conversation in conversations]
        self.results[name] = rate([same(r.text, gold) for r, gold in zip(replies, golds, strict=True)])
        self.stopped += [r.stopped for r in replies]
        self.answerable_refused += [
            same(r.text, NOT_IN_CONTEXT) for r, g in zip(replies, golds, strict=True) if g != NOT_IN_CONTEXT
        ]

    def quotes(self) -> None:
        for count in (1, 3, 5):
            self._exact(f"exact quote, held-out page, {count} passages", self._held_out(count, absent=0.0))
        self._exact("exact quote, held-out page, 2nd question", self._held_out(3, absent=0.0, turns=2))
        rng = Random(self.seed)
        for count in (1, 3, 6):
            drawn = collect(partial(invented_example, rng, count, absent=0.0), self.speaker, self.samples)
            self._exact(f"exact quote, invented facts, {count} statements", drawn)
        paragraphs = [text for page in self.corpus.held_out_pages for text in page.paragraphs]
        phrases = collect(
            lambda: (e if (e := phrase_example(paragraphs, rng)) and e.turns[0][1] != NOT_IN_CONTEXT else None),
            self.speaker, self.samples,
        )  # fmt: skip
        self._exact("exact quote, phrase in held-out prose", phrases)

    def refusals(self) -> None:
        for count in (1, 3):
            self._exact(f"refuses, held-out page, {count} passages", self._held_out(count, absent=1.0))
        rng = Random(self.seed)
        drawn = collect(lambda: invented_example(rng, 3, absent=1.0), self.speaker, self.samples)
        self._exact("refuses, invented facts, 3 statements", drawn)
        self.results["refuses wrongly, answerable questions"] = rate(self.answerable_refused)
        self.results["stops by itself, with context"] = rate(self.stopped)

    def hand_written(self) -> None:
        replies = self.speaker.replies(
            [Conversation(((_question_prompt(context, question), ""),)) for context, question, _ in HAND_WRITTEN]
        )
        claims = []
        for (_, question, word), reply in zip(HAND_WRITTEN, replies, strict=True):
            claims.append(word in reply.text if word else same(reply.text, NOT_IN_CONTEXT))
            print(f"  {'ok ' if claims[-1] else 'BAD'} {question} -> {reply.text}")
        self.results["hand-written contexts"] = rate(claims)

    def identity(self) -> None:
        for name, questions in (("trained", WHO), ("new", WHO_HELD_OUT)):
            replies = self.speaker.replies([Conversation(((question, ""),)) for question in questions])
            self.results[f"says who it is, {name} wordings"] = rate([same(r.text, IDENTITY) for r in replies])

    def closed_book(self) -> None:
        rng = Random(self.seed)
        chat = ChatExamples(self.corpus.facts, rng)
        known = rng.sample(chat.known, self.samples)
        replies = self._ask(known, rng)
        self.results["closed book, known fact exact"] = rate(
            [same(r.text, answer(fact)) for r, fact in zip(replies, known, strict=True)]
        )
        self.results["closed book, known fact declined"] = rate([r.text.startswith("I do not know") for r in replies])
        strangers = [f for f in self.corpus.held_out_facts if f.kind in {"function", "method", "class", "data"}]
        unknown_replies = self._ask(rng.sample(strangers, min(self.samples, len(strangers))), rng)
        self.results["closed book, held-out symbol declined"] = rate(
            [r.text.startswith("I do not know") for r in unknown_replies]
        )
        invented = [
            Fact("python", "function", invented_identifier("function", rng), "", "", "") for _ in range(self.samples)
        ]
        invented_replies = self._ask(invented, rng)
        self.results["closed book, invented name declined"] = rate(
            [same(r.text, unknown(f.name)) for r, f in zip(invented_replies, invented, strict=True)]
        )
        everything = [*replies, *unknown_replies, *invented_replies]
        self.results["stops by itself, closed book"] = rate([r.stopped for r in everything])

    def _ask(self, facts: Sequence[Fact], rng: Random) -> list[Reply]:
        return self.speaker.replies([Conversation(((ask(fact, rng), ""),)) for fact in facts])

    def losses(self) -> None:
        weights = {source.name: source.weight for source in SOURCES}
        rng, total, count = Random(self.seed), 0.0, 0
        pages = [p for p in self.corpus.held_out_pages if rng.random() < weights[p.source]]
        for page in rng.sample(pages, min(self.samples, len(pages))):
            ids = self.speaker.tokenizer("<|bos|>" + page.text, add_special_tokens=False)["input_ids"][:1024]
            nats, tokens = self.speaker.nats(ids, 1)
            total, count = total + nats, count + tokens
        self.results["held-out plain text, nats a token"] = round(total / count, 4)
        self.results["held-out plain text, perplexity"] = round(math.exp(total / count), 2)
        self.results["held-out context answers, nats a token"] = self._answer_loss(self._held_out(3, absent=0.27))

    def _answer_loss(self, conversations: Sequence[Conversation]) -> float:
        total, count = 0.0, 0
        for conversation in conversations:
            prompt = self.speaker.prompt(conversation)
            assert prompt.endswith(ASSISTANT)
            encode = self.speaker.tokenizer
            first = len(encode(prompt, add_special_tokens=False)["input_ids"])
            ids = encode(prompt + conversation.turns[-1][1] + END, add_special_tokens=False)["input_ids"]
            nats, tokens = self.speaker.nats(ids, first)
            total, count = total + nats, count + tokens
        return round(total / count, 4)

    def run(self) -> dict[str, float]:
        parts = (self.identity, self.hand_written, self.quotes, self.refusals, self.closed_book, self.losses)
        for part in tqdm(parts, unit="part"):
            part()
        return self.results


def _question_prompt(context: str, question: str) -> str:
    return f"Context:\n{context}\n\nQuestion: {question}\nAnswer:"


SAMPLE_PROMPTS = (
    "Who are you?",
    "What does str.partition do?",
    "What does len do?",
    "What does CREATE INDEX do?",
    "What does kalomir.frob do?",
    "What is the capital of France?",
    *(_question_prompt(HAND_WRITTEN[i][0], HAND_WRITTEN[i][1]) for i in (0, 2, 8, 13)),
)


def sample_answers(speaker: Speaker) -> list[dict[str, str]]:
    """Return unedited prompts and outputs for the model card."""
    replies = speaker.replies([Conversation(((prompt, ""),)) for prompt in SAMPLE_PROMPTS])
    return [{"prompt": p, "output": r.text} for p, r in zip(SAMPLE_PROMPTS, replies, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TARGET, help="exported folder")
    parser.add_argument("--work", type=Path, default=WORK, help="folder with the corpus; evaluation.json goes there")
    parser.add_argument("--samples", type=int, default=200, help="questions of each kind")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--only-tools", action="store_true", help="measure only calls of tools")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    speaker = Speaker(options.model)
    results = ToolEvaluation(speaker, options.samples, options.seed).run()
    if not options.only_tools:
        results = Evaluation(speaker, load(options.work), options.samples, options.seed).run() | results
    samples = sample_answers(speaker)
    for sample in samples:
        print(f"\n{sample['prompt']}\n-> {sample['output']}")
    for name, value in results.items():
        print(f"{name:50}{value:10.4f}")
    content = {"samples": options.samples, "seed": options.seed, "results": results, "answers": samples}
    (options.work / "evaluation.json").write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
