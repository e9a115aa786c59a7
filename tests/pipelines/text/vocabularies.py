"""Small tokenizers of every family, made on the spot."""

from itertools import count

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

LINES = [
    "The quick brown fox isn't lazy . It jumps , over the dog ! And barks ?",
    "Žluťoučký kůň pěl ďábelské ódy; čaj, výlet, šťáva.",
    "模型服务器把词元一个一个地发送给客户端。漢字かな交じり文。",
    "Emoji 😀 👩‍👩‍👧 🏳️‍🌈 and combining e\u0301 n\u0303 a\u030a, RTL שלום عليكم",
    "def f(x):\n\treturn x  +  1\n",
]


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id: int | None = tokenizer.token_to_id(token)
    assert token_id is not None, token
    return token_id


def byte_level() -> Tokenizer:
    """As GPT-2 and its kin; with added tokens of both sorts, one spelled outside the byte alphabet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<a tool>", special=False), AddedToken("né€", special=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2: pieces with ▁ for the space, and bytes for what they lack."""
    number = count()
    vocabulary = {token: next(number) for token in ["<unk>", "<s>", "</s>"]}
    vocabulary |= {f"<0x{byte:02X}>": next(number) for byte in range(256)}
    pieces = {"▁", "▁▁", *"▁".join(LINES[:2]), *(f"▁{word}" for line in LINES for word in line.split())}
    vocabulary |= {piece: next(number) for piece in sorted(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ["<unk>", "<s>", "</s>"]])
    return tokenizer


def unigram() -> Tokenizer:
    """As T5: a sentencepiece Unigram model with Metaspace."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT: ## for the rest of a word, and spaces cleaned up before punctuation."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[CLS]"], show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def word_end() -> Tokenizer:
    """As GPT-1: </w> ends a word, and is a space unless it ends the text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def no_decoder() -> Tokenizer:
    """Whole words, joined by spaces."""
    words = sorted({word for line in LINES for word in line.split()})
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["[UNK]", *words])}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer
