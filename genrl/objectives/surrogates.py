"""Policy losses of one denoising step.

A surrogate takes the terms of a step and returns a loss per sample. All are functions of

    l = log pi_theta(x') / pi_old(x')   and   k = KL(pi_theta || pi_old) = |mu - mu_old|^2 / (2 s^2)

in one reduction over the D latent elements. Under the old policy ``l = delta . z - k`` with ``delta = (mu - mu_old)/s``
and z the drawn noise (reduced alike), so that l has mean -k and, for the mean reduction, variance 2k/D.

Ratios are tiny here (a clip range of 1e-4 is common, 2e-6 occurs), and float32 has no numbers between 1 and
1 + 1.2e-7. Whether a ratio is outside its range is therefore decided on log-ratios, never on ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from genrl.diffusion import Reduction, reduce_elements
from genrl.objectives.divergences import expand

Number = float | Tensor
Metrics = dict[str, Tensor]
LOG_RATIO_LIMIT = 20.0  # log-ratios are clamped to +- this before exp


@dataclass(frozen=True)
class StepTerms:
    """One step of B samples.

    Args:
        log_ratio: l, [B], with gradient.
        kl_old: k, [B], in the same reduction, with gradient.
        advantage: A, [B], detached; 0 contributes exactly nothing.
        mean: mu_theta, [B, ...], with gradient.
        sample: x' as drawn in the roll-out, [B, ...].
        a: weight of x0_hat in the mean.
        std: s > 0. dt: D = t - t' > 0. kappa: |d mu / d v|. Numbers, or [B].
        dim: number of latent elements.
        reduction: ``"mean"`` or ``"sum"`` over them.
        weight: of the elements, broadcastable to ``mean`` and of mean 1 for each sample, with which l and k were
            reduced (:mod:`genrl.algorithms.token_weights`); None for 1 everywhere.
    """

    log_ratio: Tensor
    kl_old: Tensor
    advantage: Tensor
    mean: Tensor
    sample: Tensor
    a: Number
    std: Number
    dt: Number
    kappa: Number
    dim: int
    reduction: Reduction
    weight: Tensor | None = None

    def __post_init__(self) -> None:
        # A schedule's float64 must not raise the loss to float64.
        for name in ("advantage", "a", "std", "dt", "kappa"):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                object.__setattr__(self, name, value.to(self.log_ratio))


class Surrogate(Protocol):
    """What the policy-gradient algorithm needs of a surrogate.

    Attributes:
        on_policy_only: no ratio corrects for weights that have moved since the roll-out, so one update a roll-out.
    """

    on_policy_only: bool

    def __call__(self, terms: StepTerms) -> tuple[Tensor, Metrics]:
        """Loss [B] and detached scalar metrics."""
        ...

    def clip_bounds(self, terms: StepTerms) -> tuple[Number, Number] | None:
        """(low, high) of the log-ratio l outside which nothing is learned, or None without a clip."""
        ...


def auto_clip_range(
    dim: int, std: Number, reduction: Reduction, normalized: bool = False, trust_region: float = 0.02
) -> Number:
    """A clip range that means the same on every resolution, step and kernel.

    The log-ratio of a mean that moved by delta = rms(mu - mu_old)/s is, under the old policy, N(-delta^2/2, delta^2/D)
    for the mean reduction and N(-D delta^2/2, D delta^2) for the sum. "One standard deviation at the relative shift k*"
    is therefore

        k* / sqrt(D)  (mean)      k* sqrt(D)  (sum)      times s after GRPO-Guard's normalisation, which multiplies
                                                         by s.

    The raw mean -delta^2/2 is itself outside from delta^2 > 2 k* / sqrt(D) on, so for large D only the normalised form
    cuts evenly on both sides.

    Args:
        dim: D. std: s. reduction: of the log-ratio. normalized: whether it was multiplied by s.
        trust_region: k*. 0.02 fits Flow-GRPO's 1e-4 at D = 65,536 (k* = 0.026).
    """
    width: Number = trust_region * (dim**-0.5 if reduction == "mean" else dim**0.5)
    return std * width if normalized else width


def _bounds(
    clip_range: str | float | Sequence[float],
    terms: StepTerms,
    normalized: bool,
    trust_region: float,
) -> tuple[Number, Number]:
    """(low, high) on the log scale of the clipped quantity, for ratios in [1 - c_low, 1 + c_high]."""
    if isinstance(clip_range, str):  # "auto", the only name that check_clip_range accepts
        width = auto_clip_range(terms.dim, terms.std, terms.reduction, normalized, trust_region)
        return -width, width  # symmetric in the log, where the derivation of the rule lives
    low, high = (clip_range, clip_range) if isinstance(clip_range, (int, float)) else clip_range
    return math.log1p(-float(low)), math.log1p(float(high))


def check_clip_range(clip_range: Any, trust_region: float = 0.02) -> None:
    """Refuse what is not ``"auto"``, a number in (0, 1), or a pair of them, and a trust region that is not positive.

    Raises:
        ValueError: naming the value and what to use.
    """
    if not trust_region > 0:
        raise ValueError(f"trust_region = {trust_region} must be positive; 0.02 is the default")
    if isinstance(clip_range, str) and clip_range == "auto":
        return
    pair = isinstance(clip_range, (list, tuple)) and len(clip_range) == 2
    if not all(isinstance(v, (int, float)) and 0 < v < 1 for v in (clip_range if pair else [clip_range])):
        raise ValueError(
            f"clip_range = {clip_range!r}; allowed are 'auto', a number in (0, 1) or two of them as [low, high]; use "
            "'auto' if no published value is to be reproduced"
        )


def clipped(log_ratio: Tensor, advantage: Tensor, low: Number, high: Number) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate -min(r A, clip(r) A), [B], and which samples it cuts (arXiv 1707.06347, eq. 7).

    Args:
        log_ratio: l or a normalised form of it, [B].
        advantage: [B].
        low, high: bounds of the log-ratio.
    """
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    cut = ((advantage > 0) & (log_ratio > high)) | ((advantage < 0) & (log_ratio < low))
    # Beyond the limit of exp the gradient is gone as well, whatever the sign of the advantage.
    cut = cut | (log_ratio.abs() > LOG_RATIO_LIMIT)
    edge = torch.where(advantage > 0, _exp(high), _exp(low))
    loss = torch.where(cut, -edge * advantage, -ratio * advantage)
    return torch.where(advantage == 0, torch.zeros_like(loss), loss), cut


