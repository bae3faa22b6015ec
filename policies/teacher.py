"""Slowly following copies of networks, whose predictions are targets."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


class Teacher(nn.Module):
    """An exponential moving average of a module, without gradients: teacher(...) calls the averaged copy.

    It is part of a policy's `state_dict` (so that training resumes exactly) but not of `save_pretrained`, since acting
    does not need it.

    Args:
        source: the live module, which is followed. It is not registered as a child.

    Example:
        >>> live = nn.Linear(1, 1)
        >>> teacher = Teacher(live)
        >>> teacher.update(decay=0.99)
    """

    def __init__(self, source: nn.Module):
        super().__init__()
        self._source = (source,)  # a tuple hides it from torch's registration
        self.module = copy.deepcopy(source).requires_grad_(False)

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """teacher <- decay teacher + (1 - decay) live; 0 copies. Buffers are copied."""
        own, live = ([p.detach() for p in m.parameters()] for m in (self.module, *self._source))
        if decay == 0:
            torch._foreach_copy_(own, live)
        else:
            torch._foreach_lerp_(own, live, 1 - decay)
        for buffer, current in zip(self.module.buffers(), self._source[0].buffers(), strict=True):
            buffer.copy_(current)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return self.module(*args, **kwargs)
