"""Runs of the toy leave out the HTML report, which has tests of its own."""

import pytest


@pytest.fixture(autouse=True)
def no_report(monkeypatch):
    import genrl.report

    monkeypatch.setattr(genrl.report, "write_report", lambda run_dir: None)
