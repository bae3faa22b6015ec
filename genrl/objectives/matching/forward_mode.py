"""The derivative of a network along a direction, by forward-mode differentiation.

PyTorch's forward mode treats every weight as if it had a tangent of zeros and multiplies by it, and has no fused rule
for the normalisations. Rules for the layers that matter make a derivative cost two to four forward passes instead of
five to nine on a CPU; every other operation keeps PyTorch's rule.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode


def directional_derivative(
    f: Callable[..., Tensor], inputs: Sequence[Tensor], directions: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """f(inputs) and d/dh f(inputs + h directions) at h = 0, both detached.

    Both are computed without autocast and without a graph for backward, in float32, or float64 for float64 inputs. A
    network that `torch.compile` has wrapped runs uncompiled here, since compiled graphs drop forward-mode derivatives.

    Args:
        f: function of as many tensors as there are inputs, for instance a network in evaluation of one batch.
        inputs, directions: pairs of tensors of the same shape.

    Raises:
        ValueError: when an operation inside f has no forward-mode derivative, or loses the derivative of the inputs.

    Example:
        >>> x = torch.tensor([1.0, 2.0])
        >>> directional_derivative(lambda x: x**2, [x], [torch.ones(2)])[1]
        tensor([2., 4.])
    """
    inputs, directions = [_full(x) for x in inputs], [_full(d) for d in directions]
    device = inputs[0].device.type
    _load_quietly()
    try:
        with (
            torch.no_grad(),
            torch.autocast(device, enabled=False),
            torch.compiler.set_stance("force_eager"),
            forward_ad.dual_level(),
            _LayerRules(),
        ):
            pairs = zip(inputs, directions, strict=True)
            value, tangent = forward_ad.unpack_dual(f(*(forward_ad.make_dual(x, d) for x, d in pairs)))
    except NotImplementedError as error:
        raise ValueError(
            f"an operation of the network has no forward-mode derivative: {error}; use an operation that has one "
            "(attention written out instead of the fused one), or the central difference: derivative='difference'"
        ) from error
    if tangent is None:
        # A derivative of 0 would be a silent error: compiled graphs, for one, drop tangents.
        raise ValueError(
            "the network's output does not depend on its inputs as far as forward mode can see; look for detach(), "
            "numpy or compiled graphs inside it, or use the central difference: derivative='difference'"
        )
    return value.detach(), tangent.detach()


@functools.cache
def _load_quietly() -> None:
    """PyTorch compiles some of its rules at first use, and warns that the compiler it uses is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with forward_ad.dual_level():
            forward_ad.make_dual(torch.zeros(1), torch.zeros(1))


def _full(x: Tensor) -> Tensor:
    x = x.detach()
    return x if x.dtype == torch.float64 else x.float()


def _linear_in_x(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The rule of y = operation(x, weight, bias): the tangent is operation(dx, weight)."""

    def rule(x: Tensor, dx: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **named: Any) -> Tensor:
        value = operation(x, weight, bias, *rest, **named)
        return forward_ad.make_dual(value, operation(dx, weight, None, *rest, **named))

    return rule


# The Jacobian of a normalisation is symmetric, so its backward pass without weight is also its forward mode.


def _layer_norm(
    x: Tensor,
    dx: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    value, mean, rstd = torch.ops.aten.native_layer_norm(x, normalized_shape, weight, bias, eps)
    keep = [True, False, False]
    tangent = torch.ops.aten.native_layer_norm_backward(dx, x, normalized_shape, mean, rstd, None, None, keep)[0]
    return forward_ad.make_dual(value, tangent if weight is None else tangent * weight)


def _group_norm(
    x: Tensor,
    dx: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    x, dx = x.contiguous(), dx.contiguous()
    sizes = (x.shape[0], x.shape[1], x[0, 0].numel(), num_groups)
    value, mean, rstd = torch.ops.aten.native_group_norm(x, weight, bias, *sizes, eps)
    keep = [True, False, False]
    tangent = torch.ops.aten.native_group_norm_backward(dx, x, mean, rstd, None, *sizes, keep)[0]
    if weight is not None:
        tangent = tangent * weight.reshape(-1, *(1,) * (x.dim() - 2))
    return forward_ad.make_dual(value, tangent)


_RULES: dict[Any, Callable[..., Tensor]] = {
    F.linear: _linear_in_x(F.linear),
    F.conv1d: _linear_in_x(F.conv1d),
    F.conv2d: _linear_in_x(F.conv2d),
    F.conv_transpose1d: _linear_in_x(F.conv_transpose1d),
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
}


class _LayerRules(TorchFunctionMode):
    """Inside, the layers above differentiate by their own rules where x alone has a tangent."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None and args and isinstance(args[0], Tensor):
            x, dx = forward_ad.unpack_dual(args[0])
            others = [*args[1:], *kwargs.values()]
            if dx is not None and not any(isinstance(a, Tensor) and _tangent(a) is not None for a in others):
                return rule(x, dx, *args[1:], **kwargs)
        return func(*args, **kwargs)


def _tangent(x: Tensor) -> Tensor | None:
    return forward_ad.unpack_dual(x).tangent