def _exp(value: Number) -> Number:
    """A number stays one: making a tensor of it on a device would wait for the device."""
    return value.exp() if isinstance(value, Tensor) else math.exp(value)


def _measure(terms: StepTerms, cut: Tensor | None, outside: Tensor | None) -> Metrics:
    """Ratio gauges, raw and normalised; tensors, so that nothing waits for the device."""
    with torch.no_grad():
        log_ratio, kl = terms.log_ratio.detach().float(), terms.kl_old.detach().float()
        ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        normal = terms.std * (log_ratio + kl)
        zero = log_ratio.new_zeros(())
        return {
            "clip_fraction": zero if cut is None else cut.float().mean(),
            "outside_fraction": zero if outside is None else outside.float().mean(),
            "ratio_mean": ratio.mean(),
            "ratio_min": ratio.min(),
            "ratio_max": ratio.max(),
            "log_ratio_mean": log_ratio.mean(),
            "log_ratio_std": log_ratio.std(correction=0),
            "normalized_mean": normal.mean(),
            "normalized_std": normal.std(correction=0),
            "kl_old": kl.mean(),
        }


@dataclass(frozen=True)
class PPOClip:
    """PPO's clip on the ratio of a step (Flow-GRPO, DanceGRPO, DDPO).

    Args:
        clip_range: ``"auto"`` (:func:`auto_clip_range`), c for ratios in [1 - c, 1 + c], or [c_low, c_high].
        trust_region: k* of the automatic range.
    """

    clip_range: Literal["auto"] | float | list[float] = "auto"
    trust_region: float = 0.02
    on_policy_only = False

    def __post_init__(self) -> None:
        check_clip_range(self.clip_range, self.trust_region)

    def clip_bounds(self, terms: StepTerms) -> tuple[Number, Number]:
        return _bounds(self.clip_range, terms, False, self.trust_region)

    def __call__(self, terms: StepTerms) -> tuple[Tensor, Metrics]:
        low, high = self.clip_bounds(terms)
        loss, cut = clipped(terms.log_ratio, terms.advantage, low, high)
        outside = (terms.log_ratio.detach() < low) | (terms.log_ratio.detach() > high)
        return loss, _measure(terms, cut, outside)


@dataclass(frozen=True)
class Guard:
    """GRPO-Guard: a centred, scale-free ratio and an even gradient over steps (arXiv 2510.22319, eq. 8 and 12).

    RatioNorm replaces l by ``s (l + k) = (mu - mu_old) . z``, whose mean is 0 and whose spread has no factor 1/s, so
    that one clip range serves every step. k carries its gradient. The loss of a step is then multiplied by delta:

        ``inv_dt``        1 / D             the flow form; published code
        ``beta_over_dt``  kappa / D^2       the paper's beta / D with beta = kappa / D
        ``inv_kappa``     1 / kappa         equalises the gradient exactly, for every kernel
        ``none``          1

    because the gradient of a step with respect to the velocity is proportional to kappa = D beta.

    Args:
        clip_range: of the normalised ratio; ``"auto"`` or a number, see :class:`PPOClip`. A published value is 2e-6.
        delta_form: see above.
        reference: delta is multiplied by this, so that the size of the loss stays comparable with other surrogates
            when gradients are clipped or regularisers added; 0.1 is D of ten uniform steps. 1 is the published form.
        trust_region: k* of the automatic range.
    """

    clip_range: Literal["auto"] | float | list[float] = "auto"
    delta_form: Literal["inv_dt", "beta_over_dt", "inv_kappa", "none"] = "inv_dt"
    reference: float = 1.0
    trust_region: float = 0.02
    on_policy_only = False

    def __post_init__(self) -> None:
        check_clip_range(self.clip_range, self.trust_region)
        if self.delta_form not in ("inv_dt", "beta_over_dt", "inv_kappa", "none"):
            raise ValueError(
                f"delta_form = {self.delta_form!r} is unknown; allowed are inv_dt, beta_over_dt, inv_kappa, none"
            )

    def delta(self, terms: StepTerms) -> Number:
        """The weight of the step's loss."""
        forms: dict[str, Number] = {
            "inv_dt": 1 / terms.dt,
            "beta_over_dt": terms.kappa / terms.dt**2,
            "inv_kappa": 1 / terms.kappa,
            "none": 1.0,
        }
        return self.reference * forms[self.delta_form]

    def clip_bounds(self, terms: StepTerms) -> tuple[Number, Number]:
        low, high = _bounds(self.clip_range, terms, True, self.trust_region)
        return low / terms.std, high / terms.std  # in units of l, near l = 0

    def __call__(self, terms: StepTerms) -> tuple[Tensor, Metrics]:
        low, high = _bounds(self.clip_range, terms, True, self.trust_region)
        normalized = terms.std * (terms.log_ratio + terms.kl_old)
        loss, cut = clipped(normalized, terms.advantage, low, high)
        outside = (normalized.detach() < low) | (normalized.detach() > high)
        return self.delta(terms) * loss, _measure(terms, cut, outside)


