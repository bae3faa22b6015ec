"""Whose a run directory is, and what a resumed run changes."""

import pytest
import toy

from genrl.algorithms import PolicyGradient
from genrl.training import TrainingError
from genrl.training.errors import SetupError
from genrl.training.run_dir import changed_settings, claim_run_dir, flatten, prepare_run_dir


def test_a_second_run_in_the_same_directory_is_refused_while_the_first_one_holds_it(tmp_path):
    lock = claim_run_dir(tmp_path)
    with pytest.raises(TrainingError, match="another run is writing into"):
        toy.make_loop(tmp_path, PolicyGradient(steps=3)).run()
    lock.release()
    assert toy.make_loop(tmp_path, PolicyGradient(steps=3), trainer={"iterations": 1}).run().status == "finished"
    claim_run_dir(tmp_path).release()  # a finished run holds it no longer


def test_a_failed_run_gives_its_directory_back(tmp_path):
    def broken(media, prompts, metadata):
        raise RuntimeError("no")

    with pytest.raises(Exception, match="no"):
        toy.make_loop(tmp_path, PolicyGradient(steps=3), reward=broken).run()
    claim_run_dir(tmp_path).release()


def test_a_resumed_run_names_the_settings_that_it_changes(tmp_path):
    old = {"seed": 0, "trainer": {"learning_rate": 1e-3, "iterations": 3}, "algorithm": {"init_args": {"steps": 4}}}
    new = {"seed": 1, "trainer": {"learning_rate": 1e-4, "iterations": 9}, "algorithm": {"init_args": {"steps": 4}}}
    (tmp_path / "config.yaml").write_text(str(old))
    assert changed_settings(tmp_path / "config.yaml", new) == ["seed: 0 -> 1", "trainer.learning_rate: 0.001 -> 0.0001"]
    assert changed_settings(tmp_path / "config.yaml", old) == []


def test_without_a_checkpoint_nothing_is_resumed_and_so_nothing_changes(tmp_path):
    assert prepare_run_dir(tmp_path, None, "auto") == []
    with pytest.raises(ValueError, match="has no checkpoint"):
        prepare_run_dir(tmp_path, None, "require")
    with pytest.raises(ValueError, match="allowed are auto, never, require"):
        prepare_run_dir(tmp_path, None, "yes")


def test_flatten_leaves_out_init_args_and_keeps_empty_and_list_values():
    tree = {"a": {"class_path": "x", "init_args": {"b": (1, 2), "c": {}}}, "d": None}
    assert flatten(tree) == {"a.class_path": "x", "a.b": [1, 2], "a.c": {}, "d": None}


def test_folders_that_no_run_wrote_are_left_alone(tmp_path):
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "mine.txt").write_text("precious")
    with pytest.raises(TrainingError, match="has samples but is no run of genrl"):
        toy.make_loop(tmp_path, PolicyGradient(steps=3)).run()
    assert (tmp_path / "samples" / "mine.txt").read_text() == "precious"
    with pytest.raises(TrainingError, match="has samples but is no run of genrl"):
        toy.make_loop(tmp_path, PolicyGradient(steps=3)).run(resume="never")


def test_a_run_of_another_experiment_is_not_continued(tmp_path):
    old = {"seed": 0, "reward": {"class_path": "a.B"}, "algorithm": {"class_path": "c.D", "init_args": {"steps": 4}}}
    (tmp_path / "config.yaml").write_text(str(old))
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000001" / "training_state.pt").write_bytes(b"")
    for key, value in [("seed", 1), ("reward", {"class_path": "a.C"}), ("algorithm", {"class_path": "c.E"})]:
        with pytest.raises(ValueError, match=f"another experiment .{key}.*--resume never"):
            prepare_run_dir(tmp_path, {**old, key: value}, "auto")
    steps = {"class_path": "c.D", "init_args": {"steps": 5}}
    assert prepare_run_dir(tmp_path, {**old, "algorithm": steps}, "auto") == ["algorithm.steps: 4 -> 5"]


