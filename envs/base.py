"""One interface for all simulators: named observations, seeds that fix the start, success flags, time limits."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from genrl.envs.settings import PICTURES, EnvError, EnvSettings, picture_of

try:
    import gymnasium as gym
    from gymnasium.spaces import Box, Dict
except ImportError as error:
    raise EnvError(
        'environments need the package gymnasium; install a family\'s extra, for example pip install "genrl[metaworld]"'
    ) from error

if TYPE_CHECKING:
    from genrl.envs.pictures import Pictures
    from genrl.envs.rendering import Scene
    from genrl.networks.encoders import ObsSpec

Observation = dict[str, np.ndarray]
UNSPECIFIED = {"frame": "unspecified", "rotation": "unspecified"}
DISPLACEMENT = {"frame": "delta", "rotation": "none"}
TARGET = {"frame": "absolute", "rotation": "none"}


@dataclass(frozen=True)
class SimStep:
    """What one step of a simulator gave.

    Args:
        obs: the simulator's own vectors by name, float.
        reward: reward of the step.
        terminated: the task itself has ended (not the time).
        success: the goal is reached at this step.
        info: the simulator's own values.
    """

    obs: Mapping[str, np.ndarray]
    reward: float
    terminated: bool
    success: bool
    info: dict[str, Any] = field(default_factory=dict)


class Simulator(Protocol):
    """What a family implements; `TaskEnv` adds checks, pictures, time limits and the rest.

    Attributes:
        action_space: bounds of an action.
        shapes: shape of each vector that the simulator can give, by name; ``"state"`` first.
        max_steps: the family's usual episode length.
        success_rule: the family's rule, see `genrl.envs.episode_success`.
        packages: distributions whose versions decide about the results.
        has_success: the task has a notion of success (locomotion has not).
        draws: it has pictures of its own (`picture`) where there is no scene.
        actions: what the numbers of an action are: "frame" (``"delta"``, ``"absolute"`` or ``"unspecified"``) and
            "rotation" (``"axis_angle"``, ``"none"``, ...), see `genrl.envs.data.ActionRepresentation`.
    """

    action_space: Box
    shapes: dict[str, tuple[int, ...]]
    max_steps: int
    success_rule: str
    packages: tuple[str, ...]
    has_success: bool
    draws: bool
    actions: dict[str, str]

    def reset(self, seed: int) -> SimStep:
        """Start the episode that the seed determines, whatever happened before (reward 0)."""
        ...

    def step(self, action: np.ndarray) -> SimStep:
        """One control step; never raises after a time limit, never resets."""
        ...

    def scene(self) -> Scene | None:
        """What the renderers draw; None if the simulator does not use MuJoCo."""
        ...

    def picture(self, size: int) -> np.ndarray | None:
        """The simulator's own picture [H, W, 3] uint8, of about this size; None if it does not draw."""
        ...

    def close(self) -> None:
        """Free the simulator."""
        ...


