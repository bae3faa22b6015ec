"""Tokenizers of the real classes with vocabularies of a few hundred pieces, made in memory: no files, no downloads."""

from __future__ import annotations

import collections
import itertools
import string
from collections.abc import Sequence
from typing import Any

# Words that get a token of their own, so that prompts of tests are short.
WORDS = ("a", "an", "the", "of", "photo", "picture", "red", "green", "blue", "cat", "dog", "with", "text", "number")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def byte_characters() -> list[str]:
    """The 256 printable characters by which byte-level tokenizers write bytes (GPT-2's table), sorted."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return sorted({chr(byte) for byte in kept} | {chr(256 + i) for i in range(256 - len(kept))})


def learn_merges(words: Sequence[str]) -> list[tuple[str, str]]:
    """Byte-pair merges that make one token of every word: the most frequent pair first, until nothing is left."""
    split = [list(word) for word in words]
    merges = []
    while counts := collections.Counter(pair for pieces in split for pair in itertools.pairwise(pieces)):
        best = max(sorted(counts), key=counts.__getitem__)
        merges.append(best)
        for pieces in split:
            i = 0
            while i + 1 < len(pieces):
                if (pieces[i], pieces[i + 1]) == best:
                    pieces[i : i + 2] = ["".join(best)]
                i += 1
    return merges


def clip_tokenizer() -> Any:
    """CLIPTokenizer that splits words into characters: 256 inside a word, 256 at its end, two special tokens."""
    from transformers import CLIPTokenizer

    characters = byte_characters()
    pieces = [*characters, *(c + "</w>" for c in characters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def t5_tokenizer(words: Sequence[str] = WORDS) -> Any:
    """T5TokenizerFast (also UMT5's): one token for each of `words`, else one for each ASCII character."""
    from transformers import T5TokenizerFast

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0), ("▁", -4.0)]
    pieces += [(f"▁{word}", -2.0) for word in words]
    pieces += [(c, -5.0) for c in string.printable if not c.isspace()]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=512)


def qwen_tokenizer(words: Sequence[str] = WORDS) -> Any:
    """Qwen2Tokenizer (byte-level) with Qwen's special tokens and a chat template of Qwen's form.

    Each of `words` is one token, without a space before it and with one.
    """
    from transformers import Qwen2TokenizerFast

    merges = learn_merges([form for word in dict.fromkeys(words) for form in (word, "Ġ" + word)])  # Ġ writes a space
    pieces = [*byte_characters(), *dict.fromkeys("".join(pair) for pair in merges), "<|endoftext|>"]
    tokenizer = Qwen2TokenizerFast(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *VISION_TOKENS]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def sentence_pieces(special: Sequence[str]) -> dict[str, int]:
    """Vocabulary of Llama's kind: special tokens, the 256 bytes, printable ASCII and the mark of a space."""
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [c for c in string.printable if not c.isspace()]
    return {piece: i for i, piece in enumerate(pieces)}


def llama_tokenizer() -> Any:
    """LlamaTokenizerFast that splits into characters, padding on the right as HunyuanVideo's does."""
    from transformers import LlamaTokenizerFast

    vocabulary = sentence_pieces(("<unk>", "<s>", "</s>", "<pad>"))
    return LlamaTokenizerFast(vocab=vocabulary, merges=[], pad_token="<pad>", padding_side="right")


def gemma_tokenizer() -> Any:
    """GemmaTokenizerFast that splits into characters."""
    from transformers import GemmaTokenizerFast

    vocabulary = sentence_pieces(("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"))
    return GemmaTokenizerFast(vocab=vocabulary, merges=[])
