"""Two processes with shards, and with copies, compute what one computes. Importing costs most of a launch."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import toy
from torch import nn
from two_shardings import PIPELINES, RUNS, make, weights

from genrl.training.sharding import repeated_blocks

SCRIPT = Path(__file__).with_name("two_shardings.py")
FILE = SCRIPT.parents[2] / "configs" / "accelerate" / "fsdp2_cpu_2.yaml"
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ACCELERATE = ["accelerate.commands.launch", "--config_file", str(FILE)]


def launch(*arguments, launcher=None):
    command = [sys.executable, *(["-m", *launcher] if launcher else []), str(SCRIPT), *map(str, arguments)]
    path = [str(SCRIPT.parents[1]), str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment = {**os.environ, **own, "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    one, two = (tmp_path_factory.mktemp(name) for name in ("one", "two"))
    done = launch(one, 1)
    assert done.returncode == 0, done.stderr[-4000:]
    killed = launch(two, "kill", launcher=ACCELERATE)
    assert killed.returncode != 0 and "SIGKILL" in killed.stderr, killed.stderr[-4000:]
    killed_at = sorted(p.name for p in (two / "killed" / "checkpoints").glob("step-*"))
    done = launch(two, 2, one, launcher=TORCHRUN)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads((two / f"result-{rank}.json").read_text()) for rank in (0, 1)]
    return one, two, json.loads((one / "result-0.json").read_text()), found, killed_at


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_weights_are_those_of_one_process_also_after_a_resume(launched, sharding, name):
    _, _, one, two, _ = launched
    for stage in ("weights", "resumed"):
        expected = torch.tensor(one[f"none/{name}"][stage])
        found = [torch.tensor(rank[f"{sharding}/{name}"][stage]) for rank in two]
        assert torch.equal(*found)  # processes never drift apart
        torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-5)  # measured: 2e-7
        assert float((expected - torch.tensor(one[f"none/{name}"]["start"])).abs().max()) > 5e-3


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_losses_ratios_and_evaluations_are_those_of_one_process(launched, sharding, name):
    one, two, *_ = launched
    for kind, count in (("train", 4), ("eval", 5)):
        first, second = (toy.rows(folder / name, kind) for folder in (one / "none", two / sharding))
        assert len(first) == len(second) == count
        for a, b in zip(first, second, strict=True):
            assert a.keys() == b.keys()
            for key, value in a.items():
                if key == "cost/forward_equivalents":
                    assert b[key] >= value  # rows of weight 0 keep processes in step
                elif not isinstance(value, str):
                    assert b[key] == pytest.approx(value, rel=1e-3, abs=2e-6), key


@pytest.mark.parametrize("name", RUNS)
def test_each_process_holds_half_of_everything(launched, name):
    _, _, _, two, _ = launched
    shards, copies = ([rank[f"{kind}/{name}"] for rank in two] for kind in ("fsdp2", "none"))
    assert [f["strategy"] for f in shards + copies] == ["Shards"] * 2 + ["Copies"] * 2
    assert all(f["held"] == f["elements"] and f["optimizer"] == f["trained"] for f in copies)
    for part in ("held", "optimizer", "average"):
        total = shards[0]["elements" if part == "held" else "trained"]
        if part == "average" and not RUNS[name]()[2].get("ema_decay"):
            total = 0
        assert sum(f[part] for f in shards) == total
        assert all(f[part] <= 0.53 * total for f in shards)  # rows are not cut, so not always exactly half
    assert all(f["all_sharded"] and any(n.startswith("FSDP") for n in f["classes"]) for f in shards)


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_of_shards_loads_into_one_process(launched, tmp_path, name):
    one, two, _, found, _ = launched
    folders = [tmp_path / "from one", tmp_path / "from two"]
    for source, target in zip((one / "none" / name, two / "fsdp2" / name), folders, strict=True):
        shutil.copytree(source, target)
    ends = []
    for folder in folders:
        loop = make(folder, name, "auto", 5)
        loop.run(resume="require")
        ends.append(torch.tensor(weights(loop)))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-5)
    taken_over = [torch.tensor(rank[f"taken over/{name}"]) for rank in found]  # two went on from one
    assert torch.equal(*taken_over)
    torch.testing.assert_close(taken_over[0], ends[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", RUNS)
def test_what_is_exported_is_whole_and_the_same(launched, name):
    one, two, *_ = launched
    models = [folder / name / "checkpoints" / "step-000004" / "model" for folder in (one / "none", two / "fsdp2")]
    states = [torch.load(model / "weights.pt", weights_only=True) for model in models]
    assert states[0].keys() == states[1].keys() and all(type(v) is torch.Tensor for v in states[1].values())
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=0, atol=1e-5)
    saved = torch.load(models[1].parent / "training_state.pt", weights_only=True)
    assert saved["optimizer"]["state"].keys() == states[0].keys()  # by name
    if RUNS[name]()[2].get("ema_decay"):  # the average is exported, and is not what is trained on
        assert any(not torch.equal(saved["weights"][k], v) for k, v in states[1].items())


@pytest.mark.parametrize("family", PIPELINES)
def test_a_sharded_pipeline_trains_as_on_one_process(launched, family):
    from genrl.generators.diffusers import DiffusersGenerator

    one, two, expected, found, _ = launched
    assert found[0][family]["weights"] == found[1][family]["weights"]
    torch.testing.assert_close(
        torch.tensor(found[0][family]["weights"]), torch.tensor(expected[family]["weights"]), rtol=0, atol=1e-4
    )
    assert all(rank[family]["strategy"] == "Shards" for rank in found)
    assert all(rank[family]["held"] <= 0.52 * rank[family]["elements"] for rank in found)
    rows = [toy.rows(folder / family, "train") for folder in (one, two)]
    for key in ("loss/total", "kl/reference", "grad/norm"):
        assert rows[1][1][key] == pytest.approx(rows[0][1][key], rel=1e-3, abs=1e-6)
    model = two / family / "checkpoints" / "step-000002" / "model"
    if family == "sd3":  # a whole pipeline, under the names of its own classes
        loaded = DiffusersGenerator.from_pretrained(model)
        state = torch.load(model.parent / "training_state.pt", weights_only=True)
        average = dict(zip(state["weights"], state["ema"]["values"], strict=True))
        found_there = loaded.state_dict()
        assert found_there.keys() == average.keys()
        assert all(torch.equal(found_there[name], value) for name, value in average.items())
        assert "FSDP" not in "".join(p.read_text() for p in model.rglob("*.json"))


def test_a_killed_run_of_an_accelerate_file_goes_on_to_the_same_weights(launched):
    _, two, _, found, killed_at = launched
    assert (two / "killed" / "sharing.txt").read_text() == "Shards"
    assert killed_at == ["step-000001", "step-000002"]
    for rank in found:
        assert rank["killed"] == rank["fsdp2/all weights"]["resumed"]
        assert rank["killed from"] == [1, 2, 3, 4]


def test_blocks_are_the_outermost_members_of_lists_or_the_named_ones():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.parts = nn.Linear(2, 2), nn.ModuleList([Part(), Part()])
            self.empty = nn.ModuleList([nn.Tanh()])

    network = Network()
    assert repeated_blocks(network) == list(network.parts)
    assert repeated_blocks(network, ["Linear"]) == [layer for part in network.parts for layer in part.inner]
    network._no_split_modules = ["Part", "Elsewhere"]
    assert repeated_blocks(network) == list(network.parts)
    assert repeated_blocks(nn.Linear(2, 2)) == []
