"""Reads [context, continuation] pairs as JSON from standard input and prints each continuation's log likelihood, and
whether it is greedy, by transformers alone: `python loglikelihoods.py CHECKPOINT`. Needs torch."""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(checkpoint: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    found = []
    for context, continuation in json.load(sys.stdin):
        ids = tokenizer(context + continuation).input_ids
        start = len(tokenizer(context).input_ids)
        with torch.inference_mode():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        chosen = [logprobs[place - 1, ids[place]].item() for place in range(start, len(ids))]
        is_greedy = all(logprobs[place - 1].argmax().item() == ids[place] for place in range(start, len(ids)))
        found.append([sum(chosen), is_greedy])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
