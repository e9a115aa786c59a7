"""Makes a small model of text and images: writes the checkpoint, and what transformers generates with it.

Run with vLLM's Python: `seeing_model.py TEXT_MODEL FOLDER` reads a JSON array of objects with `image` (a path), `text`
and `max_tokens` from the standard input, and writes an array of token ids for each. The model is the text model with a
random image model of Idefics 3, an architecture that vLLM runs without torchvision.
"""

import json
import sys
from typing import Any

IMAGE_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
TILES = tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
"""Names of the parts that a large image is cut into."""
TEMPLATE = (
    "<|bos|>{% for message in messages %}<|{{ message.role }}|>{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_model(text_model: str, folder: str) -> tuple[Any, Any]:
    """Write the checkpoint; return the model and its processor."""
    import torch
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3Processor,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    torch.manual_seed(0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(text_model)
    tokenizer.add_special_tokens({"additional_special_tokens": [*IMAGE_TOKENS, *TILES]})
    text = LlamaForCausalLM.from_pretrained(text_model, dtype=torch.float32)
    text.resize_token_embeddings(len(tokenizer))
    vision = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    config = Idefics3Config(
        vision_config=vision,
        text_config=text.config.to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    model = Idefics3ForConditionalGeneration(config).float().eval()
    model.model.text_model.load_state_dict(text.model.state_dict())
    model.tie_weights()
    with torch.no_grad():  # so that the image matters
        model.model.connector.modality_projection.proj.weight.normal_(0, 0.2)
    model.save_pretrained(folder)
    images = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=TEMPLATE)
    processor.save_pretrained(folder)
    return model, processor


def generate(model: Any, processor: Any, image: str, text: str, max_tokens: int) -> list[int]:
    from PIL import Image

    turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}
    prompt = processor.apply_chat_template([turn], add_generation_prompt=True)
    inputs = processor(
        text=prompt, images=[Image.open(image).convert("RGB")], return_tensors="pt", add_special_tokens=False
    )
    model.generation_config.eos_token_id = None
    output = model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens)
    ids: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    return [inputs["input_ids"].shape[1], *ids]


if __name__ == "__main__":
    parts = make_model(*sys.argv[1:])
    sys.stdout.write(json.dumps([generate(*parts, **job) for job in json.load(sys.stdin)]))
