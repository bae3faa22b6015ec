"""Whose a run directory is, and what a resumed run changes."""

import pytest
import toy

from genrl.algorithms import PolicyGradient
from genrl.training import TrainingError
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
