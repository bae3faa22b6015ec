"""Rewards by prompt and films in the report."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image

from genrl.report import write_report
from genrl.report.prompts import prompt_histories
from genrl.training.pictures import save_animation


def write(run, records, cut=""):
    (run / "prompt_rewards.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + cut)


def record(iteration, rewards, text=None, kind="eval"):
    found = {"iteration": iteration, "kind": kind, "prompt": list(range(len(rewards))), "reward": rewards}
    return found | ({"text": {str(i): t for i, t in enumerate(text)}} if text else {})


def test_histories_are_read_by_prompt_and_without_what_was_not_scored(make_run):
    run = make_run()
    records = [record(0, [0.5, None], ["a", "b"]), record(5, [0.75, 0.25]), record(5, [9.0], ["t"], kind="train")]
    write(run, records, cut='{"iteration": 10, "ki')
    a, b = prompt_histories(run, "eval")
    assert (a.text, a.rewards, a.gain) == ("a", [(0, 0.5), (5, 0.75)], 0.25)
    assert (b.text, b.rewards, b.last) == ("b", [(5, 0.25)], 0.25)
    assert [h.rewards for h in prompt_histories(run, "train")] == [[(5, 9.0)]]
    assert prompt_histories(run / "nowhere", "eval") == []


def test_the_report_shows_both_ends_and_the_largest_changes(make_run):
    run = make_run()
    names = [f"prompt number {i:02d} <b>" for i in range(20)]
    write(run, [record(0, [i / 40 for i in range(20)], names), record(5, [(i * 7 % 20) / 20 for i in range(20)])])
    html = write_report(run).read_text()
    table = html.split("<h2>Prompts</h2>")[1].split("</section>")[0]
    last = {name: (i * 7 % 20) / 20 for i, name in enumerate(names)}
    order = sorted(names, key=last.__getitem__)
    blocks = table.split('class="group"')
    assert [b.split('">')[1].split("<")[0] for b in blocks[1:]] == ["The worst", "The best", "Gained most", "Lost most"]
    escaped = [name.replace("<", "&lt;").replace(">", "&gt;") for name in order]
    assert [block.count("&lt;b&gt;") for block in blocks[1:]] == [5, 5, 5, 5]
    assert all(name in blocks[1] for name in escaped[:5]) and all(name in blocks[2] for name in escaped[-5:])
    fell = sum(last[name] < i / 40 for i, name in enumerate(names))
    assert f"Mean reward of each of 20 held-out prompts; {fell} of them read less" in table


def test_few_prompts_are_all_listed_and_none_is_said(make_run):
    run = make_run()
    assert "No reward of single prompts was recorded" in write_report(run).read_text()
    write(run, [record(0, [0.5, 0.25], ["one", "two"])])
    html = write_report(run).read_text()
    assert html.index("two</td>") < html.index("one</td>") and "All, from the worst to the best" in html


@pytest.mark.parametrize("suffix", [".webp", ".gif"])
def test_films_are_embedded_beside_their_grids(make_run, suffix):
    run = make_run()
    path = run / "samples" / "iteration-000000.png"
    film = save_animation([torch.rand(3, 32, 32) for _ in range(3)], path)
    if suffix == ".gif":
        with Image.open(film) as moving:
            moving.save(film.with_suffix(".gif"), save_all=True)
        film.unlink()
    html = write_report(run).read_text()
    assert f"data:image/{suffix[1:]};base64," in html and "Before training: moving" in html


def test_shares_of_gates_are_drawn(make_run):
    run = make_run(iterations=3)
    assert "Gates: share" not in write_report(run).read_text()
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(
            json.dumps({"iteration": i, "kind": "train", "gate/pickscore": i / 4}) + "\n" for i in (1, 2, 3)
        )
    assert "Gates: share of samples that count" in write_report(run).read_text()


def test_changes_of_statistics_are_shares_of_the_base_model_and_a_missing_judge_is_told(make_run):
    run = make_run(iterations=10)
    text = write_report(run).read_text()
    assert "No judge was measured" not in text
    rows = [
        {"iteration": i, "kind": "eval", "eval/correct": 0.5, "eval/stats/dark_share": 0.451 + 0.0475 * i}
        for i in (0, 10)
    ]
    rows.append({"iteration": 10, "kind": "train", "reward/correct": 0.5})
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = write_report(run).read_text()
    assert "+0.475<small>+105 %</small>" in text and "No judge was measured" in text
