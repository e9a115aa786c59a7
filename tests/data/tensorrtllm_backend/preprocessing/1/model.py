"""Prompts and words to token ids, with a tokenizer of transformers."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils
from transformers import AutoTokenizer


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self.tokenizer = AutoTokenizer.from_pretrained(parameters["tokenizer_dir"]["string_value"])
        added = parameters.get("add_special_tokens", {}).get("string_value", "").lower()
        self.adds_special = added not in ("false", "0", "f", "n", "no")
        self.end_id = self.tokenizer.eos_token_id
        self.pad_id = self.end_id if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id

    def execute(self, requests):
        return [pb_utils.InferenceResponse(self.outputs(request)) for request in requests]

    def outputs(self, request):
        given = {each.name(): each.as_numpy() for each in request.inputs()}
        rows = len(given["QUERY"])
        prompts, lengths = self.padded(given["QUERY"])
        decoder, decoder_lengths = np.full((rows, 1), self.pad_id, np.int32), np.ones((rows, 1), np.int32)
        if "DECODER_QUERY" in given:
            decoder, decoder_lengths = self.padded(given["DECODER_QUERY"])
        arrays = {
            "INPUT_ID": prompts,
            "REQUEST_INPUT_LEN": lengths,
            "DECODER_INPUT_ID": decoder,
            "REQUEST_DECODER_INPUT_LEN": decoder_lengths,
            "REQUEST_OUTPUT_LEN": given["REQUEST_OUTPUT_LEN"],
            "BAD_WORDS_IDS": self.words(given.get("BAD_WORDS_DICT"), rows),
            "STOP_WORDS_IDS": self.words(given.get("STOP_WORDS_DICT"), rows),
            "EMBEDDING_BIAS": np.empty((rows, 0), np.float32),
            "OUT_END_ID": given.get("END_ID", np.full((rows, 1), self.end_id, np.int32)),
            "OUT_PAD_ID": given.get("PAD_ID", np.full((rows, 1), self.pad_id, np.int32)),
        }
        return [pb_utils.Tensor(name, array) for name, array in arrays.items()]

    def padded(self, texts):
        ids = [self.tokenizer.encode(text.decode(), add_special_tokens=self.adds_special) for [text] in texts]
        longest = max(map(len, ids))
        rows = [row + [self.pad_id] * (longest - len(row)) for row in ids]
        return np.array(rows, np.int32), np.array([[len(row)] for row in ids], np.int32)

    def words(self, rows, count):
        if rows is None:
            return np.empty((count, 2, 0), np.int32)
        spelled = [[self.tokenizer.encode(word.decode(), add_special_tokens=False) for word in row] for row in rows]
        spelled = [[ids for ids in row if ids] for row in spelled]
        width = max(1, *(sum(map(len, row)) for row in spelled))
        lists = np.stack([np.zeros((count, width), np.int32), np.full((count, width), -1, np.int32)], 1)
        for (flat, ends), row in zip(lists, spelled):
            if row:
                flat[: sum(map(len, row))] = np.concatenate(row)
                ends[: len(row)] = np.cumsum([len(ids) for ids in row])
        return lists
