"""The part `data:` of a configuration."""

from __future__ import annotations

import pytest
from data_members import toy_demonstrations

from genrl.config import build_part
from genrl.envs.data import DataError, DemonstrationFile, write_robomimic
from genrl.parts import to_plain


@pytest.fixture
def path(tmp_path):
    names = [f"demo_{i}" for i in range(12)]
    masks = {"train": names[:9], "valid": names[9:], "some": names[5:10]}
    return str(write_robomimic(tmp_path / "toy.hdf5", toy_demonstrations((2,) * 12), masks))


def names(data):
    return [episode.name for episode in data.episodes]


@pytest.mark.parametrize("fraction", [0.0, 0.02, 0.15])
def test_ten_demonstrations_are_ten_training_episodes(path, fraction):
    training, held_out = DemonstrationFile(path, max_episodes=10, validation_fraction=fraction).load_split()
    assert len(training) == 10
    assert (held_out is None) == (fraction == 0) and not set(names(training)) & set(names(held_out) if held_out else [])


def test_a_split_that_leaves_too_few_is_refused_with_the_numbers(path):
    with pytest.raises(DataError, match=r"max_episodes = 12.*there are 12, of which 1 are held out"):
        DemonstrationFile(path, max_episodes=12, validation_fraction=0.02).load()
    with pytest.raises(ValueError, match="validation_fraction"):
        DemonstrationFile(path, validation_fraction=0.99).load()


def test_splits_are_drawn_by_their_seed(path):
    splits = [names(DemonstrationFile(path, validation_fraction=0.25, split_seed=s).load_split()[1]) for s in (0, 0, 1)]
    assert splits[0] == splits[1] != splits[2] and len(splits[0]) == 3


def test_training_and_validation_may_be_filter_keys(path):
    training, held_out = DemonstrationFile(path, filter_key="train", validation_filter_key="valid").load_split()
    assert len(training) == 9 and len(held_out) == 3 and training.meta["filter_key"] == "train"
    with pytest.raises(DataError, match=r"'train' and 'some' share episodes.*demo_5"):
        DemonstrationFile(path, filter_key="train", validation_filter_key="some").load()
    # Without a filter key for training, the rest is trained on.
    assert len(DemonstrationFile(path, validation_filter_key="some").load()) == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"validation_fraction": 1.0}, r"validation_fraction = 1\.0"),
        ({"validation_fraction": -0.1}, "validation_fraction"),
        ({"validation_fraction": 0.1, "validation_filter_key": "valid"}, "not both"),
    ],
)
def test_wrong_arguments_are_refused_before_reading(arguments, message):
    with pytest.raises(ValueError, match=message):
        DemonstrationFile("nowhere.hdf5", **arguments)


def test_it_is_a_part_of_a_configuration_and_can_be_written_back(path):
    init_args = {
        "path": path,
        "obs": ["state"],
        "max_episodes": 3,
        "action_bounds": [-1000.0, 1200.0],
        "rename": {"state": "s"},
    }
    raw = {"class_path": "genrl.envs.data.DemonstrationFile", "init_args": init_args}
    part = build_part(raw, "data")
    data = part.load()
    assert names(data) == ["demo_0", "demo_1", "demo_2"] and list(data.specs) == ["s"]
    plain = to_plain(part)
    assert plain["class_path"] == "genrl.envs.data.DemonstrationFile"
    assert build_part(plain, "data") == part


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"obss": ["state"]}, "obss"), ({"format": "rlds"}, "rlds"), ({"max_episodes": "many"}, "many")],
)
def test_mistyped_settings_are_errors_of_the_configuration(path, wrong, message):
    with pytest.raises(ValueError, match=message):
        build_part({"class_path": "genrl.envs.data.DemonstrationFile", "init_args": {"path": path, **wrong}}, "data")
