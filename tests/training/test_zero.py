"""DeepSpeed's ZeRO-2 on two processes trains what one trains, where the package is there."""

import importlib.util
import json

import pytest
import torch
from test_sharding import TORCHRUN, launch
from two_shardings import RUNS, make, weights

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


def test_weights_are_those_of_one_process_and_the_optimizer_is_divided(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    done = launch(tmp_path, "zero", launcher=TORCHRUN)
    assert done.returncode == 0, done.stderr[-4000:]
    two = [json.loads((tmp_path / f"result-{rank}.json").read_text()) for rank in (0, 1)]
    for name in RUNS:
        assert two[0][name]["weights"] == two[1][name]["weights"]
        assert sum(rank[name]["optimizer"] for rank in two) == two[0][name]["trained"]
        loop = make(tmp_path / "one" / name, name, "none", 3)
        loop.run()
        for stage, expected in (("weights", loop), ("resumed", None)):
            if expected is None:
                expected = make(tmp_path / "one" / name, name, "none", 4)
                expected.run(resume="require")
            torch.testing.assert_close(
                torch.tensor(two[0][name][stage]), torch.tensor(weights(expected)), rtol=0, atol=1e-5
            )  # measured: 2e-7
        # What two have saved loads into one.
        loop = make(tmp_path / name, name, "none", 5)
        loop.run(resume="require")
        expected = make(tmp_path / "one" / name, name, "none", 5)
        expected.run(resume="require")
        torch.testing.assert_close(torch.tensor(weights(loop)), torch.tensor(weights(expected)), rtol=0, atol=1e-5)
