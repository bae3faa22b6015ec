"""Metrics: what averages mean, and what is left on disk after a kill."""

import json
import math
import os

import pytest
import torch

from genrl.prompts import Prompt
from genrl.report.data import read_metrics
from genrl.training.logging import Meter, RunWriter, write_json


def test_meter_takes_weighted_means_and_extremes_by_name():
    meter = Meter()
    assert not meter
    meter.add({"a": torch.tensor(1.0), "x_max": torch.tensor(1.0), "x_min": torch.tensor(1.0)}, 1.0)
    meter.add({"a": torch.tensor(4.0), "x_max": torch.tensor(-3.0), "x_min": torch.tensor(-3.0)}, 0.5)
    meter.add({"b": torch.tensor(7.0)}, 0.25)
    assert meter
    assert meter.result() == {"a": 2.0, "b": 7.0, "x_max": 1.0, "x_min": -3.0}
    assert Meter().result() == {}


def test_meter_keeps_no_graph():
    meter = Meter()
    value = torch.ones((), requires_grad=True) * 2
    meter.add({"a": value})
    assert not meter._sums["a"].requires_grad


class TwoProcesses:
    """Gathers sums and weights [1, 2, K] with those of another process, whose sums are 10 and weights 2 higher."""

    num_processes = 2

    def gather(self, values):
        return torch.cat([values, values + torch.tensor([[10.0], [2.0]])])


def test_meter_reduces_over_processes_by_name():
    meter = Meter()
    meter.add({"a": torch.tensor(1.0), "x_max": torch.tensor(1.0), "x_min": torch.tensor(1.0)})
    # The mean is over everything on both: (1 + 11) / (1 + 3).
    assert meter.result(TwoProcesses()) == {"a": 3.0, "x_max": 11.0, "x_min": 1.0}


def test_records_are_one_json_object_a_line_and_nan_and_inf_become_null(tmp_path):
    writer = RunWriter(tmp_path, None, tensorboard=False)
    writer.write("train", 1, {"a": 1.5, "b": math.nan, "c": -math.inf})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before close: every record is flushed
    writer.close()
    assert [json.loads(line) for line in lines] == [{"iteration": 1, "kind": "train", "a": 1.5, "b": None, "c": None}]


def test_resume_drops_later_records_and_the_line_that_a_kill_cut(tmp_path):
    writer = RunWriter(tmp_path, None, tensorboard=False)
    for i in range(4):
        writer.write("train", i, {"a": float(i)})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "kind": "tr')
    writer = RunWriter(tmp_path, 2, tensorboard=False)
    writer.write("train", 3, {"a": 33.0})
    writer.close()
    assert [(r["iteration"], r["a"]) for r in read_metrics(tmp_path)] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 33.0)]


def test_a_new_run_starts_an_empty_file_and_other_processes_write_nothing(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "kind": "train"}\n')
    RunWriter(tmp_path, None, tensorboard=False).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    other = RunWriter(tmp_path / "absent", None, tensorboard=True, enabled=False)
    other.write("train", 1, {"a": 1.0})
    other.close()
    assert not (tmp_path / "absent").exists()


def test_tensorboard_gets_the_same_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = RunWriter(tmp_path, None, tensorboard=True)
    writer.write("train", 1, {"a": 1.5})
    writer.write("train", 2, {"a": 2.5})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("a")] == [(1, 1.5), (2, 2.5)]


def test_write_json_leaves_the_old_file_when_it_is_interrupted(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    write_json(path, {"a": 1})

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}


@pytest.mark.parametrize("parts", [[12], [4, 8], [1] * 12])
def test_the_meter_gives_the_standard_deviation_of_everything_however_it_was_split(parts):
    values = torch.randn(12, generator=torch.Generator().manual_seed(0)) + 0.5
    meter = Meter()
    for part in values.split(parts):
        meter.add({"x_mean": part.mean(), "x_std": part.std(correction=0)}, weight=len(part) / 12)
        meter.add({"r": part.mean(), "r_std": part.std(correction=0)}, weight=len(part) / 12)
    found = meter.result()
    assert found["x_std"] == pytest.approx(float(values.std(correction=0)), rel=1e-5)
    assert found["r_std"] == pytest.approx(float(values.std(correction=0)), rel=1e-5)
    assert found["x_mean"] == pytest.approx(float(values.mean()), rel=1e-5)


def test_rewards_by_prompt_are_cut_like_the_metrics_when_a_run_goes_on(tmp_path):
    prompts = [Prompt("a cat"), Prompt("a dog"), Prompt("never drawn")]
    path = tmp_path / "prompt_rewards.jsonl"

    def records():
        return [json.loads(line) for line in path.read_text().splitlines()]

    writer = RunWriter(tmp_path, None, tensorboard=False)
    assert not path.exists()
    for i in (0, 2, 4):
        writer.write_prompts("eval", i, prompts, {0: 0.5 + i, 1: math.nan})
    writer.write_prompts("train", 4, prompts, {1: 1 / 3})
    writer.close()
    first, second, _, train = records()
    assert first == {"iteration": 0, "kind": "eval", "prompt": [0, 1], "reward": [0.5, None],
                     "text": {"0": "a cat", "1": "a dog"}}  # fmt: skip
    assert "text" not in second and train["text"] == {"1": "a dog"} and train["reward"] == [0.333333]
    with path.open("a") as file:
        file.write('{"iteration": 6, "ki')
    RunWriter(tmp_path, 4, tensorboard=False, evaluate_again=True).close()
    assert [(r["iteration"], r["kind"]) for r in records()] == [(0, "eval"), (2, "eval"), (4, "train")]
    writer = RunWriter(tmp_path, 2, tensorboard=False)
    writer.write_prompts("eval", 4, prompts, {0: 1.0, 2: 1.0})
    writer.close()
    assert [r["iteration"] for r in records()] == [0, 2, 4] and records()[-1]["text"] == {"2": "never drawn"}
    RunWriter(tmp_path, None, tensorboard=False).close()
    assert not path.exists()


def test_a_progress_line_does_not_show_a_small_number_as_nothing():
    from genrl.training.progress import _note

    metrics = {"reward/total": 0.5, "ratio/clip_fraction": 0.0, "grad/norm": 1.234e-5}
    assert _note(metrics) == "reward 0.500  clipped 0.000  grad 1.2e-05"
    assert _note({"loss/total": -0.00034, "grad/norm": 0.001}) == "loss -0.00034  grad 0.001"
