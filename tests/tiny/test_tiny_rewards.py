"""Tiny reward networks: the libraries' own loading code reads them, and their scores depend on image and text."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import genrl.tiny as tiny

TEXTS = ["a red cat", "the number 5"]


@pytest.fixture(scope="module")
def images() -> list[Image.Image]:
    noise = np.random.default_rng(0).integers(0, 256, (40, 32, 3), dtype=np.uint8)
    return [Image.fromarray(noise), Image.new("RGB", (32, 32), (255, 0, 0))]


def assert_depends_on_both(scores: torch.Tensor) -> None:
    """Scores [images, texts]: neither rows nor columns are alike, nor is the table a sum of two vectors."""
    assert (scores[0] - scores[1]).abs().min() > 1e-3 and (scores[:, 0] - scores[:, 1]).abs().min() > 1e-3
    assert abs(scores[0, 0] + scores[1, 1] - scores[0, 1] - scores[1, 0]) > 1e-3


def test_clip(tmp_path, images):
    from transformers import AutoModel, AutoProcessor

    torch.manual_seed(5)
    before = torch.get_rng_state()
    folder = tiny.saved_clip(tmp_path / "clip")
    assert torch.equal(torch.get_rng_state(), before)
    model, processor = AutoModel.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    inputs = processor(text=TEXTS, images=images, padding="max_length", max_length=77, truncation=True)
    with torch.no_grad():
        assert_depends_on_both(model(**inputs.convert_to_tensors("pt")).logits_per_image)
    again = AutoModel.from_pretrained(tiny.saved_clip(tmp_path / "again")).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())


def test_open_clip(tmp_path, images):
    import open_clip

    name, weights = tiny.saved_open_clip(tmp_path / "clip")
    assert weights.is_file()
    model, _, preprocess = open_clip.create_model_and_transforms(name)
    tokens = open_clip.get_tokenizer(name)(TEXTS)
    with torch.no_grad():
        seen = model.encode_image(torch.stack([preprocess(image) for image in images]), normalize=True)
        read = model.encode_text(tokens, normalize=True)
    assert seen.shape == read.shape == (2, 32)
    assert_depends_on_both(model.logit_scale.exp().item() * seen @ read.T)
    assert (tmp_path / "clip" / "open_clip_config.json").is_file()


def test_vlm(tmp_path, images):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = tiny.saved_vlm(tmp_path / "vlm")
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    tokenizer = processor.tokenizer
    for word in ("yes", "no", " Yes", " No", "7", "0"):
        assert len(tokenizer(word, add_special_tokens=False).input_ids) == 1, word
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])

    def preference(image: Image.Image, question: str) -> float:
        """Logit of "yes" over "no" as the first word of the answer."""
        content = [{"type": "image"}, {"type": "text", "text": question}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = processor(text=[text], images=[image], return_tensors="pt")
        assert (inputs["input_ids"] == model.config.image_token_id).sum() >= 4
        with torch.no_grad():
            logits = model(**inputs).logits[0, -1]
        return float(logits[yes] - logits[no])

    assert_depends_on_both(torch.tensor([[preference(image, text) for text in TEXTS] for image in images]))


def test_vlm_sees_video(tmp_path):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = tiny.saved_vlm(tmp_path / "vlm")
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    content = [{"type": "video"}, {"type": "text", "text": "a red cat?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    answers = []
    for level in (0, 200):
        frames = torch.full((9, 3, 32, 32), level, dtype=torch.uint8)  # [F, C, H, W]
        inputs = processor(text=[text], videos=[frames], return_tensors="pt")
        with torch.no_grad():
            answers.append(model(**inputs).logits[0, -1])
    assert (answers[0] - answers[1]).abs().max() > 1e-3
