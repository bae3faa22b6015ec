from __future__ import annotations

import numpy as np
import pytest
import torch

from genrl.rewards import EmbeddingDiversity, ImageEmbedding
from genrl.tiny import saved_clip, saved_open_clip


def pictures(count=6, side=32):
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def dino(tmp_path_factory):
    """A folder with a tiny DINOv2 and its image processor."""
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    folder = tmp_path_factory.mktemp("dino")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Dinov2Model(Dinov2Config(**sizes)).save_pretrained(folder)
    crop = {"height": 28, "width": 28}
    BitImageProcessor(size={"shortest_edge": 32}, crop_size=crop).save_pretrained(folder)
    return str(folder)


def test_a_vision_model_gives_its_pooled_output(dino):
    from transformers import AutoModel

    embedding = ImageEmbedding(dino)
    found = embedding.embed(pictures())
    with torch.no_grad():
        pixels = embedding.encoder.model.pixels(pictures())
        expected = AutoModel.from_pretrained(dino).eval()(pixel_values=pixels).pooler_output
    torch.testing.assert_close(found, torch.nn.functional.normalize(expected, dim=-1))
    assert pixels.shape[-2:] == (28, 28)


@pytest.mark.parametrize("kind", ["transformers", "open_clip"])
def test_clip_models_give_image_features(kind):
    model = str(saved_clip()) if kind == "transformers" else saved_open_clip()[0]
    embedding = ImageEmbedding(model)
    found = embedding.embed(pictures())
    assert found.shape == (6, 32)
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(6))
    torch.testing.assert_close(found, ImageEmbedding(model, batch_size=4).embed(pictures()), rtol=0, atol=1e-6)


def test_a_video_gives_the_mean_of_its_frames(dino):
    embedding = ImageEmbedding(dino)
    video = pictures().unflatten(0, (2, 3))
    mean = embedding.embed(pictures()).unflatten(0, (2, 3)).mean(1)
    torch.testing.assert_close(embedding.embed(video), mean / mean.norm(dim=-1, keepdim=True))


def test_gradients_reach_the_media(dino):
    media = pictures().requires_grad_()
    ImageEmbedding(dino).embed(media)[:, 0].sum().backward()
    assert media.grad.isfinite().all() and media.grad.abs().sum() > 0


def test_diversity_equals_brute_force_and_skips_single_prompts(dino):
    media, prompts = pictures(), ["a", "b", "a", "b", "a", "alone"]
    features = ImageEmbedding(dino).embed(media).double()

    def mean_pair(rows):
        return np.mean([1 - (features[i] @ features[j]).item() for i in rows for j in rows if i != j])

    found = EmbeddingDiversity(dino).measure(media, prompts, [{}] * 6)
    expected = (mean_pair([0, 2, 4]) + mean_pair([1, 3])) / 2
    assert found == {"embedding_distance": pytest.approx(expected, rel=1e-6)}
    assert np.isnan(EmbeddingDiversity(dino).measure(media, list("abcdef"), [{}] * 6)["embedding_distance"])


def test_copies_have_no_diversity(dino):
    copies = pictures(1).expand(4, -1, -1, -1)
    assert EmbeddingDiversity(dino).measure(copies, ["a"] * 4, [{}] * 4)["embedding_distance"] == pytest.approx(
        0, abs=1e-6
    )


def test_a_model_whose_pooled_output_is_not_in_the_checkpoint_is_refused(dino, tmp_path):
    from transformers import AutoImageProcessor, ViTConfig, ViTModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    ViTModel(ViTConfig(**sizes, intermediate_size=16), add_pooling_layer=False).save_pretrained(tmp_path)
    AutoImageProcessor.from_pretrained(dino).save_pretrained(tmp_path)
    with pytest.raises(OSError, match=r"lacks weights, such as .*pooler"):
        ImageEmbedding(str(tmp_path)).prepare("cpu", progress=False)


def test_tiny_arguments(tmp_path):
    for kind in (ImageEmbedding, EmbeddingDiversity):
        arguments = kind.tiny_arguments({"model": "large", "batch_size": 2}, tmp_path)
        assert kind(**arguments).embed(pictures(3)).shape == (3, 32) and arguments["batch_size"] == 2
