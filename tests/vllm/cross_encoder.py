"""A small BERT that scores pairs of texts: writes its checkpoint into the folder of the argument, and what transformers
scores the pairs with that it reads from the standard input as JSON. Run with vLLM's Python."""

import json
import sys
from pathlib import Path
from typing import Any


def main(folder: Path, pairs: list[list[str]]) -> list[float]:
    import torch
    from tokenizers import Tokenizer
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(3)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(128)
    sizes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
    config = BertConfig(
        vocab_size=tokenizer.get_vocab_size(), num_hidden_layers=2, max_position_embeddings=128, num_labels=1,
        initializer_range=0.2, **sizes,
    )  # fmt: skip
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    scores = []
    for question, document in pairs:
        found = tokenizer.encode(question, document)
        with torch.no_grad():
            logits = model(torch.tensor([found.ids]), token_type_ids=torch.tensor([found.type_ids])).logits
        scores.append(float(torch.sigmoid(logits)))
    return scores


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), json.load(sys.stdin))))
