"""OGBench's manipulation: the package's oracles for single objects, and a plan of which object comes next.

The oracles move one cube, press one button, slide the drawer or the window. In OGBench they serve data collection,
where the environment itself draws random targets; here the plan follows the task: what is blocked comes later, cubes
whose place is taken are parked, a locked drawer is unlocked first, and lights-out puzzles are solved exactly.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from ogbench.manipspace.oracles.markov.button_markov import ButtonMarkovOracle
from ogbench.manipspace.oracles.markov.cube_markov import CubeMarkovOracle
from ogbench.manipspace.oracles.markov.drawer_markov import DrawerMarkovOracle
from ogbench.manipspace.oracles.markov.window_markov import WindowMarkovOracle

from genrl.envs.global_draws import GlobalDraws

if TYPE_CHECKING:
    from genrl.envs.base import TaskEnv

REACHED = 0.03  # metres from its place at which a cube counts as placed (the tasks ask for 0.04)
SIDE = 0.04  # of a cube
DRAWER_OPEN, DRAWER_WIDE = -0.16, -0.12
SLID = 0.03  # from its target at which drawer and window count as there (the tasks ask for 0.04)
MIN_NORM = 0.4  # of OGBench's own data: the least speed with which its oracles approach


@dataclass(frozen=True)
class Goal:
    """What an oracle shall do: kind of oracle, and what it reads about its target."""

    kind: str
    target: dict[str, Any]


def list_experts() -> tuple[str, ...]:
    """Names of the tasks."""
    from genrl.envs import ogbench

    return tuple(name for name in ogbench.list_envs() if name.startswith(("cube", "scene", "puzzle")))


def build(name: str) -> OGBenchExpert:
    """The expert of one task."""
    return OGBenchExpert(name)


class OGBenchExpert:
    """Carries out goals one after the other until nothing is left to do.

    Args:
        name: of the task.
    """

    def __init__(self, name: str) -> None:
        self._plan = {"cube": next_cube, "scene": next_in_scene, "puzzle": next_button}[name.split("-")[0]]
        self._closed = name.startswith("puzzle")  # buttons close together are pressed with the gripper closed
        self._draws = GlobalDraws()

    def reset(self, seed: int) -> None:
        """A new episode; the seed decides where the hand goes between goals."""
        self._draws.seed(seed)
        self._goal: Goal | None = None
        self._oracles: dict[str, Any] = {}

    def __call__(self, obs: Mapping[str, np.ndarray], env: TaskEnv) -> np.ndarray:
        bare = env.simulator.env  # type: ignore[attr-defined]
        seen = bare.compute_ob_info()
        with self._draws:
            if not self._oracles:
                self._oracles = self._make(bare)
            if self._goal is None or self._oracles[self._goal.kind].done:
                self._goal = self._plan(bare, seen)
                if self._goal is not None:
                    self._oracles[self._goal.kind].reset(None, {**seen, **self._goal.target})
            if self._goal is None:  # nothing to do
                return np.zeros(env.action_space.shape, np.float32)
            action = self._oracles[self._goal.kind].select_action(None, {**seen, **self._goal.target})
        return np.clip(action, -1.0, 1.0).astype(np.float32)

    def _make(self, bare: Any) -> dict[str, Any]:
        return {
            "cube": CubeMarkovOracle(env=bare, min_norm=MIN_NORM),
            "button": ButtonMarkovOracle(env=bare, min_norm=MIN_NORM, gripper_always_closed=self._closed),
            "drawer": DrawerMarkovOracle(env=bare, min_norm=MIN_NORM),
            "window": WindowMarkovOracle(env=bare, min_norm=MIN_NORM),
        }


def next_cube(env: Any, seen: Mapping[str, Any]) -> Goal | None:
    """The next cube to move: the lowest place first, only cubes with nothing on top, onto places that are free."""
    count = env._num_cubes
    at = np.array([seen[f"privileged/block_{i}_pos"] for i in range(count)])
    places = np.array([env._data.mocap_pos[m] for m in env._cube_target_mocap_ids])
    wrong = [i for i in range(count) if np.linalg.norm(at[i] - places[i]) > REACHED]
    movable = [i for i in range(count) if not any(_on_top(at[j], at[i]) for j in range(count) if j != i)]
    for i in sorted(set(wrong) & set(movable), key=lambda i: places[i][2]):
        supported = places[i][2] < SIDE or any(
            j not in wrong and np.linalg.norm(places[i] - [0, 0, SIDE] - at[j]) < REACHED
            for j in range(count)
            if j != i
        )
        if supported and not any(_in_place(at[j], places[i]) for j in range(count) if j != i):
            return move_cube(env, i, places[i], _yaw(env, i))
    # Each misplaced cube waits for another: park one that stands in somebody's place, else any that can be moved.
    blocking = [i for i in movable if any(_in_place(at[i], places[j]) for j in wrong if j != i)]
    for i in [*blocking, *(i for i in movable if i in wrong)]:
        free = _free_place(env, [*at, *places])
        if free is not None:
            return move_cube(env, i, free, 0.0)
    return None


def move_cube(env: Any, cube: int, place: np.ndarray, yaw: float) -> Goal:
    """Carry a cube to a place."""
    target = {"target_block": cube, "target_block_pos": np.array(place), "target_block_yaw": np.array([yaw])}
    return Goal("cube", {f"privileged/{name}": value for name, value in target.items()})


def _yaw(env: Any, cube: int) -> float:
    w, x, y, z = env._data.mocap_quat[env._cube_target_mocap_ids[cube]]
    return float(np.arctan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z)))


def _on_top(upper: np.ndarray, lower: np.ndarray) -> bool:
    return bool(upper[2] > lower[2] + SIDE / 2 and np.linalg.norm(upper[:2] - lower[:2]) < SIDE)


def _in_place(cube: np.ndarray, place: np.ndarray) -> bool:
    """Whether a cube leaves no room for another one at a place."""
    return bool(abs(cube[2] - place[2]) < SIDE / 2 and np.linalg.norm(cube[:2] - place[:2]) < 1.5 * SIDE)


def _free_place(env: Any, taken: list[np.ndarray]) -> np.ndarray | None:
    """The place on the table that is farthest from all others."""
    low, high = env._target_sampling_bounds
    grid = [
        np.array([x, y, SIDE / 2]) for x in np.linspace(low[0], high[0], 5) for y in np.linspace(low[1], high[1], 9)
    ]
    gaps = [min(np.linalg.norm(place[:2] - other[:2]) for other in taken) for place in grid]
    best = int(np.argmax(gaps))
    return grid[best] if gaps[best] > 2 * SIDE else None


def press(env: Any, seen: Mapping[str, Any], button: int) -> Goal:
    """Change a button's state once."""
    target = {
        "target_button": button,
        "target_button_state": (seen[f"privileged/button_{button}_state"] + 1) % env._num_button_states,
        "target_button_top_pos": env._data.site_xpos[env._button_site_ids[button]].copy(),
    }
    return Goal("button", {f"privileged/{name}": value for name, value in target.items()})


