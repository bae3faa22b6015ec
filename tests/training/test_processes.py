"""Two processes compute what one computes. One launch serves all tests: importing costs most of its time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import toy

SCRIPT = Path(__file__).with_name("two_processes.py")
NAMES = ("policy_gradient", "best_and_worst", "forward_process")


def launch(folder, processes):
    command = [sys.executable, str(SCRIPT), str(folder), str(processes)]
    if processes > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    settings = {"PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = {**os.environ, **settings}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
    (one,), two = (launch(folder, n) for folder, n in zip(folders, (1, 2), strict=True))
    return folders, one, two


def table(values):
    return torch.tensor([[[float("nan") if x is None else x for x in row] for row in part] for part in values])


@pytest.mark.parametrize("name", NAMES)
def test_first_rewards_advantages_and_prompts_are_the_same(both, name):
    _, one, two = both
    for rank in two:
        torch.testing.assert_close(
            table(one[name]["tables"][0][:2]), table(rank[name]["tables"][0][:2]), rtol=1e-6, atol=1e-6, equal_nan=True
        )
        assert one[name]["tables"][0][2] == rank[name]["tables"][0][2]
    rewards = table(one[name]["tables"][0][:1])
    assert torch.isnan(rewards).any() and not torch.isnan(rewards).all()


@pytest.mark.parametrize("name", NAMES)
def test_later_rewards_losses_gradients_and_weights_agree_within_rounding(both, name):
    folders, one, two = both
    for i in range(3):
        torch.testing.assert_close(
            table(one[name]["tables"][i][:1]), table(two[0][name]["tables"][i][:1]), rtol=0, atol=1e-5, equal_nan=True
        )
    rows = [toy.rows(folder / name, "train") for folder in folders]
    assert len(rows[0]) == len(rows[1]) == 4
    for first, second in zip(*rows, strict=True):
        assert first.keys() == second.keys()
        for key, value in first.items():  # every number, the ratio gauges among them
            if key == "cost/forward_equivalents" and name == "best_and_worst":
                continue  # a prefix is shared by the samples of a group that are drawn together, here five at a time
            expected = value if isinstance(value, str) else pytest.approx(value, rel=1e-3, abs=2e-6)
            assert second[key] == expected, key
    weights = torch.tensor([one[name]["weights"], *(rank[name]["weights"] for rank in two)])
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-5)  # measured: 1e-7
    assert torch.equal(weights[1], weights[2])  # the two processes hold the same weights, to the last bit
    assert float((weights[0] - toy.weights_of(toy.ToyGenerator())).abs().max()) > 2e-2
    resumed = torch.tensor([one[name]["resumed"], *(rank[name]["resumed"] for rank in two)])
    torch.testing.assert_close(resumed[0], resumed[1], rtol=0, atol=1e-5)
    assert torch.equal(resumed[1], resumed[2])


@pytest.mark.parametrize("name", NAMES)
def test_evaluations_agree_and_only_the_first_process_writes(both, name):
    folders, _, _ = both
    rows = [toy.rows(folder / name, "eval") for folder in folders]
    assert [[r["iteration"] for r in part] for part in rows] == [[0, 1, 2, 3, 4]] * 2
    assert rows[0][0]["eval/reward"] == pytest.approx(rows[1][0]["eval/reward"], abs=1e-6)
    assert rows[0][4]["eval/reward"] == pytest.approx(rows[1][4]["eval/reward"], abs=1e-5)
    assert sorted(p.name for p in folders[1].iterdir() if not p.name.startswith(("result", "error"))) == sorted(
        [*NAMES, "failing"]
    )
    state = {p.name for p in (folders[1] / name / "checkpoints" / "step-000004").iterdir()}
    assert state == {"training_state.pt", "model", "rng-rank0.pt", "rng-rank1.pt"}


def test_a_reward_that_fails_on_one_process_ends_both_after_saving(both):
    folders, _, _ = both
    texts = [(folders[1] / f"error-{rank}.txt").read_text() for rank in (0, 1)]
    assert texts[0].startswith("TrainingError: another process failed") and texts[1].startswith("RewardError")
    assert all("the reward server is gone" in text and "'bright'" in text for text in texts)
    checkpoints = [p.name for p in (folders[1] / "failing" / "checkpoints").iterdir()]
    assert checkpoints == ["step-000001"]
