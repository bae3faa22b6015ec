"""ONNX files and compiled acting give the actions of the policy."""

import numpy as np
import pytest
import torch
from policy_members import MEMBERS, PICTURES, SPECS, awaken, generator, make_batch

from genrl.networks import EncoderSettings
from genrl.policies import Chunking, CompiledPolicy, OnnxPolicy, RegressionPolicy, export_onnx

# One member of each class: an export takes seconds.
ONE_STEP = list({member.cls: member for member in reversed(MEMBERS) if member.build().nfe == 1}.values())


def session_of(path):
    import onnxruntime

    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def compare(policy, path):
    """Largest difference between file and policy in units of the normalised actions, for several batch sizes."""
    session = session_of(path)
    assert [node.name for node in session.get_inputs()] == [*policy.specs, "noise"]
    worst = 0.0
    for rows in (1, 2, 7):
        obs = make_batch(policy, rows=rows, seed=rows)["obs"]
        noise = torch.randn(rows, policy.chunking.horizon, 3, generator=generator(rows))
        chunk = policy.predict(obs, lambda step, shape, noise=noise: noise)
        feed = {name: value.numpy() for name, value in obs.items()} | {"noise": noise.numpy()}
        found_actions, found_chunk = session.run(["actions", "chunk"], feed)
        assert found_actions.shape == (rows, policy.chunking.n_action_steps, 3)
        first, last = policy.chunking.first, policy.chunking.last
        assert np.array_equal(found_actions, found_chunk[:, first:last])
        worst = max(worst, float(np.abs(found_chunk - chunk.numpy()).max()))
        assert np.ptp(found_chunk) > 0.1
    return worst


@pytest.mark.parametrize("member", ONE_STEP, ids=lambda member: member.name)
def test_a_file_acts_like_the_policy_for_any_batch(member, tmp_path):
    policy = awaken(member.build()).eval()
    path = export_onnx(policy, tmp_path / "folder" / "policy.onnx")
    assert compare(policy, path) < 1e-5


@pytest.mark.parametrize(("network", "specs"), [("unet", PICTURES), ("dit", SPECS)])
def test_pictures_points_and_every_network_are_exported(network, specs, tmp_path):
    encoder = EncoderSettings(state="mlp", crop=12, image_features=8, points_widths=(8, 16), points_features=8)
    policy = awaken(ONE_STEP[0].build(network, specs=specs, encoder=encoder)).eval()
    assert compare(policy, export_onnx(policy, tmp_path / "policy.onnx")) < 1e-5


def test_a_file_acts_by_itself_and_names_what_is_wrong(tmp_path):
    policy = awaken(ONE_STEP[0].build(specs=PICTURES)).eval()
    policy.task = {"env": {"id": "some/Task-v0"}}
    exported = OnnxPolicy(export_onnx(policy, tmp_path / "policy.onnx"))
    assert (exported.specs, exported.task) == (policy.specs, policy.task)
    obs = make_batch(policy)["obs"]
    expected = policy.act(obs, generator(2))
    for given in (obs, {name: value.numpy() for name, value in reversed(obs.items())} | {"extra": np.zeros(3)}):
        torch.testing.assert_close(exported.act(given, generator(2)), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="'points' is missing"):
        exported.act({name: value for name, value in obs.items() if name != "points"})
    with pytest.raises(ValueError, match=r"'state' has shape \[5, 2, 9\]; expected \[B, 2, 4\]"):
        exported.act(obs | {"state": torch.zeros(5, 2, 9)})
    with pytest.raises(FileNotFoundError, match="export_onnx"):
        OnnxPolicy(tmp_path / "other.onnx")


def test_several_steps_cannot_be_exported(tmp_path):
    for member in MEMBERS:
        policy = member.build()
        if policy.nfe > 1:
            with pytest.raises(ValueError, match=rf"{policy.nfe} network calls per chunk.*steps=1"):
                export_onnx(policy, tmp_path / "policy.onnx")
    assert not list(tmp_path.iterdir())


class BatchBound(RegressionPolicy):
    def _sample(self, cond, noise, start):
        return super()._sample(cond, noise, start) + torch.zeros(len(cond), 1, 1)


def test_a_graph_for_one_batch_size_only_is_refused(tmp_path):
    policy = BatchBound(network=MEMBERS[0].build().network)
    from policy_members import configure

    configure(policy)
    with pytest.raises(ValueError, match=r"one batch size only.*x\.shape\[0\]"):
        export_onnx(policy, tmp_path / "policy.onnx")


def test_a_file_that_acts_differently_is_refused_and_the_policy_stays_as_it_was(tmp_path, monkeypatch):
    from genrl.policies import export

    policy = awaken(ONE_STEP[0].build()).double().train()
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    monkeypatch.setattr(export, "TOLERANCE", -1.0)
    with pytest.raises(ValueError, match="acts differently from the policy: largest difference"):
        export_onnx(policy, tmp_path / "policy.onnx")
    assert policy.training and policy.dtype == torch.float64
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())


@pytest.mark.parametrize("member", ONE_STEP[:2], ids=lambda member: member.name)
def test_compiled_acting_equals_plain_acting_also_after_training(member):
    policy = awaken(member.build(chunking=Chunking(4, 1, 2))).eval()
    compiled = CompiledPolicy(policy, backend="aot_eager")
    assert compiled.mode == "compile"
    for rows in (1, 3):
        obs = make_batch(policy, rows=rows)["obs"]
        torch.testing.assert_close(compiled.act(obs, generator()), policy.act(obs, generator()), atol=1e-5, rtol=1e-5)
    before = compiled.act(obs, generator())
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.01)
    after = compiled.act(obs, generator())
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, policy.act(obs, generator()), atol=1e-5, rtol=1e-5)


def test_what_is_not_available_falls_back_to_plain_acting_and_says_why():
    policy = awaken(ONE_STEP[0].build()).eval()
    obs = make_batch(policy)["obs"]
    with pytest.warns(UserWarning, match="need a CUDA device, the policy is on cpu"):
        graph = CompiledPolicy(policy, mode="cuda_graph")

    def broken(graph, inputs):
        raise RuntimeError("no C++ compiler here")

    with pytest.warns(UserWarning, match=r"torch\.compile with 'broken' failed .*no C\+\+ compiler here"):
        failed = CompiledPolicy(policy, backend=broken)
    for fallen in (graph, failed, CompiledPolicy(policy, mode="plain")):
        assert fallen.mode == "plain"
        assert torch.equal(fallen.act(obs, generator()), policy.act(obs, generator()))


def test_compiled_acting_names_what_is_wrong():
    policy = ONE_STEP[0].build()
    compiled = CompiledPolicy(policy, backend="aot_eager")
    obs = make_batch(policy)["obs"]
    with pytest.raises(ValueError, match="'state' is missing"):
        compiled.act({name: value for name, value in obs.items() if name != "state"})
    with pytest.raises(ValueError, match="mode = 'fast'"):
        CompiledPolicy(policy, mode="fast")
    with pytest.raises(ValueError, match="backend = 'no_such_backend' is unknown"):
        CompiledPolicy(policy, backend="no_such_backend")
    with pytest.raises(ValueError, match="network calls per chunk"):
        CompiledPolicy(next(m for m in MEMBERS if m.name == "ddpm").build())
    assert set(SPECS) == set(policy.specs)
