"""Tokenizers of the real classes with vocabularies of a few hundred pieces, made in memory: no files, no downloads."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

# Words that get a token of their own, so that prompts of tests stay short and two prompts differ in few tokens.
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


def byte_characters() -> list[str]:
    """The 256 printable characters by which byte-level tokenizers write bytes (GPT-2's table), sorted."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return sorted({chr(byte) for byte in kept} | {chr(256 + i) for i in range(256 - len(kept))})


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
    known = {piece for piece, _ in pieces}
    characters = [c for c in string.printable if not c.isspace() and c not in known]
    pieces += [(c, -5.0) for c in characters]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=512)


def qwen_tokenizer(special: Sequence[str] = (), words: Sequence[str] = ()) -> Any:
    """Qwen2Tokenizer (byte-level) with a chat template of Qwen's form.

    Args:
        special: special tokens besides <|im_start|> and <|im_end|>.
        words: words that get a token of their own, without and with a space before them.
    """
    from transformers import Qwen2TokenizerFast

    pieces, merges = byte_characters(), []
    for word in words:
        for form in (word, "Ġ" + word):  # Ġ is the byte-level writing of a space
            for end in range(2, len(form) + 1):
                if form[:end] not in pieces:
                    pieces.append(form[:end])
                    merges.append((form[: end - 1], form[end - 1]))
    pieces.append("<|endoftext|>")
    tokenizer = Qwen2TokenizerFast(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *special]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
