"""Two processes train the policy that one trains."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import toy_demos

SCRIPT = Path(__file__).with_name("two_imitations.py")


def launch(folder, processes):
    command = [sys.executable, str(SCRIPT), str(folder), str(processes)]
    if processes > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    path = f"{SCRIPT.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
    (one,), two = (launch(folder, n) for folder, n in zip(folders, (1, 2), strict=True))
    return folders, one, two


@pytest.mark.parametrize("name", ["flow", "flow resumed", "mean_flow", "mean_flow resumed", "acting"])
def test_weights_are_those_of_one_process_within_rounding(both, name):
    _, one, two = both
    assert two[0][name] == two[1][name]  # processes never drift apart
    torch.testing.assert_close(torch.tensor(two[0][name]), torch.tensor(one[name]), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["flow", "mean_flow", "acting"])
def test_metrics_are_those_of_one_process_within_rounding(both, name):
    first, second = ([*toy_demos.rows(f / name, "train"), *toy_demos.rows(f / name, "eval")] for f in both[0])
    assert len(first) == len(second) > 4
    for a, b in zip(toy_demos.without_times(first), toy_demos.without_times(second), strict=True):
        assert a.keys() == b.keys()
        for key in a:
            if key != "kind" and not key.endswith(("_max", "_std", "_min")):  # of one process's rows
                assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-5), key
