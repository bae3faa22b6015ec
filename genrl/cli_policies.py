"""Commands about policies, demonstrations and environments: `genrl collect | inspect | evaluate | compare | export`.

Like `genrl.cli`, it imports only the standard library at the top.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

Arguments = argparse.Namespace
EXPERT = "expert"


def configure_collect(parser: argparse.ArgumentParser) -> None:
    """Arguments of `genrl collect`."""
    parser.usage = "genrl collect CONFIG [key=value ...]"
    parser.epilog = "'genrl collect CONFIG --help' lists every key that can be set."
    parser.add_argument("config", nargs="?", help="YAML file with env, episodes, out ..., see configs/collect/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes, e.g. episodes=100")
    parser.add_argument("-h", "--help", action="store_true", help="this text, or with CONFIG all keys of that file")


def collect(options: Arguments) -> int:
    """Write demonstrations of a scripted expert."""
    if options.config is None:
        options.parser.print_help()
        return 0 if options.help else 2
    from genrl.config import load_settings, settings_listing
    from genrl.envs import CollectSettings

    if options.help:
        from genrl.cli import print_keys

        options.parser.print_usage()
        print_keys(options.config, settings_listing(options.config, options.overrides, CollectSettings))
        return 0
    settings = load_settings(options.config, options.overrides, CollectSettings)
    if Path(settings.out).exists():
        raise ValueError(f"{settings.out} exists and is not overwritten; delete it, or set out=ANOTHER")
    path = settings.run(progress=True)
    print(f"demonstrations: {path}")
    return 0


def configure_inspect(parser: argparse.ArgumentParser) -> None:
    """Arguments of `genrl inspect`."""
    parser.add_argument("dataset", metavar="DATASET", help="of robomimic, LeRobot, Minari, zarr or OGBench")
    parser.add_argument("--format", default="auto", help="of the data set; found out by itself if not given")
    parser.add_argument("--json", metavar="FILE", help="also write everything as JSON")


def inspect(options: Arguments) -> int:
    """Say what a data set holds and how good it is."""
    from genrl.envs.data import inspect_demonstrations

    report = inspect_demonstrations(options.dataset, format=options.format)
    print_rows(report.rows(), f"{options.dataset}")
    if options.json:
        from genrl.training.logging import write_json

        write_json(Path(options.json), report.to_dict())
        print(f"written: {options.json}")
    return 0


def configure_evaluate(parser: argparse.ArgumentParser, positive: Any) -> None:
    """Arguments of `genrl evaluate` that are about policies."""
    group = parser.add_argument_group("policies")
    group.add_argument("--env", metavar="ID", help="environment (default: the run's own)")
    group.add_argument("--episodes", type=positive, metavar="N", help="start states, one episode each (default: 50)")
    group.add_argument("--n-envs", type=positive, metavar="N", help="environments at once; changes no result")
    group.add_argument("--backend", choices=("sync", "async"), default="sync", help="one process or several")
    group.add_argument("--success", metavar="RULE", help="any, final or hold:K (default: as the family has it)")
    group.add_argument("--videos", type=int, default=2, metavar="N", help="episodes to film (default: 2, 0 for none)")
    group.add_argument("--stac", type=int, default=0, metavar="B", help="chunks drawn to log temporal consistency")
    group.add_argument("--device", default="auto", help="cpu, cuda or auto (default: auto)")


def is_policy(folder: Path) -> bool:
    """Whether a folder is the run of a policy, or a saved policy, or stands for a task's expert."""
    if str(folder) == EXPERT or (folder / "config.json").is_file():
        return True
    if not (folder / "config.yaml").is_file():
        return False
    import yaml

    from genrl.config import kind_of

    return kind_of(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")) or {}) == "policy"


def evaluate(options: Arguments) -> int:
    """Evaluate a policy in its environment."""
    others = [f"--{name}" for name in ("samples", "steps") if getattr(options, name) is not None]
    others += ["--sampler"] if options.sampler != "ode" else []
    if others:
        raise ValueError(f"{', '.join(others)} is for generators, and {options.run} is a policy; leave it out")
    if options.seed is not None and options.seed < 0:
        raise ValueError(f"--seed {options.seed} must not be negative")
    from genrl.envs import evaluate as run_episodes

    folder, seed = Path(options.run), 100_000 if options.seed is None else options.seed
    policy: Any = EXPERT
    label, source, checkpoint = None, EXPERT, None
    if options.run != EXPERT:
        from genrl.training.policy_runs import load_policy_of

        policy, label, path = load_policy_of(folder, options.checkpoint, options.weights, options.device)
        source, checkpoint = str(path), path.name
    elif not options.env:
        raise ValueError("the expert of which task? Name it: genrl evaluate expert --env metaworld/push-v3")
    out = Path(options.out) if options.out else _result_file(options, folder, seed)
    found = run_episodes(
        policy,
        env=options.env,
        episodes=options.episodes or 50,
        seed=seed,
        n_envs=options.n_envs,
        backend=options.backend,
        success=options.success,
        videos=options.videos,
        video_dir=out.with_suffix("") if options.videos else None,
        stac=options.stac or None,
        weights=label,
        source=source,
        checkpoint=checkpoint,
        progress=True,
        out=out,
    )
    print_rows(found.table(), f"evaluation of {source}")
    print(f"written: {out}")
    return 0


def _result_file(options: Arguments, folder: Path, seed: int) -> Path:
    """Best and last, other weights and other environments have files of their own."""
    if options.run == EXPERT:
        folder = Path("runs") / f"expert-{options.env.replace('/', '-')}"
    parts = [] if options.run == EXPERT or options.checkpoint == "last" else [options.checkpoint]
    parts += [] if options.weights == "auto" else [options.weights]
    parts += [] if options.run == EXPERT or not options.env else [options.env.replace("/", "-")]
    return folder / "-".join(["evaluation", *parts, f"{seed}.json"])


def configure_compare(parser: argparse.ArgumentParser) -> None:
    """Arguments of `genrl compare`."""
    parser.add_argument("first", metavar="A", help="JSON file of `genrl evaluate`")
    parser.add_argument("second", metavar="B", help="another one, on the same start states")


def compare(options: Arguments) -> int:
    """Compare two evaluations episode by episode."""
    from genrl.envs import Evaluation, compare_evaluations

    first, second = Evaluation.load(options.first), Evaluation.load(options.second)
    print_rows(compare_evaluations(first, second).rows(), f"A {options.first}, B {options.second}")
    return 0


def configure_export(parser: argparse.ArgumentParser) -> None:
    """Arguments of `genrl export`."""
    parser.add_argument("run", metavar="RUN", help="run of a policy, or a saved policy")
    parser.add_argument("out", metavar="FILE", help="ONNX file to write")
    parser.add_argument("--checkpoint", default="last", metavar="NAME", help="last, best or step-N (default: last)")


def export(options: Arguments) -> int:
    """Write a one-step policy as ONNX, encoder and normaliser included."""
    from genrl.policies.export import export_onnx
    from genrl.training.policy_runs import load_policy_of

    policy, _, source = load_policy_of(Path(options.run), options.checkpoint, "auto")
    print(f"{source} written to {export_onnx(policy, options.out)}, which acts in onnxruntime as it does in torch")
    return 0


def print_rows(rows: Any, title: str) -> None:
    """A table of rows; the first row is the heading when the rows are longer than two cells."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=140)
    rows = [tuple(str(cell) for cell in row) for row in rows]
    wide = max((len(row) for row in rows), default=0)
    table = Table(box=None, show_header=wide > 2, title=escape(title), title_justify="left", pad_edge=False)
    heading, body = (rows[0], rows[1:]) if wide > 2 else (("",) * wide, rows)
    for name in heading:
        table.add_column(escape(name), overflow="fold")
    for row in body:
        table.add_row(*map(escape, row))
    console.print(table)
