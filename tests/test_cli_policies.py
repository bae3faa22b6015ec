"""The commands about policies, on an environment and demonstrations that cost nothing."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from genrl.cli import main
from genrl.envs.data import Demonstrations, Episode, write_robomimic

FOLDER = Path(__file__).parent / "training"
ENV = {"id": "toy_env:PointEnv", "max_steps": 20}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with demonstrations, a configuration and a finished run; the toy environment can be imported."""
    folder = tmp_path_factory.mktemp("policies")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{FOLDER}{os.pathsep}{before or ''}"
    sys.path.insert(0, str(FOLDER))
    write_robomimic(folder / "demos.hdf5", demonstrations())
    config = {
        "name": "toy",
        "run_dir": str(folder / "run"),
        "env": ENV,
        "data": {"class_path": "genrl.envs.data.DemonstrationFile", "init_args": {"path": str(folder / "demos.hdf5")}},
        "policy": {
            "class_path": "genrl.policies.RegressionPolicy",
            "init_args": {
                "network": {"class_path": "genrl.networks.MLPBackbone", "init_args": {"width": 16, "depth": 1}},
                "chunking": {"horizon": 4, "n_action_steps": 2},
            },
        },
        "trainer": {"iterations": 300, "batch_size": 32, "log_every": 50, "checkpoint_every": 100, "cpu_threads": 1},
        "evaluation": {"every": 100, "episodes": 4, "videos": 0, "background": False},
    }
    (folder / "toy.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", str(folder / "toy.yaml")]) == 0
    yield folder
    sys.path.remove(str(FOLDER))
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def demonstrations():
    """A point that walks to the origin."""
    rng, made = np.random.default_rng(0), []
    for i in range(10):
        position, states, actions = rng.uniform(-1, 1, 2), [], []
        for _ in range(15):
            action = np.clip(-2 * position, -1, 1)
            states.append([*position, 1.0])
            actions.append(action)
            position = position + 0.2 * action
        made.append(Episode({"state": np.float32(states)}, np.float32(actions), name=f"demo_{i}", success=True))
    return Demonstrations.of(made, {"env": ENV})


