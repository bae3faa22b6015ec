import subprocess
import sys

import pytest
import torch
from generator_members import TINY, sample

from genrl.generators import DigitsGenerator
from genrl.generators.cache import cache_root, cached_folder

PROMPTS = ["a handwritten seven", "number 3"]


def test_a_base_is_trained_once_and_reused(tmp_path, monkeypatch):
    monkeypatch.setenv("GENRL_CACHE", str(tmp_path))
    first = DigitsGenerator(**TINY)
    first.prepare("cpu", progress=False)
    first.prepare("cpu", progress=False)
    monkeypatch.setattr(DigitsGenerator, "_train_base", lambda *_: pytest.fail("trained again"))
    second = DigitsGenerator(**TINY)
    second.prepare("cpu", progress=False)
    assert torch.equal(sample(first, PROMPTS), sample(second, PROMPTS))
    assert len([folder for folder in tmp_path.iterdir() if folder.is_dir()]) == 1


def test_the_same_seed_gives_the_same_base_and_leaves_the_global_generator_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    samples = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        generator = DigitsGenerator(**TINY, base_seed=seed, cache_dir=tmp_path / name)
        generator.prepare("cpu", progress=False)
        samples.append(sample(generator, PROMPTS))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(samples[0], samples[1]) and not torch.equal(samples[0], samples[2])


def test_every_setting_that_changes_the_base_has_its_own_folder():
    keys = [
        DigitsGenerator(**arguments).base_config()
        for arguments in ({}, {"dim": 32}, {"depth": 1}, {"base_steps": 9}, {"base_seed": 1}, {"path": "vp"})
    ]
    assert all(a != b for i, a in enumerate(keys) for b in keys[:i])
    assert DigitsGenerator(guidance_scale=2.0, lora={"rank": 2}).base_config() == keys[0]


def test_two_processes_at_once_agree_on_one_base(tmp_path):
    script = (
        "from genrl.generators import DigitsGenerator as D\n"
        f"g = D(**{TINY!r}, cache_dir={str(tmp_path)!r}); g.prepare('cpu', progress=False)\n"
        "print(float(sum(p.detach().double().abs().sum() for p in g.trainable())))"
    )
    runs = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [run.communicate(timeout=120)[0] for run in runs]
    assert all(run.returncode == 0 for run in runs)
    assert outputs[0] == outputs[1]
    assert len([folder for folder in tmp_path.iterdir() if folder.is_dir()]) == 1


def test_a_maker_that_fails_leaves_nothing_and_can_be_tried_again(tmp_path):
    def fail(folder):
        (folder / "half").write_text("")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cached_folder("x", {"a": 1}, fail, tmp_path)
    assert not [entry for entry in tmp_path.iterdir() if entry.is_dir()]
    folder = cached_folder("x", {"a": 1}, lambda folder: (folder / "whole").write_text("") and None, tmp_path)
    assert (folder / "whole").exists()


def test_the_process_that_renames_last_uses_the_winner(tmp_path):
    def lose(folder):
        (folder / "mine").write_text("")
        winner = tmp_path / folder.name.removeprefix(".").rsplit("-", 1)[0]
        winner.mkdir()
        (winner / "theirs").write_text("")

    folder = cached_folder("x", {"a": 2}, lose, tmp_path)
    assert [file.name for file in folder.iterdir()] == ["theirs"]
    assert len([entry for entry in tmp_path.iterdir() if entry.is_dir()]) == 1


def test_the_root_is_the_argument_then_the_environment_then_the_home(tmp_path, monkeypatch):
    monkeypatch.delenv("GENRL_CACHE", raising=False)
    assert cache_root().parts[-2:] == (".cache", "genrl")
    monkeypatch.setenv("GENRL_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    assert cache_root("elsewhere").name == "elsewhere"
