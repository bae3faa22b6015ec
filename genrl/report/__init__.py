"""The HTML report of a run: curves, ratio gauges by timestep, samples before and after.

`write_report(run_dir)` writes `report.html` of one run, `write_comparison(run_dirs, out, title)` overlays several, and
`read_metrics(run_dir)` gives the records of `metrics.jsonl`. Only the standard library is imported before one is used.
"""

from genrl.report.comparison import write_comparison
from genrl.report.data import read_metrics
from genrl.report.report import write_report

__all__ = ["read_metrics", "write_comparison", "write_report"]
