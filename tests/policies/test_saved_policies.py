"""Policies on disk: self-contained, and clear about what does not fit."""

import json
import shutil

import pytest
import torch
from policy_members import MEMBERS, PICTURES, awaken, generator, make_batch
from safetensors.torch import load_file, save_file

from genrl.networks import MLPBackbone
from genrl.policies import FlowPolicy, RegressionPolicy, load_policy


@pytest.fixture
def saved(tmp_path):
    policy = awaken(MEMBERS[0].build(specs=PICTURES)).eval()
    policy.task = {"env": {"id": "some/Task-v0", "max_steps": 7}}
    policy.save_pretrained(tmp_path / "policy")
    return policy, tmp_path / "policy"


def test_a_checkpoint_needs_nothing_but_its_folder(saved, tmp_path):
    policy, folder = saved
    shutil.move(folder, tmp_path / "elsewhere")
    loaded = load_policy(str(tmp_path / "elsewhere"))
    obs = make_batch(policy)["obs"]
    assert torch.equal(policy.act(obs, generator()), loaded.act(obs, generator()))
    for name in ("state", "action", "points"):
        for own, other in zip(policy.normalizer.statistics(name), loaded.normalizer.statistics(name), strict=True):
            assert torch.equal(own, other)


def test_names_shapes_and_their_order_are_in_the_checkpoint(saved):
    policy, folder = saved
    config = json.loads((folder / "config.json").read_text())
    assert list(config["specs"]) == list(policy.specs)
    assert config["specs"]["points"] == {"shape": [8, 3], "kind": "points"}
    assert config["policy"]["class_path"] == "genrl.policies.FlowPolicy"
    assert config["task"] == {"env": {"id": "some/Task-v0", "max_steps": 7}}


def test_the_class_is_found_or_its_difference_is_told(saved):
    _, folder = saved
    assert type(FlowPolicy.from_pretrained(folder)) is FlowPolicy
    with pytest.raises(ValueError, match="holds a FlowPolicy, not a RegressionPolicy"):
        RegressionPolicy.from_pretrained(folder)


def test_missing_statistics_are_an_error_at_load_that_names_the_feature(saved):
    _, folder = saved
    state = load_file(folder / "model.safetensors")
    name = next(key for key in state if "spread" in key and "state" in key)
    del state[name]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{name} is missing"):
        load_policy(folder)


def test_weights_of_another_configuration_are_refused_with_the_differences(saved):
    _, folder = saved
    config = json.loads((folder / "config.json").read_text())
    config["policy"]["init_args"]["network"]["init_args"]["width"] = 16
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"net\.\S+ has shape \[32.*the configuration makes \[16.*and \d+ more"):
        load_policy(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_an_incomplete_folder_says_what_is_there(saved, name):
    _, folder = saved
    (folder / name).unlink()
    other = ({"config.json", "model.safetensors"} - {name}).pop()
    with pytest.raises(FileNotFoundError, match=rf"{name} is missing \(found: \['{other}'\]\)"):
        load_policy(folder)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        load_policy(folder / "nowhere")


def test_files_of_others_and_of_the_future_are_refused(saved):
    _, folder = saved
    config = json.loads((folder / "config.json").read_text())
    for text, message in [
        ("{", "not valid JSON"),
        ('{"architectures": []}', "does not describe a policy"),
        (json.dumps(config | {"format": 99}), "format 99.*update genrl"),
    ]:
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_policy(folder)


def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path):
    policy = MEMBERS[0].build()
    policy.task = {"env": object()}
    with pytest.raises(ValueError, match="task cannot be written"):
        policy.save_pretrained(tmp_path / "a")

    class Anonymous:
        def __init__(self, width):  # keeps no attribute of that name
            self.w = width

        def build(self, *sizes, **settings):
            return MLPBackbone(self.w, 1).build(*sizes, **settings)

    with pytest.raises(ValueError, match="settings of FlowPolicy cannot be written"):
        MEMBERS[0].build(Anonymous(8)).save_pretrained(tmp_path / "b")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_number_format_of_the_weights_is_kept(dtype, tmp_path):
    policy = awaken(MEMBERS[0].build()).to(dtype).eval()
    policy.save_pretrained(tmp_path)
    loaded = load_policy(tmp_path)
    obs = make_batch(policy)["obs"]
    assert loaded.dtype == dtype
    assert torch.equal(policy.act(obs, generator()), loaded.act(obs, generator()))