def next_button(env: Any, seen: Mapping[str, Any]) -> Goal | None:
    """The nearest button of a solution of the lights-out puzzle."""
    change = np.array(
        [int(seen[f"privileged/button_{i}_state"] != env._target_button_states[i]) for i in range(env._num_buttons)]
    )
    presses = solve_lights_out(change.reshape(env._num_rows, env._num_cols))
    if presses is None or not presses.any():
        return None
    hand = seen["proprio/effector_pos"]
    tops = env._data.site_xpos[env._button_site_ids]
    wanted = np.flatnonzero(presses.reshape(-1))
    return press(env, seen, int(min(wanted, key=lambda i: np.linalg.norm(tops[i] - hand))))


def solve_lights_out(change: np.ndarray) -> np.ndarray | None:
    """Fewest presses that change exactly these lights, None if none do.

    A press changes its light and the four beside it. Presses commute and two cancel, so a solution is a set of buttons;
    the first row determines the others (each must put right the light above it), and all first rows are tried.

    Args:
        change: [R, C] of 0 and 1.

    Returns:
        [R, C] of 0 and 1.
    """
    rows, columns = change.shape
    best: np.ndarray | None = None
    for first in itertools.product((0, 1), repeat=columns):
        presses = np.zeros((rows, columns), int)
        presses[0] = first
        for row in range(1, rows):
            presses[row] = (change[row - 1] + lights(presses)[row - 1]) % 2
        if (lights(presses) == change).all() and (best is None or presses.sum() < best.sum()):
            best = presses
    return best


def lights(presses: np.ndarray) -> np.ndarray:
    """Which lights a set of presses [R, C] changes."""
    padded = np.pad(presses, 1)
    around = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
    return (presses + around) % 2


def next_in_scene(env: Any, seen: Mapping[str, Any]) -> Goal | None:
    """Into the drawer first, then drawer and window, then a cube on the table, last the buttons, which lock."""
    states = [int(state) for state in env._cur_button_states]
    at = seen["privileged/block_0_pos"]
    place = env._data.mocap_pos[env._cube_target_mocap_ids[0]].copy()
    drawer, window = float(seen["privileged/drawer_pos"][0]), float(seen["privileged/window_pos"][0])
    into_drawer = place[2] > 1.5 * SIDE and not env._is_in_drawer(at)
    if into_drawer and drawer > DRAWER_WIDE:
        return press(env, seen, 0) if states[0] == 0 else slide(env, seen, "drawer", DRAWER_OPEN)
    if into_drawer:
        return move_cube(env, 0, env._drawer_center, _yaw(env, 0))
    if abs(drawer - env._target_drawer_pos) > SLID:
        return press(env, seen, 0) if states[0] == 0 else slide(env, seen, "drawer", env._target_drawer_pos)
    if abs(window - env._target_window_pos) > SLID:
        return press(env, seen, 1) if states[1] == 0 else slide(env, seen, "window", env._target_window_pos)
    if place[2] < 1.5 * SIDE and np.linalg.norm(at - place) > REACHED:
        return move_cube(env, 0, place, _yaw(env, 0))
    for button, state in enumerate(states):
        if state != env._target_button_states[button]:
            return press(env, seen, button)
    return None


def slide(env: Any, seen: Mapping[str, Any], part: str, to: float) -> Goal:
    """Slide the drawer or the window to a position."""
    joint = env._model.joint(f"{part}_slide")
    axis = env._data.xaxis[joint.id]
    handle = seen[f"privileged/{part}_handle_pos"] + axis * (to - float(seen[f"privileged/{part}_pos"][0]))
    return Goal(part, {f"privileged/target_{part}_pos": np.array([to]), f"privileged/target_{part}_handle_pos": handle})