@dataclass(frozen=True)
class FlowDPPO:
    """Flow-DPPO: no clip; a sample that moves further away while its step's KL is already large is left out.

    The sample is masked when k > threshold and it pushes outward (A > 0 and ratio > 1, or A < 0 and ratio < 1);
    corrections are always let through (arXiv 2606.11025).

    Args:
        kl_threshold: of k in the mean reduction, 1e-5 by default; D times it is used for the sum.
    """

    kl_threshold: float = 1e-5
    on_policy_only = False

    def __post_init__(self) -> None:
        if not self.kl_threshold > 0:
            raise ValueError(
                f"kl_threshold = {self.kl_threshold} must be positive; 1e-5 is the default and inf masks nothing"
            )

    def clip_bounds(self, terms: StepTerms) -> None:
        return None

    def __call__(self, terms: StepTerms) -> tuple[Tensor, Metrics]:
        limit = self.kl_threshold * (1 if terms.reduction == "mean" else terms.dim)
        log_ratio, advantage = terms.log_ratio, terms.advantage
        outward = ((advantage > 0) & (log_ratio > 0)) | ((advantage < 0) & (log_ratio < 0))
        cut = outward & (terms.kl_old.detach() > limit)
        loss = -log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp() * advantage
        loss = torch.where(cut | (advantage == 0), torch.zeros_like(loss), loss)
        return loss, _measure(terms, cut, cut)


@dataclass(frozen=True)
class Reinforce:
    """-A log pi: no ratio and no clip, hence one update per roll-out.

    The value is -A l, which has the same gradient since the old log-probability is a constant.
    """

    on_policy_only = True

    def clip_bounds(self, terms: StepTerms) -> None:
        return None

    def __call__(self, terms: StepTerms) -> tuple[Tensor, Metrics]:
        loss = -terms.advantage * terms.log_ratio
        return torch.where(terms.advantage == 0, torch.zeros_like(loss), loss), _measure(terms, None, None)


@dataclass(frozen=True)
class ConsistencyRegression:
    """CM-GRPO's policy gradient as a regression of x0_hat (arXiv 2605.15190, eq. 8 and 9).

    For a kernel N(a x0_hat, s^2 I) with x0_hat = mu / a::

        L = || x0_hat - sg( x0_hat + A a / (2 s^2) (z - a x0_hat) ) ||^2

    whose gradient in x0_hat is that of -A log pi in the same reduction. No ratio and no clip: one update per roll-out.

    Args:
        scale: factor of the loss (the published configuration uses 100).
    """

    scale: float = 1.0
    on_policy_only = True

    def clip_bounds(self, terms: StepTerms) -> None:
        return None

    def __call__(self, terms: StepTerms) -> tuple[Tensor, Metrics]:
        a, std = expand(terms.a, terms.mean), expand(terms.std, terms.mean)
        x0_hat = terms.mean / a
        advantage = expand(terms.advantage, terms.mean)
        pull = advantage * a / (2 * std**2) * (terms.sample - terms.mean)
        # x0_hat less its own value is exactly 0, where a pull added to a large x0_hat would be rounded away.
        gap = x0_hat - x0_hat.detach() - pull.detach()
        loss = self.scale * reduce_elements(gap.square(), terms.reduction, terms.weight)
        return torch.where(terms.advantage == 0, torch.zeros_like(loss), loss), _measure(terms, None, None)


SURROGATES: dict[str, type] = {
    "ppo_clip": PPOClip,
    "guard": Guard,
    "flow_dppo": FlowDPPO,
    "reinforce": Reinforce,
    "consistency_regression": ConsistencyRegression,
}
"""Every surrogate there is; the tests of the invariants run over this table."""
