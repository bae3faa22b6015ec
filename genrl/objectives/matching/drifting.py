"""Drifting: a field that moves generated samples towards data, and the loss whose descent follows it.

A one-step generator f(eps) is trained on its own moved samples (arXiv 2602.04770)::

    L = E || f(eps) - sg[ f(eps) + V(f(eps)) ] ||^2

with a field V that vanishes where generated and data samples have the same distribution. Everything works on groups
[G, N, d]: the samples of one group share a condition (a class, a robot's state), groups never see each other unless
`shared="batch"` asks for it, and no Python loop runs over groups or samples.

| paper | here |
|---|---|
| x_1..x_N generated | `x` [G, N, d] |
| y+ , y- | `positives` [G, P, d], `negatives` [G, M, d]; by default the x are negatives too |
| T, tau | `temperature` (Laplace kernel exp(-D/T)); the width h of a Gaussian kernel exp(-D^2 / (2 h^2)) |
| A = sqrt(softmax_y * softmax_x) | `affinity="both"` |
| W+, W- | coefficients of the targets; the rows of both have the same sum |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

Kernel = Literal["laplace", "gaussian"]
Affinity = Literal["both", "targets", "separate"]
Shared = Literal["state", "batch"]

MASKED = 1e6  # added to a distance: the target is out of every softmax (the paper's constant)
OFFICIAL_MASK = 100.0  # what the published code adds to the normalised distance of a particle to itself
OFFICIAL_FLOOR = 1e-6  # its lower limit of softmax_y * softmax_x
TEMPERATURES = (0.02, 0.05, 0.2)


def mean_shift(
    x: Tensor, targets: Tensor, width: float, kernel: Kernel = "laplace", weights: Tensor | None = None
) -> Tensor:
    """Kernel mean shift V(x) = E_y[k(x,y) (y - x)] / E_y[k(x,y)], [..., N, d].

    With a Gaussian kernel of width h this is h^2 grad log p_h(x), where p_h is the targets' density smoothed by
    N(0, h^2) (Tweedie); for targets N(m, s0^2) it is h^2 (m - x) / (s0^2 + h^2).

    Args:
        x: [..., N, d]. targets: [..., M, d].
        width: temperature of the Laplace kernel or h of the Gaussian one, in the units of x, > 0.
        kernel: ``"laplace"`` exp(-|x-y| / width) or ``"gaussian"`` exp(-|x-y|^2 / (2 width^2)).
        weights: [..., M] >= 0 of the targets; a target of weight 0 is absent. A row without any target gives 0.

    Raises:
        ValueError: for an unknown kernel or a width that is not positive.
    """
    logits = _logits(_distances(x, targets), width, kernel)
    weights = torch.ones_like(targets[..., 0]) if weights is None else weights.to(targets)
    return _recentred(_softmax(logits, weights[..., None, :]), targets, x)


def drifting_field(
    x: Tensor,
    positives: Tensor,
    negatives: Tensor | None = None,
    temperature: float = 0.05,
    *,
    self_negatives: bool = True,
    positive_weights: Tensor | None = None,
    negative_weights: Tensor | None = None,
    kernel: Kernel = "laplace",
    affinity: Affinity = "both",
    floor: float = 0.0,
) -> Tensor:
    """The field V of attraction to positives and repulsion from negatives, [G, N, d], in the units of x.

    Three ways to weigh the targets, with k the kernel and D the distances:

    - ``"both"`` (the paper's batch algorithm): A = sqrt(softmax over targets of both kinds * softmax over x), then
      W+ = A+ * (row sum of A-), W- = A- * (row sum of A+), V = W+ y+ - W- y-. The softmax over x lets particles compete
      for a target: the nearest is pulled most, so that several particles cover several modes.
    - ``"targets"``: the same with A = softmax over targets alone. V is then Z+ Z- times the next one, where Z+ and Z-
      are the shares of the kernel's mass that lie on positives and on negatives.
    - ``"separate"``: V = mean shift to the positives less mean shift to the negatives, the plug-in estimate of the
      field's definition.

    Exchanging positives and negatives changes V's sign, so that V = 0 where both are the same set. With
    `self_negatives` every particle is left out of its own negatives; the two sets then differ by one, and V is not
    exactly 0 even when the positives are a copy of x.

    **One positive.** With P = 1 the attraction is a multiple of y - x whatever the kernel: a regression onto the data
    point. Repulsion between the particles keeps their spread, and the competition of ``"both"`` keeps their modes.

    Args:
        x: particles [G, N, d]. positives: [G, P, d]. negatives: further ones [G, M, d], or None.
        temperature: of the Laplace kernel, or h of the Gaussian one, in the units of x.
        self_negatives: the particles are negatives of each other.
        positive_weights, negative_weights: [G, P] and [G, M], >= 0, factors of A; a target of weight 0 is absent. The
            particles' own weight is 1.
        kernel: see :func:`mean_shift`.
        affinity: see above.
        floor: least value of A^2 (not with ``"separate"``), so that a particle far from every target still moves. The
            published code uses 1e-6, as :func:`drifting_loss` does by default. A particle's own entry stays 0.

    Raises:
        ValueError: for shapes that do not fit, unknown names, a temperature that is not positive, or particles that
            have no negative (N = 1 and none given).
    """
    distance, targets, weights, absent = _pairs(
        x, positives, negatives, self_negatives, positive_weights, negative_weights
    )
    coefficients = _coefficients(distance, positives.shape[1], weights, absent, temperature, kernel, affinity, floor)
    return _recentred(coefficients, targets, x)


def drifting_loss(
    x: Tensor,
    positives: Tensor,
    negatives: Tensor | None = None,
    temperatures: Sequence[float] = TEMPERATURES,
    *,
    positive_weights: Tensor | None = None,
    negative_weights: Tensor | None = None,
    mask: Tensor | None = None,
    kernel: Kernel = "laplace",
    affinity: Affinity = "both",
    shared: Shared = "state",
    min_scale: float = 1e-3,
    floor: float = OFFICIAL_FLOOR,
    official: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of drifting, normalised as in the paper, [G].

    In every group distances are divided by their mean S and coordinates by S / sqrt(d), so that temperatures are
    relative to the group's own spread. The field of each temperature is divided by the root mean square of its
    elements, and the loss is the mean square between the particles and their copies moved by the sum.

    **The value says nothing**: it is 1 for one temperature, whatever the samples are. Watch ``force`` instead.

    **Whose scale.** With ``shared="state"`` S and the root mean square belong to one group: a state whose actions
    scatter little is pushed, relative to its scatter, as hard as one whose actions scatter much, and a group's gradient
    does not depend on which groups share its batch. ``shared="batch"`` takes both over the batch, as the published code
    does: states of small scatter get temperatures too wide for them and hardly any force. `min_scale` bounds the
    gradient of a state whose particles and data coincide; it is a fraction of the unit range of normalised actions.

    Particles are not clipped here, and must not be before: a saturated particle would lose its gradient.

    Args:
        x: particles with gradient [G, N, d]. positives, negatives: [G, P, d], [G, M, d]; see :func:`drifting_field`.
        temperatures: of the kernel, as fractions of the mean distance.
        mask: [G, d] in {0, 1}: coordinates that count; the others neither attract nor get a gradient. A group without
            any has loss 0.
        shared: ``"state"`` or ``"batch"``, see above.
        min_scale: least S / sqrt(d), in the units of x.
        floor: see :func:`drifting_field`.
        official: the published code where it differs from the paper: the mean distance counts a particle's zero
            distance to itself, and the floor applies to a particle's own entry too (its affinity is 1e-3, not 0, so
            that one particle alone is pulled to its positives).

    Returns:
        Loss [G] and detached gauges: ``force`` [G, temperatures], the un-normalised mean square of the field's elements
        in the units of x; ``scale`` [G], S / sqrt(d).

    Raises:
        ValueError: as :func:`drifting_field`, and for an empty list of temperatures.
    """
    temperatures = tuple(temperatures)
    if not temperatures:
        raise ValueError("temperatures is empty; the published ones are (0.02, 0.05, 0.2)")
    _check_choice("shared", shared, Shared)
    if not min_scale > 0:
        raise ValueError(f"min_scale = {min_scale} must be positive; 1e-3 is the published value")
    _check_shapes(x, positives, negatives)
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    keep = torch.ones_like(x[:, 0]) if mask is None else mask.to(x)  # [G, d]
    with torch.no_grad():
        y_pos = positives.to(x) * keep[:, None]
        y_neg = None if negatives is None else negatives.to(x) * keep[:, None]
        particles = x.detach() * keep[:, None]
        distance, targets, weights, absent = _pairs(
            particles, y_pos, y_neg, True, positive_weights, negative_weights, allow_single=official
        )
        size = keep.sum(1)  # [G]
        scale = _scale(distance, size, weights, absent, shared, min_scale, official)  # S / sqrt(d), [G]
        relative = distance / (scale * size.clamp(min=1).sqrt())[:, None, None]
        total, forces = torch.zeros_like(x), []
        for temperature in temperatures:
            coefficients = _coefficients(
                relative, y_pos.shape[1], weights, absent, temperature, kernel, affinity, floor, official
            )
            field = _recentred(coefficients, targets, particles) / scale[:, None, None]  # [G, N, d]
            square = field.square().sum((1, 2)) / (x.shape[1] * size.clamp(min=1))  # [G]
            forces.append(square * scale.square())
            if shared == "batch":
                square = (square * size).sum() / size.sum().clamp(min=1) * torch.ones_like(square)
            total = total + field / square.clamp(min=1e-8).sqrt()[:, None, None]
    # Particles less their own copies are exactly 0, where a move added to a large x would be rounded away.
    error = (x - x.detach()) * keep[:, None] / scale[:, None, None] - total
    loss = error.square().sum((1, 2)) / (x.shape[1] * size.clamp(min=1))
    return loss, {"force": torch.stack(forces, 1), "scale": scale}


def guidance_weight(guidance: float, particles: int, unconditional: int) -> float:
    """Weight of each unconditional negative that makes classifier-free guidance of strength alpha in training.

    Negatives ``(1 - g) q + g p_uncond`` have the fixed point ``q = alpha p - (alpha - 1) p_uncond`` with
    alpha = 1 / (1 - g). N particles see N - 1 others, so U unconditional samples of weight w give
    alpha = ((N - 1) + U w) / (N - 1) (arXiv 2602.04770).

    Args:
        guidance: alpha >= 1; 1 is none.
        particles: N >= 2. unconditional: U >= 1.

    Raises:
        ValueError: for values outside these ranges.
    """
    if guidance < 1:
        raise ValueError(f"guidance = {guidance}: the strength of guidance in drifting starts at 1, which is none")
    if particles < 2 or unconditional < 1:
        raise ValueError(
            f"guidance needs at least 2 particles and 1 unconditional negative; got {particles} and {unconditional}"
        )
    return (guidance - 1) * (particles - 1) / unconditional


# ---- pieces -----------------------------------------------------------------------------------------------


def _distances(x: Tensor, y: Tensor) -> Tensor:
    """Euclidean, [..., N, M]; not by matrix products, whose rounding matters at small distances."""
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")


def _logits(distance: Tensor, width: float, kernel: Kernel) -> Tensor:
    _check_choice("kernel", kernel, Kernel)
    if not width > 0:
        raise ValueError(f"temperature = {width} must be positive; 0.05 of the mean distance is a published value")
    return -distance / width if kernel == "laplace" else -distance.square() / (2 * width**2)


def _softmax(logits: Tensor, weights: Tensor) -> Tensor:
    """Softmax of weighted terms over the last dimension; a row whose terms all weigh 0 is 0."""
    weighted = logits + weights.log()
    top = weighted.amax(-1, keepdim=True)
    terms = (weighted - top.clamp(min=torch.finfo(top.dtype).min)).exp()
    return terms / terms.sum(-1, keepdim=True).clamp(min=torch.finfo(top.dtype).tiny)


def _recentred(coefficients: Tensor, targets: Tensor, x: Tensor) -> Tensor:
    """sum_j c_ij (y_j - x_i): the same as sum_j c_ij y_j where rows sum to 0, without its cancellation far from 0."""
    origin = x.mean(-2, keepdim=True)
    return coefficients @ (targets - origin) - coefficients.sum(-1, keepdim=True) * (x - origin)


def _pairs(
    x: Tensor,
    positives: Tensor,
    negatives: Tensor | None,
    self_negatives: bool,
    positive_weights: Tensor | None,
    negative_weights: Tensor | None,
    allow_single: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the particles see: positives, each other, negatives.

    Returns:
        Distances [G, N, T], targets [G, T, d], their weights [G, T], and where a particle meets itself [N, T].
    """
    _check_shapes(x, positives, negatives)
    n = x.shape[1]
    if negatives is None and (not self_negatives or (n == 1 and not allow_single)):
        raise ValueError(
            f"{n} particle(s) without negatives feel no force: the field is attraction times repulsion; use at least 2 "
            "particles with self_negatives, or pass negatives"
        )
    own = [x] if self_negatives else []
    targets = torch.cat([positives, *own, *([] if negatives is None else [negatives])], dim=1)
    parts = [_weights(positives, positive_weights, "positive_weights"), *(torch.ones_like(y[..., 0]) for y in own)]
    if negatives is not None:
        parts.append(_weights(negatives, negative_weights, "negative_weights"))
    weights = torch.cat(parts, dim=1)
    absent = torch.zeros(n, targets.shape[1], dtype=torch.bool, device=x.device)
    if self_negatives:
        absent[:, positives.shape[1] : positives.shape[1] + n].fill_diagonal_(True)
    return _distances(x, targets), targets, weights, absent


def _check_shapes(x: Tensor, positives: Tensor, negatives: Tensor | None) -> None:
    for name, y in (("positives", positives), ("negatives", negatives)):
        if x.dim() != 3 or (y is not None and (y.dim() != 3 or y.shape[::2] != x.shape[::2] or y.shape[1] == 0)):
            raise ValueError(
                f"x has shape {tuple(x.shape)} and {name} {None if y is None else tuple(y.shape)}; all are "
                "[groups, samples, coordinates] with equal groups and coordinates and at least one sample"
            )


def _weights(targets: Tensor, weights: Tensor | None, name: str) -> Tensor:
    if weights is None:
        return torch.ones_like(targets[..., 0])
    if weights.shape != targets.shape[:2]:
        raise ValueError(f"{name} has shape {tuple(weights.shape)}; its targets need {tuple(targets.shape[:2])}")
    return weights.to(targets)


def _scale(
    distance: Tensor, size: Tensor, weights: Tensor, absent: Tensor, shared: Shared, min_scale: float, official: bool
) -> Tensor:
    """Weighted mean distance over the root of the number of coordinates, [G]."""
    counted = weights[:, None] * (torch.ones_like(absent) if official else ~absent)  # [G, N, T]
    distance = distance / size.clamp(min=1).sqrt()[:, None, None]
    total, count = (distance * counted).sum((1, 2)), counted.sum((1, 2))
    if shared == "batch":
        total, count = total.sum().expand_as(total), count.sum().expand_as(count)
    return (total / count.clamp(min=torch.finfo(count.dtype).tiny)).clamp(min=min_scale)


def _coefficients(
    distance: Tensor,
    n_positive: int,
    weights: Tensor,
    absent: Tensor,
    temperature: float,
    kernel: Kernel,
    affinity: Affinity,
    floor: float,
    official: bool = False,
) -> Tensor:
    """[W+, -W-], [G, N, T]: what each target contributes to each particle."""
    _check_choice("affinity", affinity, Affinity)
    far = OFFICIAL_MASK if official else MASKED
    logits = _logits(distance + far * absent, temperature, kernel)
    present = weights[:, None] * ~absent if affinity == "separate" else weights[:, None]
    if affinity == "separate":
        plus, minus = (
            _softmax(logits[..., part], present[..., part]) for part in (slice(n_positive), slice(n_positive, None))
        )
        return torch.cat([plus, -minus], dim=-1)
    a = _softmax(logits, (present > 0).to(logits))
    a = (a * (logits.softmax(-2) if affinity == "both" else a)).clamp(min=floor).sqrt()
    a = a * present
    if not official:
        a = a.masked_fill(absent, 0.0)
    plus, minus = a[..., :n_positive], a[..., n_positive:]
    return torch.cat([plus * minus.sum(-1, keepdim=True), -minus * plus.sum(-1, keepdim=True)], dim=-1)


def _check_choice(name: str, value: str, kind: object) -> None:
    if value not in get_args(kind):
        raise ValueError(f"{name} = {value!r} is unknown; allowed are {', '.join(map(repr, get_args(kind)))}")