def test_a_server_that_moved_and_a_batch_that_did_not_fit_are_no_other_experiment(tmp_path):
    def config(url, batch, model="m", checkpointing=False):
        remote = {"class_path": "genrl.rewards.RemoteReward", "init_args": {"url": url, "encoding": "uint8"}}
        score = {"class_path": "genrl.rewards.CLIPScore", "init_args": {"model": model, "batch_size": batch}}
        rewards = {"class_path": "genrl.rewards.Compose", "init_args": {"rewards": {"r": remote, "c": score}}}
        generator = {"class_path": "G", "init_args": {"gradient_checkpointing": checkpointing}}
        return {"seed": 0, "reward": rewards, "generator": generator}

    (tmp_path / "config.yaml").write_text(str(config("http://a:1", 32)))
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000001" / "training_state.pt").write_bytes(b"")
    assert prepare_run_dir(tmp_path, config("http://b:2", 8, checkpointing=True), "auto") == [
        "generator.gradient_checkpointing: False -> True",
        "reward.rewards.c.batch_size: 32 -> 8",
        "reward.rewards.r.url: http://a:1 -> http://b:2",
    ]
    with pytest.raises(ValueError, match=r"another experiment .reward.rewards.c.model: m -> n"):
        prepare_run_dir(tmp_path, config("http://b:2", 8, model="n"), "auto")


def test_held_out_rewards_are_gauges_that_may_change_and_others_are_not(tmp_path):
    def config(held_out, weights=None, **rewards):
        named = {name: {"class_path": f"genrl.rewards.{kind}", "init_args": {}} for name, kind in rewards.items()}
        arguments = {"rewards": named, "weights": weights, "held_out": held_out}
        return {"seed": 0, "reward": {"class_path": "genrl.rewards.Compose", "init_args": arguments}}

    start = config([], a="CLIPScore")
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000001" / "training_state.pt").write_bytes(b"")
    gauge = config(["g"], {"g": 0}, a="CLIPScore", g="AestheticScore")
    other = config(["h"], {"a": 1.0}, a="CLIPScore", h="PickScore")
    for old, new in [(start, gauge), (gauge, start), (gauge, config(["h"], a="CLIPScore", h="PickScore"))]:
        (tmp_path / "config.yaml").write_text(str(old).replace("None", "null"))
        assert prepare_run_dir(tmp_path, new, "auto") == []
    for old, new in [(gauge, config([], a="CLIPScore", g="AestheticScore")), (gauge, other)]:  # trained on; a weight
        (tmp_path / "config.yaml").write_text(str(old).replace("None", "null"))
        with pytest.raises(ValueError, match=r"another experiment .reward\.(rewards\.g|weights)"):
            prepare_run_dir(tmp_path, new, "auto")


def test_weight_decay_and_betas_of_a_resumed_run_are_those_that_it_was_given(tmp_path):
    toy.make_loop(tmp_path, PolicyGradient(steps=3), trainer={"iterations": 1}).run()
    changed = {"iterations": 2, "weight_decay": 0.5, "betas": (0.5, 0.6)}
    loop = toy.make_loop(tmp_path, PolicyGradient(steps=3), trainer=changed)
    loop.run()
    group = loop.updater.optimizer.param_groups[0]
    assert (group["weight_decay"], group["betas"]) == (0.5, (0.5, 0.6))


def test_files_with_common_names_do_not_make_a_folder_a_run(tmp_path):
    (tmp_path / "config.yaml").write_text("lr: 1\n")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match=r"has checkpoints, config.yaml but is no run of genrl"):
        claim_run_dir(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "config.yaml"]  # no trace is left


def test_incomplete_generators_and_prompts_are_refused_before_the_run(tmp_path):
    class NoSave:
        def __getattr__(self, name):
            if name in ("save_pretrained", "reference"):
                raise AttributeError(name)
            return getattr(toy.ToyGenerator(), name)

    class Prompts:
        train, held_out = toy.ToyPrompts().train, []

    for changes, message in [
        ({"generator": NoSave()}, "NoSave has no reference, save_pretrained"),
        ({"prompts": Prompts()}, r"prompts.held_out of Prompts must be a list"),
    ]:
        with pytest.raises(SetupError, match=message):
            toy.make_loop(tmp_path / "run", PolicyGradient(steps=3), **changes).run()
    assert not (tmp_path / "run").exists()


def test_a_finished_run_keeps_its_configuration_when_it_is_started_again(tmp_path):
    first, second = {"algorithm": {"steps": 3}}, {"algorithm": {"steps": 4}}
    toy.make_loop(tmp_path, PolicyGradient(steps=3), trainer={"iterations": 1}, config=first).run()
    before = (tmp_path / "config.yaml").read_text()
    toy.make_loop(tmp_path, PolicyGradient(steps=4), trainer={"iterations": 1}, config=second).run()
    assert (tmp_path / "config.yaml").read_text() == before
    assert toy.rows(tmp_path, "event") == []
