"""Encoders from checkpoints: any CLIP-like or vision model of transformers, any model of open_clip."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .base import nearest_name
from .encoders import LoadedModel, explained
from .pixels import Pixels

SCHEMAS = ("hf-hub:", "local-dir:")


def load_transformers(owner: str, model: str, processor: str | None = None, text: bool = True) -> LoadedModel:
    """A model of transformers with image features and, if `text`, text features in the same space.

    Args:
        owner: name of the reward, for messages.
        model: hub id or folder.
        processor: hub id or folder of image processor and tokenizer, if they are not with the model.
        text: False drops a text encoder after loading.

    Raises:
        OSError: it cannot be found or read, or weights are missing in the checkpoint.
    """
    try:
        from transformers import AutoImageProcessor, AutoModel, AutoTokenizer
    except ImportError as error:
        raise ImportError(f'{owner} needs transformers. Install it with: pip install "genrl[rewards]"') from error
    with explained(owner, model):
        network, report = AutoModel.from_pretrained(model, output_loading_info=True)
        if report["missing_keys"]:
            raise ValueError(f"the checkpoint lacks weights, such as {sorted(report['missing_keys'])[0]}")
        if text and not hasattr(network, "get_text_features"):
            raise ValueError(f"{type(network).__name__} has no text features in the space of its image features")
    with explained(owner, processor or model):
        pixels = Pixels.of_processor(AutoImageProcessor.from_pretrained(processor or model))
        tokenizer: Any = AutoTokenizer.from_pretrained(processor or model) if text else None

    def image(pixel_values: Tensor) -> Tensor:
        features = getattr(network, "get_image_features", network)
        return _pooled(features(pixel_values=pixel_values))

    if not text:
        for name in ("text_model", "text_projection"):
            if hasattr(network, name):
                setattr(network, name, None)
        return LoadedModel(network, pixels, image)
    context = min(tokenizer.model_max_length, network.config.text_config.max_position_embeddings)

    def tokenize(prompts: list[str]) -> tuple[dict[str, Tensor], list[int]]:
        whole = tokenizer(prompts, verbose=False)["input_ids"]
        # Always to the full context: SigLIP was trained so, CLIP does not look beyond the end token.
        cut = tokenizer(prompts, padding="max_length", truncation=True, max_length=context, return_tensors="pt")
        return dict(cut), [len(ids) for ids in whole]

    def encode(tokens: dict[str, Tensor]) -> Tensor:
        return _pooled(network.get_text_features(**tokens))

    return LoadedModel(network, pixels, image, tokenize, encode, context, _logit_scale(network))


def _pooled(output: Any) -> Tensor:
    """[N, D] of what transformers returns: features, or a model output whose pooled state or first token counts."""
    if isinstance(output, Tensor):
        return output
    pooled = getattr(output, "pooler_output", None)
    return output.last_hidden_state[:, 0] if pooled is None else pooled.flatten(1)


def _logit_scale(network: nn.Module) -> float:
    scale = getattr(network, "logit_scale", None)
    return 1.0 if scale is None else scale.detach().float().exp().item()


def load_open_clip(
    owner: str,
    model: str,
    pretrained: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    preprocess: dict[str, Any] | None = None,
) -> LoadedModel:
    """A model of open_clip.

    Args:
        owner: name of the reward, for messages.
        model: name of an architecture ("ViT-H-14"), "hf-hub:" and an id, or "local-dir:" and a folder with
            open_clip_config.json and weights.
        pretrained: with an architecture: tag of published weights ("laion2b_s32b_b79k"), or a file.
        checkpoint: file of weights that replaces all others; its preprocessing is that of the model.
        preprocess: mean, std, interpolation or resize_mode, instead of those that belong to the weights.

    Raises:
        OSError: it cannot be found, read, or lacks weights.
        ValueError: an unknown architecture, no weights at all, or a tag that was trained with another activation.
    """
    try:
        import open_clip
    except ImportError as error:
        raise ImportError(f'{owner} needs open_clip. Install it with: pip install "genrl[rewards]"') from error
    check_open_clip(owner, model, pretrained, checkpoint)
    if not model.startswith(SCHEMAS):
        _check_architecture(owner, model, pretrained)
    forced = {f"image_{name}": value for name, value in (preprocess or {}).items()}
    with _quiet_root_logger(), explained(owner, _source(model, pretrained)):
        network, _, _ = open_clip.create_model_and_transforms(
            model,
            pretrained=pretrained,
            load_weights=checkpoint is None,
            require_pretrained=checkpoint is None,
            device="cpu",
            **forced,
        )
        tokenizer = open_clip.get_tokenizer(model)
    if checkpoint is not None:
        with explained(owner, str(checkpoint)):
            open_clip.load_checkpoint(network, str(checkpoint), strict=True)
    pixels = Pixels.of_open_clip(open_clip.get_model_preprocess_cfg(network))
    if pretrained and Path(pretrained).is_file() and not preprocess:
        warnings.warn(
            f"{owner}: {pretrained} holds weights only; taking the activation of {model} and {pixels}. If the weights "
            "were trained otherwise, values are wrong: give `preprocess`, or a folder with open_clip_config.json.",
            stacklevel=2,
        )
    context = tokenizer.context_length

    def tokenize(prompts: list[str]) -> tuple[dict[str, Tensor], list[int]]:
        return {"text": tokenizer(prompts)}, [_tokens(tokenizer, prompt) for prompt in prompts]

    def encode(tokens: dict[str, Tensor]) -> Tensor:
        return network.encode_text(tokens["text"])

    return LoadedModel(network, pixels, network.encode_image, tokenize, encode, context, _logit_scale(network))


def check_open_clip(owner: str, model: str, pretrained: Any, checkpoint: Any = None) -> None:
    """Raise ValueError if no weights, or two sources of them, are named; this needs no open_clip."""
    if model.startswith(SCHEMAS):
        if pretrained:
            raise ValueError(f"{owner}: {model!r} brings its weights; leave out pretrained={pretrained!r}.")
    elif not pretrained and not checkpoint:
        raise ValueError(
            f"{owner}: {model!r} without `pretrained` has random weights. Give a tag such as 'laion2b_s32b_b79k', a "
            "file, or a model 'hf-hub:...' or 'local-dir:...'."
        )


def _source(model: str, pretrained: str | None) -> str:
    if model.startswith(SCHEMAS):
        return model.partition(":")[2]
    return pretrained if pretrained and Path(pretrained).exists() else f"{model}, {pretrained}"


def _check_architecture(owner: str, model: str, pretrained: str | None) -> None:
    import open_clip

    config = open_clip.get_model_config(model.replace("/", "-"))
    if config is None:
        raise ValueError(f"{owner}: open_clip knows no model {model!r}; {nearest_name(model, open_clip.list_models())}")
    if not pretrained or Path(pretrained).is_file():
        return
    tag = open_clip.get_pretrained_cfg(model.replace("/", "-"), pretrained)
    if not tag:
        known = open_clip.list_pretrained_tags_by_model(model.replace("/", "-"))
        raise ValueError(f"{owner}: {model} has no weights {pretrained!r}; {nearest_name(pretrained, known)}")
    if tag.get("quick_gelu") and not config.get("quick_gelu"):
        raise ValueError(
            f"{owner}: the weights {pretrained!r} were trained with QuickGELU, {model} has GELU and would give wrong "
            f"values. Use the model '{model}-quickgelu'."
        )


def _tokens(tokenizer: Any, prompt: str) -> int:
    """The number of tokens of a prompt before it is cut."""
    if hasattr(tokenizer, "encode"):  # open_clip's own, which adds start and end
        return len(tokenizer.encode(prompt)) + 2
    return len(tokenizer.tokenizer(prompt, verbose=False)["input_ids"])


@contextlib.contextmanager
def _quiet_root_logger() -> Iterator[None]:
    """open_clip logs to the root logger, which would otherwise get a handler for good."""
    root, handler = logging.getLogger(), logging.NullHandler()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


def checkpoint_file(owner: str, source: str, filename: str) -> Path:
    """The file `filename` of a hub id or a folder, or `source` itself if that is a file."""
    path = Path(source).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        if not (path / filename).is_file():
            raise FileNotFoundError(f"{owner}: the folder {source!r} has no file {filename!r}; give the file itself.")
        return path / filename
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise ImportError(f'{owner} needs huggingface_hub. Install it with: pip install "genrl[rewards]"') from error
    with explained(owner, source):
        return Path(hf_hub_download(source, filename))


def read_weights(owner: str, path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file or of a file that `torch.save` wrote, also under the key "state_dict"."""
    with explained(owner, str(path)):
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
        return content.get("state_dict", content)


def is_open_clip(model: str, pretrained: str | None) -> bool:
    """Whether a model is open_clip's: it has a tag or file of weights, or one of open_clip's prefixes."""
    return bool(pretrained) or model.startswith(SCHEMAS)
