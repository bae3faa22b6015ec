"""What `test_imitation_processes.py` runs, on one process or, under torchrun, on two."""

import json
import os
import sys
from pathlib import Path

import toy_demos
import toy_env

from genrl.envs import EnvSettings
from genrl.networks import MLPBackbone
from genrl.policies import Chunking, MeanFlowPolicy

CHUNKING = Chunking(horizon=4, n_obs_steps=2, n_action_steps=2)
POLICIES = {
    "flow": toy_demos.make_policy,
    # Differentiates the network in t, which wrappers of several processes do not support.
    "mean_flow": lambda: MeanFlowPolicy(network=MLPBackbone(width=16, depth=1), chunking=CHUNKING),
}


def main(folder: Path, processes: int) -> None:
    rank, found = int(os.environ.get("RANK", 0)), {}
    for name, make in POLICIES.items():
        data = toy_demos.ToyDemonstrations(6, 0.2)
        settings = {"iterations": 10, "processes": processes}
        run = toy_demos.make_imitation(folder / name, make(), data, trainer=settings, evaluation={"every": 5})
        run.run()
        assert run.accelerator.num_processes == processes  # else the comparison would be of one with one
        found[name] = toy_demos.weights(run).tolist()
        more = {"iterations": 15, "processes": processes}
        again = toy_demos.make_imitation(folder / name, make(), data, trainer=more, evaluation={"every": 5})
        again.run(resume="require")
        found[f"{name} resumed"] = toy_demos.weights(again).tolist()
    # Evaluations in the background, and checkpoints between them: every process must agree on what is waited for.
    evaluation = {"every": 10, "episodes": 2, "videos": 0, "background": True}
    env = EnvSettings(toy_env.ID, max_steps=10)
    settings = {"iterations": 20, "processes": processes}
    run = toy_demos.make_imitation(folder / "acting", trainer=settings, evaluation=evaluation, env=env)
    run.run()
    found["acting"] = toy_demos.weights(run).tolist()
    (folder / f"result-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
