from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from genrl.report import read_metrics, write_comparison, write_report

VOID = {"meta", "link", "img", "br", "hr", "input"}
SVG_EMPTY = {"line", "rect", "circle", "polygon", "polyline"}


class Page(HTMLParser):
    """Collects text and attributes, and fails on a tag that is closed in the wrong order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for key, value in attrs if key in ("src", "href", "xlink:href", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in SVG_EMPTY
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def read(file: Path) -> Page:
    return Page(file.read_text(encoding="utf-8"))


def append(run: Path, text: str) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(text)


def test_report_is_well_formed_self_contained_and_shows_the_values(make_run):
    run = make_run(summary={"status": "finished", "wall_seconds": 98.2, "reference": {"judge": 0.9876}})
    file = write_report(run)
    page = read(file)
    assert file == run / "report.html"
    assert all(link.startswith("data:") for link in page.links)
    assert "script" not in page.tags
    assert page.tags.count("img") == 5
    for text in (
        "finished, iteration 40",
        "0.842",
        "0.975",
        "[0.955, 0.990]",
        "real data",
        "0.988",
        "1 min 38 s",
        "72.8k",
    ):
        assert text in page.text
    for text in ("predicted −KL", "0.75", "251 904", "2.14.1", "genrl train configs/flow_grpo_digits.yaml seed=0"):
        assert text in page.text
    assert not list(run.glob(".report*"))


def test_step_table_gives_the_mean_over_the_run_and_the_predicted_shift(make_run):
    run = make_run(iterations=2)
    rows = [
        {
            "iteration": i,
            "kind": "train",
            "step_0/t": 0.8,
            "step_0/log_ratio_mean": m,
            "step_0/kl_old": k,
            "step_0/gap_max": 0.5,
        }
        for i, m, k in ((1, -0.0020, 0.0027), (2, -0.0028, 0.0029))
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "0 0.800 −0.0024 −0.0028 – – – – 0.500" in read(write_report(run)).text


@pytest.mark.parametrize(
    "hostile", ["<script>alert(1)</script>", '"><img src=http://x.example/a.png onerror=x>', "</pre>"]
)
def test_every_text_from_outside_is_escaped(make_run, hostile):
    event = {"iteration": 3, "kind": "event", "event": hostile, "message": hostile, "prompt": hostile}
    row = {"iteration": 3, "kind": "train", f"reward/{hostile}": 0.5, f"stats/{hostile}": 1.0}
    evaluation = {"iteration": 3, "kind": "eval", f"eval/{hostile}": 0.5}
    run = make_run(
        events=(event, row, evaluation),
        config={"name": hostile, "prompts": [hostile], hostile: 1},
        run={"name": hostile, "method": hostile, "command": hostile, "versions": {hostile: hostile},
             "started": hostile, "preview_prompts": [hostile], "sizes": {hostile: [hostile]}},
        summary={"status": "failed", "error": hostile, "reference": {hostile: 0.5}},
    )  # fmt: skip
    for file in (write_report(run), write_comparison([run], run / "comparison.html", hostile)):
        page = read(file)
        assert "script" not in page.tags
        assert all(link.startswith("data:") for link in page.links)
        assert " ".join(hostile.split()) in page.text


def test_killed_run_shows_its_complete_records(make_run):
    run = make_run(iterations=13)
    append(run, '{"iteration": 14, "kind": "train", "reward/corr')
    assert [row["iteration"] for row in read_metrics(run)][-1] == 13
    text = read(write_report(run)).text
    assert "not finished: iteration 13 of 13 is the last record" in text
    assert "line 17 is cut" in text
    assert "summary.json is missing" in text


def test_line_cut_inside_a_character_is_left_out(make_run):
    run = make_run(iterations=1)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write('{"iteration": 2, "kind": "event", "message": "é'.encode()[:-1])
    assert read_metrics(run)[-1]["iteration"] == 1


def test_damaged_line_in_the_middle_is_an_error_for_the_loop_and_a_note_in_the_report(make_run):
    run = make_run(iterations=1)
    append(run, '{"iteration": 2, "ki{"iteration": 2}\n{"iteration": 3, "kind": "train"}\n')
    with pytest.raises(ValueError, match="line 3 is not a JSON object"):
        read_metrics(run)
    assert "line 3 is damaged" in read(write_report(run)).text


def test_run_without_ratios_says_so(make_run):
    text = read(write_report(make_run(ratios=False))).text
    assert "No ratio by timestep was recorded" in text
    assert "Not recorded by this method:" in text and "ratio/first_step_gap" in text
    assert "0.975" in text


def test_empty_run_says_what_is_missing(tmp_path):
    for content in (None, "", "\n"):
        if content is not None:
            (tmp_path / "metrics.jsonl").write_text(content)
        assert read_metrics(tmp_path) == []
        text = read(write_report(tmp_path)).text
        for name in ("metrics.jsonl", "run.json", "summary.json", "config.yaml", "samples/"):
            assert name in text
        assert "nothing recorded yet" in text


@pytest.mark.parametrize("call", [read_metrics, write_report, lambda d: write_comparison([d], d / "x.html", "x")])
def test_missing_run_directory_is_named_with_a_remedy(tmp_path, call):
    with pytest.raises(FileNotFoundError, match=r"no_such_run.*genrl train"):
        call(tmp_path / "no_such_run")


def test_nan_and_inf_are_gaps_and_are_counted(make_run):
    run = make_run(iterations=12)
    append(run, '{"iteration": 13, "kind": "train", "grad/norm": NaN, "loss/total": Infinity, "kl/reference": null}\n')
    append(run, '{"iteration": 13, "kind": "eval", "eval/judge": NaN, "eval/judge_low": NaN}\n')
    html = write_report(run).read_text()
    text = Page(html).text
    assert "1 value is not finite and not drawn" in text
    assert 'points="nan' not in html and ",nan" not in html and "inf" not in html.split("Gradient norm")[1][:3000]


def test_later_record_of_an_iteration_wins(make_run):
    run = make_run(iterations=10, summary={"status": "finished"})
    append(run, '{"iteration": 10, "kind": "eval", "eval/judge": 0.1234}\n')
    text = read(write_report(run)).text
    assert "0.123" in text
    assert "0.927" not in text


def test_damaged_files_are_reported_not_fatal(make_run):
    run = make_run(iterations=10, summary={})
    (run / "run.json").write_text("{")
    (run / "summary.json").write_text("[1]")
    (run / "config.yaml").write_text("a: [1")
    grid = run / "samples" / "iteration-000010.png"
    grid.write_bytes(grid.read_bytes()[:200])
    text = read(write_report(run)).text
    for part in (
        "run.json is damaged",
        "summary.json is not a JSON object",
        "config.yaml does not parse",
        "is damaged.",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("summary", "events", "expected"),
    [
        ({"status": "interrupted", "iteration": 7}, (), "interrupted at iteration 7 of 10"),
        ({"status": "failed", "iteration": 7, "error": "reward ocr"}, (), "failed at iteration 7 of 10: reward ocr"),
        (
            None,
            ({"iteration": 8, "kind": "event", "event": "failed", "message": "inf"},),
            "failed at iteration 8 of 10: inf",
        ),
    ],
)
def test_status_is_told(make_run, summary, events, expected):
    assert expected in read(write_report(make_run(iterations=10, summary=summary, events=events))).text


def test_alarms_are_counted_apart_from_plain_events(make_run):
    events = (
        {"iteration": 4, "kind": "event", "event": "hacking_alarm", "message": "proxy up, judge down", "judge": 0.8123},
        {"iteration": 5, "kind": "event", "event": "checkpoint", "message": "saved"},
    )
    text = read(write_report(make_run(events=events))).text
    assert "1 alarm " in text
    assert "proxy up, judge down · judge = 0.812" in text


def test_long_run_stays_small(make_run):
    run = make_run(iterations=3000, ratios=False)
    file = write_report(run)
    assert file.stat().st_size < 1_500_000
    assert "mean of neighbouring iterations" in read(file).text


def test_comparison_averages_seeds_of_a_method(make_run, tmp_path):
    runs = [
        make_run(f"{method}-seed{seed}", seed=seed, ratios=method != "nft")
        for method in ("grpo", "nft")
        for seed in (0, 1, 2)
    ]
    for seed, value in enumerate((0.90, 0.95, 1.0)):
        append(runs[seed], json.dumps({"iteration": 40, "kind": "eval", "eval/judge": value}) + "\n")
    page = read(write_comparison(runs, tmp_path / "docs" / "comparison.html", "Two methods"))
    assert page.links == ["data:,"]
    assert "grpo: 3 runs" in page.text and "nft: 3 runs" in page.text
    assert "0.950 ± 0.050" in page.text


def test_comparison_takes_explicit_groups(make_run, tmp_path):
    groups = {"first": [make_run("a")], "second": [make_run("b"), make_run("c")]}
    text = read(write_comparison(groups, tmp_path / "out.html", "x")).text
    assert "first: 1 run " in text and "second: 2 runs" in text


def test_comparison_of_nothing_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="Give at least one run directory"):
        write_comparison([], tmp_path / "out.html", "x")
