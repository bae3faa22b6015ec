"""Point mazes: the shortest way over cells, pulled straight, followed by a PD controller."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from genrl.envs.base import TaskEnv

STIFFNESS, DAMPING = 12.0, 2.0  # force per metre to the waypoint, and per speed
CLEARANCE = 0.3  # of a cell, kept from walls (the point's radius is 0.1)
TIE = 0.02  # random cost of a cell: decides between ways of equal length, and between no others


def list_experts() -> tuple[str, ...]:
    """Names of the mazes with a point in them."""
    from genrl.envs import maze

    return tuple(name for name in maze.list_envs() if name.startswith("PointMaze") or name == maze.TWO_WAYS)


def build(name: str) -> MazeExpert:
    """The expert of one maze."""
    return MazeExpert()


class MazeExpert:
    """Plans once in an episode. Where several ways are equally short, the seed decides which one it takes."""

    def reset(self, seed: int) -> None:
        """A new episode, and with it a new choice among equal ways."""
        self._rng = np.random.default_rng([seed, 0x6D617A65])
        self._way: list[np.ndarray] = []
        self._next = 0

    def __call__(self, obs: Mapping[str, np.ndarray], env: TaskEnv) -> np.ndarray:
        state = np.asarray(env.vectors["state"], np.float64)
        position, velocity, goal = state[:2], state[2:4], state[4:6]
        maze = env.simulator.env.maze  # type: ignore[attr-defined]
        if not self._way:
            self._way = [*shortest_way(maze, position, goal, self._rng)[1:], goal]
        if not free_line(maze, position, self._way[self._next]):  # pushed off its way
            self._way, self._next = [*shortest_way(maze, position, goal, self._rng)[1:], goal], 0
        while self._next + 1 < len(self._way) and free_line(maze, position, self._way[self._next + 1]):
            self._next += 1
        force = STIFFNESS * (self._way[self._next] - position) - DAMPING * velocity
        return np.clip(force, -1.0, 1.0).astype(np.float32)


def shortest_way(maze: Any, start: np.ndarray, goal: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Centres of the cells of a shortest way, ends included; ties are decided by `rng`.

    Args:
        maze: of gymnasium-robotics. start, goal: positions (x, y).

    Raises:
        ValueError: there is no way.
    """
    walls = np.array([[cell == 1 for cell in row] for row in maze.maze_map])
    costs = 1 + TIE * rng.random(walls.shape) / walls.size  # all ties together cost less than one step
    first, last = (_cell(maze, xy) for xy in (start, goal))
    best, queue = {first: 0.0}, [(0.0, first)]
    before: dict[tuple[int, int], tuple[int, int]] = {}
    while queue:
        cost, cell = heapq.heappop(queue)
        if cell == last:
            break
        if cost > best[cell]:
            continue
        for step in ((0, 1), (1, 0), (0, -1), (-1, 0)):
            near = (cell[0] + step[0], cell[1] + step[1])
            if walls[near] or cost + costs[near] >= best.get(near, np.inf):
                continue
            best[near], before[near] = cost + costs[near], cell
            heapq.heappush(queue, (best[near], near))
    if last not in best:
        raise ValueError(f"the maze has no way from cell {first} to cell {last}")
    way = [last]
    while way[-1] != first:
        way.append(before[way[-1]])
    return [maze.cell_rowcol_to_xy(np.array(cell)) for cell in reversed(way)]


def _cell(maze: Any, position: np.ndarray) -> tuple[int, int]:
    row, column = maze.cell_xy_to_rowcol(position)
    return int(row), int(column)


def free_line(maze: Any, start: np.ndarray, end: np.ndarray) -> bool:
    """Whether a straight line keeps clear of walls; `start` itself may be closer to one."""
    scale = maze.maze_size_scaling
    length = float(np.linalg.norm(end - start))
    for share in np.linspace(0, 1, max(2, int(length / (0.1 * scale)) + 1))[1:]:
        point = start + share * (end - start)
        reach = CLEARANCE * scale * min(1.0, share * length / (CLEARANCE * scale))
        for corner in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
            i, j = maze.cell_xy_to_rowcol(point + reach * np.array(corner))
            if maze.maze_map[i][j] == 1:
                return False
    return True
