"""Diffusion Policy: DDPM and DDIM on action chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from genrl.networks import Backbone, EncoderSettings, MLPBackbone
from genrl.policies.base import Chunking, ChunkPolicy, Draw, Metrics, Noise, Normalization, Start, same_time

SamplerName = Literal["ddpm", "ddim"]


@dataclass(frozen=True)
class DenoisingStep:
    """One step k -> k' of a sampler, x' = c_x0 clip(x0_hat) + c_eps eps_hat + c_x x + s z.

    Args:
        level: k, index of the noise level.
        signal, noise: sqrt(alpha_bar_k) and sqrt(1 - alpha_bar_k).
        c_x0, c_eps, c_x: weights of the (clipped) prediction of x0, of the predicted noise and of x.
        s: standard deviation of fresh noise.
    """

    level: int
    signal: float
    noise: float
    c_x0: float
    c_eps: float
    c_x: float
    s: float


def cosine_alphas_cumprod(levels: int) -> Tensor:
    """alpha_bar [levels] float32 of the squared-cosine schedule (Nichol and Dhariwal 2021), betas capped at 0.999."""

    def alpha_bar(share: float) -> float:
        return math.cos((share + 0.008) / 1.008 * math.pi / 2) ** 2

    betas = [min(1 - alpha_bar((k + 1) / levels) / alpha_bar(k / levels), 0.999) for k in range(levels)]
    return torch.cumprod(1 - torch.tensor(betas, dtype=torch.float32), 0)


def denoising_steps(
    alphas_cumprod: Tensor, steps: int, sampler: SamplerName = "ddpm", eta: float = 0.0
) -> list[DenoisingStep]:
    """The steps of a sampler, on every (levels / steps)-th level ("leading" spacing).

    DDPM: the posterior with variance beta_tilde (Ho et al. 2020, equation 7); DDIM: Song et al. 2021, equation 12. The
    last step of both goes to alpha_bar = 1.
    """
    levels = len(alphas_cumprod)
    stride = levels // steps
    found = []
    for k in range((steps - 1) * stride, -1, -stride):
        now = float(alphas_cumprod[k])
        before = float(alphas_cumprod[k - stride]) if k >= stride else 1.0
        alpha = now / before
        beta_tilde = (1 - before) / (1 - now) * (1 - alpha)
        if sampler == "ddpm":
            c_x0, c_eps = math.sqrt(before) * (1 - alpha) / (1 - now), 0.0
            c_x = math.sqrt(alpha) * (1 - before) / (1 - now)
            s = math.sqrt(max(beta_tilde, 1e-20)) if k > 0 else 0.0
        else:
            s = eta * math.sqrt(beta_tilde)
            c_x0, c_eps, c_x = math.sqrt(before), math.sqrt(max(1 - before - s**2, 0.0)), 0.0
        found.append(DenoisingStep(k, math.sqrt(now), math.sqrt(1 - now), c_x0, c_eps, c_x, s))
    return found


class DiffusionPolicy(ChunkPolicy):
    """Diffusion Policy (Chi et al. 2023): the network predicts the noise of a variance-preserving diffusion.

    Squared-cosine schedule, epsilon prediction and clipping of x0 to [-1, 1] as there. One step equals that of
    diffusers' `DDPMScheduler` or `DDIMScheduler`; the noise comes from the caller, so that it can belong to an episode
    rather than to a batch.

    Args:
        network, encoder, chunking, normalization, mask_padding: see `ChunkPolicy`.
        train_steps: noise levels.
        steps: of the sampler, a divisor of `train_steps`.
        sampler: ``"ddpm"`` or ``"ddim"``.
        eta: share of DDPM's noise that DDIM adds; 0 is deterministic.
        clip_sample: clip every prediction of x0 to [-1, 1]; needs actions that are scaled there.

    Raises:
        ValueError: steps that do not divide, another sampler, eta without DDIM, clipping of unbounded actions.
    """

    one_step: ClassVar[bool] = False
    _signal: Tensor
    _noise: Tensor

    def __init__(
        self,
        network: Backbone = MLPBackbone(),
        encoder: EncoderSettings = EncoderSettings(),
        chunking: Chunking = Chunking(),
        normalization: Normalization = Normalization(),
        mask_padding: bool = False,
        train_steps: int = 100,
        steps: int = 100,
        sampler: SamplerName = "ddpm",
        eta: float = 0.0,
        clip_sample: bool = True,
    ):
        super().__init__(network, encoder, chunking, normalization, mask_padding)
        if sampler not in get_args(SamplerName):
            raise ValueError(f"sampler = {sampler!r}; allowed are {list(get_args(SamplerName))}")
        if train_steps < 1 or not 1 <= steps <= train_steps or train_steps % steps:
            raise ValueError(
                f"steps = {steps} does not divide train_steps = {train_steps}; choose one of "
                f"{[n for n in range(1, max(train_steps, 1) + 1) if max(train_steps, 1) % n == 0][-8:]}"
            )
        if not 0 <= eta <= 1 or (eta and sampler == "ddpm"):
            raise ValueError(f"eta = {eta} with sampler = {sampler!r}; eta lies in [0, 1] and belongs to 'ddim'")
        if clip_sample and normalization.action not in ("minmax", "identity"):
            raise ValueError(
                f"clip_sample = true clips actions to [-1, 1], which normalization.action = {normalization.action!r} "
                "exceeds; use 'minmax', or clip_sample: false"
            )
        self.train_steps, self.steps, self.sampler = train_steps, steps, sampler
        self.eta, self.clip_sample = eta, clip_sample
        alphas = cosine_alphas_cumprod(train_steps)
        self._plan = denoising_steps(alphas, steps, sampler, eta)
        self.register_buffer("_signal", alphas.sqrt(), persistent=False)
        self.register_buffer("_noise", (1 - alphas).sqrt(), persistent=False)

    @property
    def nfe(self) -> int:
        return self.steps

    def _loss(
        self, x0: Tensor, cond: Tensor, weight: Tensor | None, draw: Draw, progress: float
    ) -> tuple[Tensor, Metrics]:
        eps = draw.normal(tuple(x0.shape))
        level = (draw.uniform((len(x0),)) * self.train_steps).long().clamp(max=self.train_steps - 1)  # [B]
        x = self._signal[level, None, None] * x0 + self._noise[level, None, None] * eps
        error = (self.velocity(x, self._time(level, x), cond) - eps).square()
        return self.chunk_mean(error, weight), {}

    def _sample(self, cond: Tensor, noise: Noise, start: Start | None) -> Tensor:
        x, _ = self.start_of(cond, noise, start)
        for index, step in enumerate(self._plan):
            eps_hat = self.velocity(x, same_time((step.level + 1) / self.train_steps, x), cond)
            fresh = noise(index, tuple(x.shape)).to(x) if step.s else None
            x = denoise(x, eps_hat, step, fresh, self.clip_sample)
        return x

    def _time(self, level: Tensor, like: Tensor) -> Tensor:
        """What the network sees of a noise level: (k + 1) / levels, in (0, 1]."""
        return ((level + 1) / self.train_steps).to(like.dtype)


def denoise(x: Tensor, eps_hat: Tensor, step: DenoisingStep, fresh: Tensor | None, clip: bool) -> Tensor:
    """One step; `fresh` is standard noise like x, None where the step adds none."""
    x0_hat = (x - step.noise * eps_hat) / step.signal
    if clip:
        x0_hat = x0_hat.clamp(-1, 1)
    x = step.c_x0 * x0_hat + step.c_eps * eps_hat + step.c_x * x
    return x if fresh is None else x + step.s * fresh
