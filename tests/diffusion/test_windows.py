"""Windows are functions of (eligible steps, iteration, seed) alone."""

from __future__ import annotations

import collections
import os
import subprocess
import sys

import pytest

from genrl.diffusion import AllSteps, FixedWindow, FlowSDE, RandomWindow, Sampler, Schedule, SlidingWindow

ELIGIBLE = tuple(range(9))


@pytest.mark.parametrize(
    "window", [AllSteps(), FixedWindow(2, 3), SlidingWindow(4, 1, 25), RandomWindow(2), RandomWindow(3, last_start=1)]
)
def test_windows_depend_on_their_arguments_alone(window) -> None:
    first = [list(window(ELIGIBLE, iteration, 5)) for iteration in range(60)]
    again = [list(window(ELIGIBLE, iteration, 5)) for iteration in reversed(range(60))]
    assert first == again[::-1]
    for chosen in first:
        assert chosen == list(range(chosen[0], chosen[-1] + 1))  # consecutive, in order


def test_all_steps_and_fixed_window() -> None:
    assert list(AllSteps()((2, 4, 6), 7, 1)) == [2, 4, 6]
    assert list(FixedWindow(1, 2)((2, 4, 6), 7, 1)) == [4, 6]


def test_sliding_window_goes_from_noise_to_data_and_starts_again() -> None:
    window = SlidingWindow(size=4, stride=1, every=25)
    starts = [window(ELIGIBLE, iteration, 0)[0] for iteration in range(25 * 7)]
    assert starts == [start for start in [0, 1, 2, 3, 4, 5, 0] for _ in range(25)]
    assert list(window(ELIGIBLE, 125, 0)) == [5, 6, 7, 8]
    assert [SlidingWindow(2, 3, 1)(ELIGIBLE, k, 0)[0] for k in range(5)] == [0, 3, 6, 7, 0]


def test_random_window_is_uniform_over_every_start() -> None:
    window, n = RandomWindow(2), 8000
    counts = collections.Counter(window(ELIGIBLE, iteration, 3)[0] for iteration in range(n))
    assert sorted(counts) == list(range(8))
    expected = n / 8
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_squared < 24.3  # 0.1 % of a chi-squared variable with 7 degrees of freedom


def test_random_window_respects_its_last_start_and_its_seed() -> None:
    draws = [RandomWindow(2, last_start=3)(ELIGIBLE, iteration, 0)[0] for iteration in range(200)]
    assert set(draws) == {0, 1, 2, 3}
    other = [RandomWindow(2, last_start=3)(ELIGIBLE, iteration, 1)[0] for iteration in range(200)]
    assert draws != other


def test_random_window_is_the_same_in_every_process() -> None:
    """Python salts hash() anew in each process, which once gave every rank a window of its own."""
    code = (
        "from genrl.diffusion.windows import RandomWindow;"
        "print([RandomWindow(2)(range(9), i, 11)[0] for i in range(40)])"
    )
    command = [sys.executable, "-c", code]
    salt = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    env = os.environ | {"PYTHONHASHSEED": salt}
    other = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert other == f"{[RandomWindow(2)(ELIGIBLE, i, 11)[0] for i in range(40)]}\n"


def test_sampler_resolves_a_window_by_iteration_and_seed() -> None:
    sampler = Sampler(FlowSDE(), Schedule.uniform(10), RandomWindow(2))
    assert [sampler.steps(i, 4) for i in range(30)] == [tuple(RandomWindow(2)(range(9), i, 4)) for i in range(30)]
    assert all(9 not in sampler.steps(i, 4) for i in range(100))  # the step to data has no density


@pytest.mark.parametrize(
    "window", [FixedWindow(8, 2), FixedWindow(-1, 2), FixedWindow(0, 0), SlidingWindow(10), RandomWindow(10)]
)
def test_windows_that_do_not_fit_are_refused(window) -> None:
    with pytest.raises(ValueError, match="does not fit the 9 steps that have a density"):
        window(ELIGIBLE, 0, 0)


@pytest.mark.parametrize("arguments", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_sliding_windows_that_cannot_move_are_refused(arguments) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SlidingWindow(*arguments)


def test_a_sliding_window_reaches_the_last_steps_whatever_its_stride():
    window = SlidingWindow(size=4, stride=2, every=1)
    assert [list(window(range(9), i, 0)) for i in range(5)] == [
        [0, 1, 2, 3],
        [2, 3, 4, 5],
        [4, 5, 6, 7],
        [5, 6, 7, 8],
        [0, 1, 2, 3],
    ]
