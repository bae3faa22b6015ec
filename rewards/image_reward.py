"""ImageReward: BLIP with a head that was fitted to ratings of generated images."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .encoders import DTYPES, Dtype, check_frame_stride, explained, split_frames, warn_of_truncation
from .pixels import Pixels
from .pretrained import checkpoint_file, read_weights

HUB, FILE = "THUDM/ImageReward", "ImageReward.pt"
TOKENIZER = "google-bert/bert-base-uncased"
CONTEXT = 35  # tokens
MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the head's values over the publisher's validation set
_HEAD_WIDTH = 64  # of every attention head in BLIP
# How names of the publisher's vision transformer read in transformers.
_VISION_NAMES = (
    (r"^cls_token", "embeddings.class_embedding"),
    (r"^pos_embed", "embeddings.position_embedding"),
    (r"^patch_embed\.proj", "embeddings.patch_embedding"),
    (r"^norm\.", "post_layernorm."),
    (r"^blocks\.(\d+)\.norm(\d)", r"encoder.layers.\1.layer_norm\2"),
    (r"^blocks\.(\d+)\.attn\.proj", r"encoder.layers.\1.self_attn.projection"),
    (r"^blocks\.(\d+)\.attn\.", r"encoder.layers.\1.self_attn."),
    (r"^blocks\.(\d+)\.mlp", r"encoder.layers.\1.mlp"),
)


class ImageReward:
    """ImageReward (arXiv:2304.05977): BLIP with a head fitted to ratings, standardised; higher is preferred.

    Unbounded; images of good generators read about -1 to 1.8. The published file is read into transformers' BLIP, so
    that it needs no package of its own (`image-reward` 1.5 cannot be imported beside transformers 5, and pins timm
    0.6.13). The network was compared with the package's code at small sizes, where both agree to the last bit.

    `THUDM/ImageReward`: 446 M weights, 1.8 GB in float32, .9 GB in bfloat16. Licence Apache-2.0. Prompts are cut to 35
    tokens with one warning. A video scores the mean over its frames.

    Args:
        checkpoint: hub id or folder that has ImageReward.pt, or a file.
        tokenizer: hub id or folder of BERT's tokenizer.
        frame_stride: score every k-th frame of a video.
        batch_size: images of one forward pass.
        dtype: of the weights.
    """

    differentiable = True
    range = (-math.inf, math.inf)
    name = "image_reward"

    def __init__(
        self,
        checkpoint: str = HUB,
        tokenizer: str = TOKENIZER,
        frame_stride: int = 1,
        batch_size: int = 16,
        dtype: Dtype = "float32",
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"ImageReward: batch_size is {batch_size}; give 1 or more images a forward pass.")
        if dtype not in DTYPES:
            raise ValueError(f"ImageReward: dtype is {dtype!r}; known: {', '.join(DTYPES)}.")
        self.checkpoint, self.tokenizer = checkpoint, tokenizer
        self.batch_size, self.dtype = batch_size, DTYPES[dtype]
        self.frame_stride = check_frame_stride("ImageReward", frame_stride)
        self._network: ImageRewardNetwork | None = None
        self._tokenizer: Any = None
        self._device = torch.device("cpu")
        self._warned = False

    @classmethod
    def tiny_arguments(cls, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The arguments with a tiny random model and a tokenizer of letters."""
        path = folder / "image_reward"
        if not (path / FILE).exists():
            write_tiny(path)
        return {**arguments, "checkpoint": str(path), "tokenizer": str(path)}

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Load the model to `device`."""
        if self._network is None:
            try:
                from transformers import AutoTokenizer
            except ImportError as error:
                raise ImportError(
                    'ImageReward needs transformers. Install it with: pip install "genrl[rewards]"'
                ) from error
            path = checkpoint_file("ImageReward", self.checkpoint, FILE)
            with explained("ImageReward", self.tokenizer):
                self._tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
            state = read_weights("ImageReward", path)
            with explained("ImageReward", str(path)), torch.random.fork_rng(devices=[]):
                network = ImageRewardNetwork.of_state(state)
            self._network = network.eval().requires_grad_(False).to(self.dtype)
        self._device = torch.device(device)
        self._network.to(self._device)

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor:
        """[B] standardised reward."""
        if self._network is None:
            self.prepare(media.device, progress=False)
        frames = split_frames(media, self.frame_stride)  # [B, F, C, H, W]
        count = frames.shape[1]
        ids, mask = self._tokens(prompts)
        rows = torch.arange(len(media)).repeat_interleave(count)  # the prompt of every frame
        parts = []
        for pixels, row in zip(frames.flatten(0, 1).split(self.batch_size), rows.split(self.batch_size), strict=True):
            parts.append(self._score(pixels.to(self._device), ids[row].to(self._device), mask[row].to(self._device)))
        return torch.cat(parts).to(media.device).unflatten(0, (len(media), count)).mean(dim=1)

    def _tokens(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids and mask, [B, 35] each."""
        lengths = [len(ids) for ids in self._tokenizer(list(prompts), verbose=False)["input_ids"]]
        self._warned = warn_of_truncation("ImageReward", prompts, lengths, CONTEXT, self._warned)
        tokens = self._tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=CONTEXT, return_tensors="pt"
        )
        return tokens["input_ids"], tokens["attention_mask"]

    def _score(self, frames: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        assert self._network is not None
        with torch.autocast(self._device.type, enabled=False):
            pixels = self._network.pixels(frames).to(self.dtype)
            return (self._network(pixels, ids, mask).float() - MEAN) / STD


class ImageRewardNetwork(nn.Module):
    """BLIP's vision transformer, its text encoder that attends to the image, and five linear layers on the first token.

    Args:
        vision, text: configurations of transformers.
        widths: of the head, from its input to its one output.
    """

    def __init__(self, vision: Any, text: Any, widths: Sequence[int]) -> None:
        super().__init__()
        from transformers.models.blip.modeling_blip import BlipVisionModel
        from transformers.models.blip.modeling_blip_text import BlipTextModel

        self.vision = BlipVisionModel(vision)
        self.text = BlipTextModel(text, add_pooling_layer=False)
        # Dropout between the layers is left out: the model is only evaluated.
        self.head = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))
        side = vision.image_size
        mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
        self.pixels = Pixels((side, side), "shortest", (side, side), mean, std, crop_rounds=True)

    @classmethod
    def of_state(cls, state: dict[str, Tensor]) -> ImageRewardNetwork:
        """The network of the publisher's state dict, from whose shapes all sizes are read.

        ValueError if weights are missing or have other shapes; weights of other parts are ignored.
        """
        from transformers import BlipTextConfig, BlipVisionConfig

        vision = {_vision_name(name): value for name, value in _below(state, "blip.visual_encoder.").items()}
        text = _below(state, "blip.text_encoder.")
        text.pop("embeddings.position_ids", None)
        head = _below(state, "mlp.layers.")
        numbers = sorted({int(name.partition(".")[0]) for name in head})
        if not vision or not text or not numbers:
            raise ValueError("there is no BLIP under 'blip.' or no head under 'mlp.layers.'; give ImageReward.pt")
        head = {f"{numbers.index(int(n))}.{kind}": v for (n, kind), v in ((k.split("."), v) for k, v in head.items())}
        patch = vision["embeddings.patch_embedding.weight"]  # [D, 3, p, p]
        words = text["embeddings.word_embeddings.weight"]  # [V, D]
        patches = vision["embeddings.position_embedding"].shape[1] - 1
        network = cls(
            BlipVisionConfig(
                hidden_size=patch.shape[0],
                intermediate_size=vision["encoder.layers.0.mlp.fc1.weight"].shape[0],
                num_hidden_layers=_layers(vision, r"encoder\.layers\.(\d+)\."),
                num_attention_heads=max(1, patch.shape[0] // _HEAD_WIDTH),
                patch_size=patch.shape[-1],
                image_size=math.isqrt(patches) * patch.shape[-1],
                layer_norm_eps=1e-6,
            ),
            BlipTextConfig(
                vocab_size=words.shape[0],
                hidden_size=words.shape[1],
                intermediate_size=text["encoder.layer.0.intermediate.dense.weight"].shape[0],
                num_hidden_layers=_layers(text, r"encoder\.layer\.(\d+)\."),
                num_attention_heads=max(1, words.shape[1] // _HEAD_WIDTH),
                max_position_embeddings=text["embeddings.position_embeddings.weight"].shape[0],
                encoder_hidden_size=patch.shape[0],
                bos_token_id=None,  # ids of generation, which this model does not do
                sep_token_id=None,
            ),
            [head["0.weight"].shape[1], *(head[f"{i}.weight"].shape[0] for i in range(len(numbers)))],
        )
        network.vision.load_state_dict(vision)
        network.text.load_state_dict(text)
        network.head.load_state_dict(head)
        return network

    def forward(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """[B], of pixel values [B, 3, h, w] and tokens [B, L] with their mask."""
        image = self.vision(pixel_values=pixels).last_hidden_state  # [B, N, D]
        seen = torch.ones(image.shape[:2], dtype=torch.long, device=image.device)
        text = self.text(
            input_ids=ids,
            attention_mask=mask,
            encoder_hidden_states=image,
            encoder_attention_mask=seen,
            is_decoder=False,  # attention in both directions
        ).last_hidden_state  # [B, L, D]
        return self.head(text[:, 0])[:, 0]


def _below(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _vision_name(name: str) -> str:
    for pattern, replacement in _VISION_NAMES:
        changed, count = re.subn(pattern, replacement, name)
        if count:
            return changed
    return name


def _layers(names: dict[str, Tensor], pattern: str) -> int:
    return 1 + max(int(found[1]) for name in names if (found := re.match(pattern, name)))


def write_tiny(folder: Path) -> None:
    """A file as ImageReward.pt of one layer and 64 features for images of 32 x 32, and a tokenizer of letters."""
    from transformers import BertTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,'!-"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    folder.mkdir(parents=True, exist_ok=True)
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(folder)
    size = 64
    linear = {"attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"}
    linear |= {f"cross{name}" for name in linear} | {"intermediate.dense", "output.dense"}
    norms = {"attention.output.LayerNorm", "crossattention.output.LayerNorm", "output.LayerNorm"}
    vision, text = "blip.visual_encoder.", "blip.text_encoder."
    layer = f"{text}encoder.layer.0."
    shapes: dict[str, tuple[int, ...]] = {
        f"{vision}cls_token": (1, 1, size),
        f"{vision}pos_embed": (1, 17, size),
        f"{vision}patch_embed.proj.weight": (size, 3, 8, 8),
        f"{vision}patch_embed.proj.bias": (size,),
        f"{text}embeddings.word_embeddings.weight": (len(words), size),
        f"{text}embeddings.position_embeddings.weight": (CONTEXT, size),
    }
    sizes = {f"{vision}blocks.0.{name}": (size, size) for name in ("attn.proj", "mlp.fc1", "mlp.fc2")}
    sizes |= {f"{vision}blocks.0.attn.qkv": (3 * size, size), "mlp.layers.0": (8, size), "mlp.layers.2": (1, 8)}
    for name, (outputs, inputs) in (sizes | {f"{layer}{name}": (size, size) for name in linear}).items():
        shapes |= {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
    scales = {f"{vision}{name}" for name in ("blocks.0.norm1", "blocks.0.norm2", "norm")}
    scales |= {f"{text}embeddings.LayerNorm"} | {f"{layer}{name}" for name in norms}
    generator = torch.Generator().manual_seed(0)
    state = {name: 0.2 * torch.randn(shapes[name], generator=generator) for name in sorted(shapes)}
    for name in sorted(scales):
        state[f"{name}.weight"] = 1 + 0.2 * torch.randn(size, generator=generator)
        state[f"{name}.bias"] = 0.2 * torch.randn(size, generator=generator)
    torch.save(state, folder / FILE)
