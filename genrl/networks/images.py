"""Images: encoders without batch statistics, and crops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn


class ImageEncoder(nn.Module):
    """One vector for an image, shared over the steps of a history.

    Normalisation is GroupNorm: batch statistics would differ between training, evaluation and averaged weights.

    Args:
        shape: (C, H, W).
        network: ``"cnn"`` (strided convolutions) or ``"resnet18"`` (torchvision's, extra ``vision``).
        features: size of the vector.
        crop: side of the crop, or None.
        weights: state dict file for ResNet-18, or None for random weights; nothing is downloaded.

    Raises:
        ValueError: for another network, or a crop larger than the image.
        ImportError: for ResNet-18 without torchvision.
        FileNotFoundError: no such file of weights.
    """

    def __init__(
        self,
        shape: Sequence[int],
        network: str = "cnn",
        features: int = 64,
        crop: int | None = None,
        weights: str | None = None,
    ):
        super().__init__()
        channels, height, width = shape
        if crop is not None and crop > min(height, width):
            raise ValueError(f"crop = {crop} is larger than the image of {height} x {width}; choose at most its side")
        self.shape, self.crop, self.out_dim = (channels, height, width), crop, features
        if network == "cnn":
            self.net: nn.Module = _small_cnn(channels, features)
        elif network == "resnet18":
            self.net = resnet18(channels, features, weights)
        else:
            raise ValueError(f"image network {network!r} is unknown; allowed are 'cnn' and 'resnet18'")

    def forward(self, images: Tensor, uniform: Callable[[tuple[int, ...]], Tensor] | None = None) -> Tensor:
        """[B, T, C, H, W] in [-1, 1] -> [B, T, features]; `uniform` draws the place of random crops."""
        if self.crop is not None:
            images = crop_images(images, self.crop, uniform)
        return self.net(images.flatten(0, 1)).reshape(*images.shape[:2], -1)


def crop_images(images: Tensor, side: int, uniform: Callable[[tuple[int, ...]], Tensor] | None = None) -> Tensor:
    """Square crops of images [B, T, C, H, W] -> [B, T, C, side, side].

    All steps of a sample's history are cropped at the same place, since a jump between them would look like motion.

    Args:
        side: of the crop, at most H and W.
        uniform: shape -> numbers in [0, 1) for the places of the crops; None crops the centre.
    """
    batch, _, _, height, width = images.shape
    if uniform is None:
        top, left = (height - side) // 2, (width - side) // 2
        return images[..., top : top + side, left : left + side]
    place = uniform((batch, 2)).to(images.device)
    rooms = torch.tensor([height - side + 1, width - side + 1], device=images.device)
    corner = torch.minimum((place * rooms).long(), rooms - 1)  # [B, 2]
    span = torch.arange(side, device=images.device)
    rows = (corner[:, :1] + span)[:, None, None, :, None]  # [B, 1, 1, side, 1]
    columns = (corner[:, 1:] + span)[:, None, None, None, :]
    images = images.gather(3, rows.expand(*images.shape[:3], side, width))
    return images.gather(4, columns.expand(*images.shape[:3], side, side))


def _small_cnn(channels: int, features: int) -> nn.Module:
    layers: list[nn.Module] = []
    for size, width in zip((channels, 32, 64, 64), (32, 64, 64, 64), strict=True):
        layers += [nn.Conv2d(size, width, 3, stride=2, padding=1), nn.GroupNorm(8, width), nn.ReLU()]
    # A grid of 4 x 4 keeps where things are, which a mean over the picture would lose.
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(64 * 16, features))


def resnet18(channels: int, features: int, weights: str | None = None) -> nn.Module:
    """torchvision's ResNet-18 with GroupNorm (16 channels a group, as in Diffusion Policy) and a linear output."""
    try:
        from torchvision.models import resnet18 as make
    except ImportError as error:
        raise ImportError('ResNet-18 needs torchvision; install it with: pip install "genrl[vision]"') from error
    net = make(weights=None, norm_layer=lambda width: nn.GroupNorm(max(width // 16, 1), width))
    if weights is not None:
        _load_weights(net, weights)
    if channels != 3:
        net.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    net.fc = nn.Linear(net.fc.in_features, features)
    return net


def _load_weights(net: nn.Module, file: str) -> None:
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"encoder.image_weights = {file!r} is no file; give a state dict of ResNet-18 or null")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        state = load_file(path)
    else:
        state = torch.load(path, map_location="cpu", weights_only=True)
    own = net.state_dict()
    # Scale and shift of BatchNorm serve GroupNorm as a start; its running statistics have no counterpart.
    fitting = {k: v for k, v in state.items() if k in own and not k.startswith("fc.") and v.shape == own[k].shape}
    missing = [k for k in own if k not in fitting and not k.startswith("fc.")]
    if missing:
        raise ValueError(
            f"{file} has no fitting weights for {missing[0]} and {len(missing) - 1} others of ResNet-18; "
            "expected is a state dict with torchvision's names"
        )
    net.load_state_dict(fitting, strict=False)
