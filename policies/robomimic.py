"""robomimic's rollout interface around a policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from genrl.policies.chunking import ChunkExecutor

if TYPE_CHECKING:
    from genrl.policies.base import ChunkPolicy


class RobomimicRollout:
    """A policy with the two methods of robomimic's `RolloutPolicy`, for its rollout loops and for robots.

    Observations are those of one time step, without batch and history; the policy keeps its history and executes its
    chunks. Images may come as robomimic's environments give them: uint8 [H, W, C] raw, or float [C, H, W] in [0, 1]
    processed; both become the uint8 [C, H, W] that genrl works on.

    Args:
        policy: a configured policy.
        seed: of the noise; episode i draws the same as episode i of another rollout with this seed.

    Example:
        >>> rollout = policy.rollout_policy()  # doctest: +SKIP
        >>> rollout.start_episode()  # doctest: +SKIP
        >>> action = rollout(env.get_observation())  # doctest: +SKIP
    """

    def __init__(self, policy: ChunkPolicy, seed: int = 0):
        self.policy = policy
        self._executor = ChunkExecutor(policy, rows=1, seed=seed, batch=None)
        self._episode = -1
        self._fresh = False

    def start_episode(self) -> None:
        """To be called before the first observation of an episode."""
        self.policy.eval()
        self._episode += 1
        self._fresh = True

    def __call__(self, ob: Mapping[str, Any], goal: Mapping[str, Any] | None = None) -> np.ndarray:
        """The action [A] for one observation {name: [*shape]}.

        Raises:
            ValueError: `start_episode` was not called, or a goal is given, which these policies do not read.
            ObservationError: a missing name or a wrong shape.
        """
        if goal is not None:
            raise ValueError("a goal was given, but the policy is not conditioned on goals; make it an observation")
        if self._episode < 0:
            raise ValueError("the episode has not begun; call start_episode() before the first observation")
        specs = self.policy.specs
        obs = {n: _image(ob[n], specs[n].shape) if specs[n].kind == "image" else ob[n] for n in specs if n in ob}
        if self._fresh:
            self._executor.start(0, self._episode, obs)
            self._fresh = False
        return self._executor.act({name: np.asarray(value)[None] for name, value in obs.items()})[0]


def _image(value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """robomimic's forms of an image as uint8 [C, H, W]; anything else as it is, for the executor to refuse."""
    image = np.asarray(value)
    channels, height, width = shape
    if image.shape == (height, width, channels) and image.shape != shape:
        image = image.transpose(2, 0, 1)
    if np.issubdtype(image.dtype, np.floating) and image.size and image.min() >= 0 and image.max() <= 1:
        image = (image * 255).round().astype(np.uint8)
    return image