class TaskEnv(gym.Env):
    """A task with named observations, made by `make_env`.

    ``reset(seed=...)`` fixes the start state completely. `step` clips the action to `action_space`, and its ``info``
    holds ``"success"`` (the goal is reached at this step), after `reset` also ``"seed"``. An episode is cut
    (truncated) at `max_steps`; stepping on is allowed, nothing resets itself. Observations are fresh arrays: float32
    vectors, uint8 images [3, H, W], uint8 depth [1, H, W] and float32 points [N, 3 or 6].

    Args:
        settings: what was asked for.
        simulator: the family's part.

    Attributes:
        settings: the settings.
        family: name of the family, ``"metaworld"`` for example, ``"own"`` for an environment of yours.
        max_steps: length at which episodes are cut.
        success_rule: ``"any"``, ``"final"``, ``"hold:K"`` or ``"count:K"``.
        action_representation: "frame" and "rotation" of the actions, which those of data and policy must equal.
        simulator: the family's object (scripted experts look inside).
        elapsed: steps since the last reset.
        vectors: all vectors that the simulator gave last, asked for or not (scripted experts see the state of a task
            whose policy sees points).

    Raises:
        EnvError: an observation that this environment does not have.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 (gymnasium's own declaration)
    render_mode = "rgb_array"

    def __init__(self, settings: EnvSettings, simulator: Simulator, family: str) -> None:
        self.settings = settings
        self.simulator = simulator
        self.family = family
        self.max_steps = settings.max_steps or simulator.max_steps
        self.success_rule = settings.success or simulator.success_rule
        self.action_representation = dict(simulator.actions)
        self.elapsed = 0
        self.vectors: Mapping[str, np.ndarray] = {}
        self._seed: int | None = None  # of this episode; None before the first reset
        self._pictures: Pictures | None = None  # made at the first picture, in the process that needs it
        self.action_space = simulator.action_space
        # Pairs, not a dictionary, whose names gymnasium would sort.
        self.observation_space = Dict([(name, self._space(name)) for name in settings.observations])

    def _space(self, name: str) -> Box:
        size = self.settings.image_size
        if name in self.simulator.shapes:
            return Box(-np.inf, np.inf, self.simulator.shapes[name], np.float32)
        picture = picture_of(name)
        if picture is None:
            raise EnvError(
                f"{self.settings.id} has no observation {name!r}; it has {', '.join(self.simulator.shapes)}, "
                f"{', '.join(PICTURES)} and <camera>_image, <camera>_depth"
            )
        kind, camera = picture
        self._check_picture(name, kind, camera)
        if kind == "points":
            return Box(-np.inf, np.inf, (self.settings.points, 6 if self.settings.point_colors else 3), np.float32)
        return Box(0, 255, (3 if kind == "image" else 1, size, size), np.uint8)

    def _check_picture(self, name: str, kind: str, camera: str | None) -> None:
        scene = self.simulator.scene()
        if scene is not None:
            from genrl.envs.rendering import camera_of

            camera_of(scene, camera or self.settings.camera)
        elif name != "image" or not self.simulator.draws:
            raise EnvError(
                f"{self.settings.id} has no {name} observations: its simulator offers "
                + ("one picture (image) and no depth" if self.simulator.draws else "no pictures")
            )

    @property
    def specs(self) -> dict[str, ObsSpec]:
        """Shape and kind of each observation, as encoders want them."""
        from genrl.networks.encoders import ObsSpec

        kinds: dict[str, Any] = {"image": "image", "depth": "image", "points": "points"}
        pictures = {
            name: picture_of(name) for name in self.observation_space.spaces if name not in self.simulator.shapes
        }
        return {
            name: ObsSpec(shape=space.shape, kind=kinds[pictures[name][0]] if pictures.get(name) else "state")
            for name, space in self.observation_space.spaces.items()
        }

    @property
    def has_success(self) -> bool:
        """The task has a notion of success; without one every flag is False. Of an environment of yours this is known
        once a step has reported a flag, or has not."""
        return self.simulator.has_success

    @property
    def id(self) -> str:
        """The id in the settings."""
        return self.settings.id

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, dict]:
        """Start an episode.

        Args:
            seed: determines the start state completely; None draws a seed, which ``info["seed"]`` reports.
            options: not used.

        Returns:
            Observation and ``info`` with ``"seed"`` and ``"success"`` (True if the start already is in the goal)
        """
        super().reset(seed=None if seed is None else int(seed))
        self._seed = int(seed) if seed is not None else int(self.np_random.integers(2**31 - 1))
        self.elapsed = 0
        start = self.simulator.reset(self._seed)
        return self._observe(start.obs), {**start.info, "seed": self._seed, "success": bool(start.success)}

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """One control step.

        Args:
            action: [A]; clipped to `action_space`.

        Returns:
            Observation, reward, terminated, truncated and ``info`` with ``"success"`` of this step.

        Raises:
            EnvError: the action has another size, is not finite, or the environment was not reset.
        """
        if self._seed is None:
            raise EnvError(f"{self.id}: call reset(seed=...) before the first step")
        action = np.asarray(action, np.float64).reshape(-1)
        if action.shape != self.action_space.shape or not np.isfinite(action).all():
            raise EnvError(
                f"{self.id}: an action must be {self.action_space.shape[0]} finite numbers, "
                f"got {np.array2string(action)}"
            )
        action = np.clip(action, self.action_space.low, self.action_space.high)
        result = self.simulator.step(action)
        self.elapsed += 1
        info = {**result.info, "success": bool(result.success)}
        truncated = self.elapsed >= self.max_steps
        return self._observe(result.obs), float(result.reward), bool(result.terminated), truncated, info

    def _observe(self, vectors: Mapping[str, np.ndarray]) -> Observation:
        self.vectors = vectors
        # Copies, since simulators reuse their buffers.
        return {
            name: np.array(vectors[name], np.float32) if name in self.simulator.shapes else self._picture(name)
            for name in self.settings.observations
        }

    def _picture(self, name: str) -> np.ndarray:
        scene = self.simulator.scene()
        if scene is None:
            from genrl.envs.pictures import shrunk

            picture = shrunk(self._own_picture(self.settings.image_size), self.settings.image_size)
            return np.ascontiguousarray(picture.transpose(2, 0, 1))
        kind, camera = picture_of(name) or (name, None)
        if kind == "points":
            return self.pictures.points(scene, self._seed or 0, self.elapsed)
        return self.pictures.image(scene, camera) if kind == "image" else self.pictures.depth(scene, camera)

    def _own_picture(self, size: int) -> np.ndarray:
        picture = self.simulator.picture(size)
        if picture is None:
            raise EnvError(
                f"{self.id} has no pictures; an environment of yours has them if it is made with render=True, accepts "
                'render_mode="rgb_array" and its render() returns an array [H, W, 3]'
            )
        return picture

    @property
    def pictures(self) -> Pictures:
        """Draws this environment; made when first used."""
        if self._pictures is None:
            from genrl.envs.pictures import Pictures

            self._pictures = Pictures(self.settings)
        return self._pictures

    def render(self) -> np.ndarray:
        """The current picture [H, W, 3] uint8 of `settings.camera`, for videos.

        Raises:
            EnvError: this environment cannot draw.
        """
        scene = self.simulator.scene()
        if scene is not None:
            return self.pictures.frame(scene)
        return self._own_picture(self.settings.render_size)

    def versions(self) -> dict[str, str]:
        """Versions of Python and of the packages that decide about results of this environment."""
        found = {"python": platform.python_version()}
        for name in ("numpy", "gymnasium", *self.simulator.packages):
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                found[name] = "unknown"
        if self._pictures is not None:
            found["renderer"] = self._pictures.name()
        return found

    def close(self) -> None:
        """Free the renderer and the simulator."""
        if self._pictures is not None:
            self._pictures.close()
            self._pictures = None
        self.simulator.close()