def test_training_shows_success_in_the_report(place):
    summary = json.loads((place / "run" / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["after"]["eval/success"] == 1.0
    page = (place / "run" / "report.html").read_text()
    assert "success, last weights" in page and "100 %" in page and "toy_env:PointEnv" in page
    assert "http://" not in page.replace("http://www.w3.org", "")  # nothing is loaded from elsewhere


def test_evaluations_are_the_same_file_for_any_number_of_environments(place, capsys):
    files = []
    for n in ("1", "4"):
        files.append(place / f"envs-{n}.json")
        arguments = ["evaluate", str(place / "run"), "--episodes", "6", "--n-envs", n, "--videos", "0"]
        assert main([*arguments, "--out", str(files[-1])]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    out = capsys.readouterr().out
    assert "95 % interval" in out and "start seeds" in out and "100000 to 100005" in out


def test_compare_pairs_two_evaluations_and_refuses_others(place, capsys):
    first, second = place / "first.json", place / "second.json"
    for out, seed in ((first, "7"), (second, "8")):
        base = ["evaluate", str(place / "run"), "--episodes", "3", "--videos", "0"]
        assert main([*base, "--seed", seed, "--out", str(out)]) == 0
    capsys.readouterr()
    assert main(["compare", str(first), str(first)]) == 0
    out = capsys.readouterr().out
    assert "same weights" in out and "success" in out
    assert main(["compare", str(first), str(second)]) != 0
    assert "seed" in capsys.readouterr().err


def test_best_and_raw_weights_can_be_asked_for(place):
    for extra in (["--checkpoint", "best"], ["--weights", "raw"]):
        out = place / "weights.json"
        base = ["evaluate", str(place / "run"), "--episodes", "2", "--videos", "0"]
        assert main([*base, "--out", str(out), *extra]) == 0
        expected = "raw" if "raw" in extra else "ema"
        assert json.loads(out.read_text())["policy"]["weights"] == expected


def test_inspect_prints_and_writes_what_a_data_set_holds(place, capsys):
    assert main(["inspect", str(place / "demos.hdf5"), "--json", str(place / "inspected.json")]) == 0
    out = capsys.readouterr().out
    assert "state" in out and "action variance" in out
    assert json.loads((place / "inspected.json").read_text())
    assert main(["inspect", str(place / "missing.hdf5")]) != 0
    assert "missing.hdf5" in capsys.readouterr().err


def test_export_writes_a_file_that_acts(place, capsys):
    import onnxruntime

    assert main(["export", str(place / "run"), str(place / "policy.onnx")]) == 0
    assert "policy.onnx" in capsys.readouterr().out
    session = onnxruntime.InferenceSession(str(place / "policy.onnx"))
    state = np.float32([[[0.5, -0.5, 1.0]]])
    actions, _ = session.run(None, {"state": state, "noise": np.zeros((1, 4, 2), np.float32)})
    assert actions.shape == (1, 2, 2)
    assert actions[0, 0, 0] < 0 < actions[0, 0, 1]  # towards the origin


def test_sampling_a_policy_and_unknown_settings_are_answered(place, capsys):
    assert main(["sample", str(place / "run")]) == 2
    assert "genrl evaluate" in capsys.readouterr().err
    assert main(["train", str(place / "toy.yaml"), "policy.chunkin.horizon=8"]) == 2
    assert "did you mean" in capsys.readouterr().err
    assert main(["train", str(place / "toy.yaml"), "env.max_step=3"]) == 2
    assert "env.max_steps" in capsys.readouterr().err


def test_another_policy_in_the_same_run_directory_is_refused(place, capsys):
    arguments = ["train", str(place / "toy.yaml"), "policy.class_path=genrl.policies.FlowPolicy"]
    assert main(arguments) == 2
    assert "another experiment" in capsys.readouterr().err


def test_collect_writes_demonstrations_of_ones_own_expert(place, capsys, tmp_path):
    (tmp_path / "home_expert.py").write_text(
        "import numpy as np\n"
        "class Home:\n"
        "    def reset(self, seed): pass\n"
        "    def __call__(self, obs, env): return np.clip(-2 * obs['state'][:2], -1, 1).astype(np.float32)\n"
    )
    sys.path.insert(0, str(tmp_path))
    config = {"env": ENV, "expert": "home_expert:Home", "episodes": 3, "out": str(tmp_path / "mine.hdf5")}
    (tmp_path / "collect.yaml").write_text(yaml.safe_dump(config))
    try:
        assert main(["collect", str(tmp_path / "collect.yaml"), "episodes=2"]) == 0
        assert "mine.hdf5" in capsys.readouterr().out
        assert main(["collect", str(tmp_path / "collect.yaml"), "episode=2"]) == 2
        assert "episodes" in capsys.readouterr().err
    finally:
        sys.path.remove(str(tmp_path))


def test_flags_of_generators_negative_seeds_and_existing_files_are_refused(place, capsys):
    for extra, message in ((["--samples", "3"], "--samples"), (["--seed", "-5"], "must not be negative")):
        assert main(["evaluate", str(place / "run"), *extra]) != 0
        assert message in capsys.readouterr().err
    (place / "collect.yaml").write_text(yaml.safe_dump({"env": ENV, "out": str(place / "demos.hdf5")}))
    assert main(["collect", str(place / "collect.yaml")]) != 0
    assert "is not overwritten" in capsys.readouterr().err


def test_an_environment_that_ignores_its_seed_is_named_in_the_evaluation(place):
    from genrl.envs import evaluate

    still = evaluate(lambda obs: np.zeros((len(obs["state"]), 2)), ENV, episodes=2)
    deaf = evaluate(lambda obs: np.zeros((len(obs["state"]), 2)), {**ENV, "kwargs": {"deaf": True}}, episodes=2)
    assert not any("start states are random" in text for text in still.warnings)
    assert any("start states are random" in text for text in deaf.warnings)


def test_keys_of_a_collection_are_listed_and_it_is_not_taken_for_a_training(capsys):
    config = str(Path(__file__).parents[1] / "configs" / "collect" / "lift.yaml")
    assert main(["collect", config, "--help"]) == 0
    listed = capsys.readouterr().out
    assert "env.max_steps" in listed and "keep_failures" in listed
    assert main(["collect", "--help"]) == 0 and main(["collect"]) == 2
    assert main(["train", config]) == 2
    assert f"genrl collect {config}" in capsys.readouterr().err.replace("\n", "")


def test_an_unknown_environment_is_a_wrong_command(capsys):
    assert main(["evaluate", "expert", "--env", "metaworld/no-such-task"]) == 2
    assert "no environment 'metaworld/no-such-task'" in capsys.readouterr().err


def test_demonstrations_that_are_not_there_are_a_fault_of_the_configuration(tmp_path, capsys):
    config = Path(__file__).resolve().parent.parent / "configs" / "policies" / "mean_flow.yaml"
    data = ["data.class_path=genrl.envs.data.DemonstrationFile", f"data.path={tmp_path / 'none.hdf5'}"]
    assert main(["train", str(config), *data, "env=null", f"run_dir={tmp_path / 'run'}"]) == 2
    assert "there is no data set at" in " ".join(capsys.readouterr().err.split())
