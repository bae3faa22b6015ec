"""The command line: `genrl train | collect | inspect | sample | evaluate | compare | export | report | doctor`.

Only the standard library is imported at the top, so that `genrl --help` answers at once; each command imports what it
needs. Mistakes are answered in a line or two on stderr: exit code 2 for a configuration or command line that cannot be
used, 1 for a run that failed. `--traceback` or GENRL_DEBUG=1 shows where an error was raised.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import genrl
from genrl import cli_policies as policies
from genrl import cli_serve

Arguments = argparse.Namespace


class UsageError(ValueError):
    """A command line that cannot be carried out; the message says what can."""


class Command(NamedTuple):
    """A subcommand: one line of help, what it adds to its parser, and what it does (returns the exit code).

    `lists_keys` commands have a --help of their own, which lists the keys of a configuration.
    """

    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Arguments], int]
    lists_keys: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _main_parser()
    if not given or given[0] in ("-h", "--help"):
        parser.print_help()
        return 0
    if given[0] == "--version":
        print(f"genrl {genrl.__version__}")
        return 0
    name = given[0]
    if name not in COMMANDS:
        best = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean 'genrl {best[0]}'?" if best else f"commands: {', '.join(COMMANDS)}"
        return _fail(f"unknown command {name!r}; {hint}", 2)
    command = COMMANDS[name]
    sub = argparse.ArgumentParser(prog=f"genrl {name}", description=command.help, add_help=not command.lists_keys)
    command.configure(sub)
    sub.add_argument("--traceback", action="store_true", help="on an error, show where it was raised")
    try:
        options = sub.parse_intermixed_args(given[1:])
    except SystemExit as stop:  # argparse has printed the help (0) or what it could not read (2)
        return int(stop.code or 0)
    return _guarded(command, options, sub)


def _main_parser() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {name:<12} {command.help}" for name, command in COMMANDS.items())
    return argparse.ArgumentParser(
        prog="genrl",
        usage="genrl COMMAND ...",
        description=(genrl.__doc__ or "").split("\n")[0],
        epilog=f"commands:\n{lines}\n\n'genrl COMMAND --help' explains a command; "
        "'genrl train CONFIG --help' lists every key of a configuration.\n'genrl --version' prints the version.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _guarded(command: Command, options: Arguments, parser: argparse.ArgumentParser) -> int:
    options.parser = parser
    debug = options.traceback or os.environ.get("GENRL_DEBUG", "0") not in ("", "0")
    _quieten_dependencies()
    if os.getcwd() not in sys.path:  # a user's own rewards and models lie beside the configuration
        sys.path.append(os.getcwd())
    try:
        return command.run(options)
    except KeyboardInterrupt:
        return _fail("stopped at once; the same command goes on from the last checkpoint, if run_dir has one", 130)
    except BrokenPipeError:  # `genrl ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, RuntimeError, ImportError, FloatingPointError) as error:
        if debug:
            raise
        # By name, because not all of them are loaded.
        usage = type(error).__name__ in ("ConfigError", "UsageError", "SetupError", "EnvError")
        return _fail(str(error) or type(error).__name__, 2 if usage else 1)


def _fail(message: str, code: int) -> int:
    if code == 2 and os.environ.get("RANK", "0") != "0":  # every process reads the same configuration
        return code
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print("genrl:", style="bold red", end=" ")
    console.print(message, style="red", markup=False)
    if code == 1:
        console.print("(--traceback shows where)", style="dim", markup=False)
    return code


def _quieten_dependencies() -> None:
    """Silence what dependencies say about their own future; warnings about this run stay."""
    packages = r"(torch|torchvision|accelerate|diffusers|transformers|peft|huggingface_hub|tensorboard|sklearn)(\.|$)"
    for category in (FutureWarning, DeprecationWarning, PendingDeprecationWarning, SyntaxWarning):
        warnings.filterwarnings("ignore", category=category, module=packages)
    warnings.filterwarnings("ignore", message=".*pynvml package is deprecated.*")
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight.*")  # norms under autocast
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")


# ---------------------------------------------------------------------------------------------------- train


def _configure_train(parser: argparse.ArgumentParser) -> None:
    parser.usage = "genrl train CONFIG [key=value ...] [--dry-run] [--tiny] [--resume auto|never|require]"
    parser.epilog = "'genrl train CONFIG --help' lists every key that can be set."
    parser.add_argument("config", nargs="?", help="YAML file, see configs/")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="changes, e.g. trainer.iterations=10 algorithm.kernel.noise_level=0.5",
    )
    parser.add_argument("--dry-run", action="store_true", help="build everything, print sizes and costs, train nothing")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="one iteration on random models of the same families, made here: shows that a recipe runs (RUN-tiny)",
    )
    parser.add_argument(
        "--resume",
        choices=("auto", "never", "require"),
        default="auto",
        help="go on from the last checkpoint in run_dir: if there is one, never, or fail without one (default: auto)",
    )
    parser.add_argument("-h", "--help", action="store_true", help="this text, or with CONFIG all keys of that file")


def _train(options: Arguments) -> int:
    if options.config is None:
        options.parser.print_help()
        return 0 if options.help else 2
    from genrl.config import build, listing, load_config, run_class

    config = load_config(options.config, options.overrides)
    if options.tiny:
        from genrl.tiny_twin import tiny_twin

        config = tiny_twin(config, [text.partition("=")[0].replace(".init_args", "") for text in options.overrides])
    if options.help:
        options.parser.print_usage()
        print_keys(config.source, listing(config))
        return 0
    if options.tiny and "reward" in config.raw and os.environ.get("RANK", "0") == "0":
        print("tiny twin: the rewards of the recipe are named recipe/..., and a second one, twin, makes samples differ")
    run = run_class(config)(**build(config), config=config.raw)
    if options.dry_run:
        _print_table(run.dry_run(), f"{config.raw['name']}: dry run, nothing was trained")
        return 0
    run.run(resume=options.resume)
    return 0


def print_keys(source: Any, keys: Any) -> None:
    """Every key that can be set in a file."""
    from rich.markup import escape
    from rich.table import Table

    from genrl.parts import to_plain
    from genrl.signatures import REQUIRED, type_name

    table = Table(box=None, pad_edge=False, title_justify="left", title=f"Keys of {source}, as key=value")
    for heading, ratio in (("key", None), ("value", None), ("type", None), ("meaning", 1)):
        table.add_column(heading, overflow="fold", ratio=ratio)
    for key, parameter, value in keys:
        part = isinstance(value, dict)
        shown = value.get("class_path", "") if part else "(required)" if value is REQUIRED else _shown(value)
        usual = REQUIRED if part or parameter.default is REQUIRED else to_plain(parameter.default)
        default = "" if usual in (REQUIRED, value) else f" (default: {_shown(usual)})"
        kind = "section" if part and not shown else type_name(parameter.hint).replace(" (class_path, init_args)", "")
        table.add_row(*map(escape, (key, shown, kind, parameter.help + default)))
    _console(140).print(table)


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value) if isinstance(value, tuple) else value)


def _print_table(values: dict[str, Any], title: str) -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, show_header=False, title=escape(title), title_justify="left", pad_edge=False)
    for key, value in _flat(values):
        text = f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)
        table.add_row(escape(key), escape(f"{value:.4g}" if isinstance(value, float) else text))
    _console(100).print(table)


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in values.items():
        rows += _flat(value, f"{prefix}{key}/") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return rows


def _console(width: int) -> Any:
    """Where the output is no terminal, wide enough for a table; lines are never cut at 80 columns in a file."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)


# ---------------------------------------------------------------------------------------------------- the others


def _configure_sample(parser: argparse.ArgumentParser) -> None:
    _configure_run(parser)
    _configure_weights(parser)
    parser.add_argument("--prompt", action="append", dest="prompts", metavar="TEXT", help="may be given several times")
    parser.add_argument("-n", type=_positive, default=8, help="samples for each prompt (default: 8)")
    parser.add_argument("--steps", type=_positive, help="sampling steps (default: those of the run's evaluation)")
    parser.add_argument("--seed", type=int, default=0, help="fixes the noise (default: 0)")
    parser.add_argument("--out", metavar="FOLDER", help="where the images go (default: RUN/generated)")
    group = parser.add_argument_group("steering (a stochastic sampler whose particles are resampled by a reward)")
    group.add_argument("--steer", choices=("reward",), help="by the reward of the run; no training is needed")
    group.add_argument("--particles", type=_positive, metavar="K", help="for each sample, which costs K (default: 4)")
    group.add_argument(
        "--steer-strength",
        type=float,
        metavar="LAM",
        help="samples are to follow p(x) exp(LAM reward(x)) (default: 2.0; what is much depends on the reward's scale)",
    )


def _sample(options: Arguments) -> int:
    run_dir = _run_dir(options.run)
    if policies.is_policy(run_dir):
        raise UsageError(f"{run_dir} trained a policy, which draws no pictures; try genrl evaluate {run_dir}")
    from genrl.training.evaluation import sample_run

    names = ("prompts", "n", "out", "checkpoint", "steps", "seed", "weights")
    given = {name: getattr(options, name) for name in names}
    if options.steer is None:
        for flag in ("particles", "steer_strength"):
            if getattr(options, flag) is not None:
                raise UsageError(f"--{flag.replace('_', '-')} says how to steer; add --steer reward")
    else:
        from genrl.algorithms.steering import ParticleSteering

        strength = 2.0 if options.steer_strength is None else options.steer_strength
        given["steering"] = ParticleSteering(options.particles or 4, strength)
    grid = sample_run(run_dir, **given)
    if options.steer is not None:
        import json

        values = json.loads((grid.parent / "steering.json").read_text())
        before, after = (
            {k: "-" if v is None else v for k, v in values[name].items()} for name in ("before", "steered")
        )
        rows = {k: f"{_number(v)} -> {_number(after[k])}" for k, v in before.items() if _is_compared(k)}
        _print_table({**rows, **values["steering"], "sampler": values["sampler"]}, "without steering -> with it")
    print(f"samples: {grid}")
    return 0


def _is_compared(name: str) -> bool:
    return not name.startswith("stats/") and not name.endswith(("_low", "_high"))


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def _configure_evaluate(parser: argparse.ArgumentParser) -> None:
    _configure_run(parser)
    _configure_weights(parser)
    parser.add_argument(
        "--seed", type=int, help="of the noise (default: the run's own), or of the first start state (default: 100000)"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="where the JSON goes, which is replaced (default: RUN/evaluation-CHECKPOINT-SAMPLER.json, of a policy "
        "RUN/evaluation-SEED.json)",
    )
    group = parser.add_argument_group("generators")
    group.add_argument("--samples", type=_positive, metavar="N", help="for each prompt (default: the run's own)")
    group.add_argument("--steps", type=_positive, help="sampling steps (default: the run's own)")
    group.add_argument(
        "--sampler", choices=("ode", "train"), default="ode", help="deterministic, or that of training (default: ode)"
    )
    policies.configure_evaluate(parser, _positive)


def _evaluate(options: Arguments) -> int:
    from pathlib import Path

    if policies.is_policy(Path(options.run)):
        return policies.evaluate(options)
    run_dir = _run_dir(options.run)
    from genrl.training.evaluation import evaluate_run, save_evaluation

    names = ("checkpoint", "steps", "seed", "sampler", "weights")
    given = {name: getattr(options, name) for name in names}
    found = evaluate_run(run_dir, samples_per_prompt=options.samples, **given)
    _print_table(found, f"evaluation of {run_dir}")
    print(f"written: {save_evaluation(found, run_dir, options.sampler, options.out)}")
    return 0


def _configure_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run directory, the run_dir of a configuration")


def _configure_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        default="last",
        metavar="NAME",
        help="last, best or step-N, as in RUN/checkpoints, or start: a generator before training (default: last)",
    )
    parser.add_argument(
        "--weights",
        choices=("auto", "ema", "raw"),
        default="auto",
        help="the moving average, the trained weights, or the average if the run kept one (default: auto)",
    )


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _report(options: Arguments) -> int:
    run_dir = _run_dir(options.run)
    from genrl.report import write_report

    print(f"report: {write_report(run_dir)}")
    return 0


def _run_dir(text: str) -> Any:
    from pathlib import Path

    folder = Path(text)
    if (folder / "config.yaml").is_file():
        return folder
    runs = sorted(str(path.parent) for root in {folder.parent, Path("runs")} for path in root.glob("*/config.yaml"))
    known = f"runs here: {', '.join(runs)}" if runs else "'genrl train CONFIG' makes one"
    problem = "has no config.yaml, so it is no run directory" if folder.exists() else "does not exist"
    raise UsageError(f"run directory {text} {problem}; {known}")


def _doctor(options: Arguments) -> int:
    from genrl.doctor import run

    return run()


COMMANDS = {
    "train": Command("fine-tune a generator or train a policy as a configuration says", _configure_train, _train, True),
    "sample": Command("draw samples from a run's checkpoint", _configure_sample, _sample),
    "evaluate": Command("measure a checkpoint: held-out prompts, or episodes", _configure_evaluate, _evaluate),
    "collect": Command("write demonstrations of a scripted expert", policies.configure_collect, policies.collect, True),
    "inspect": Command("say what a data set of demonstrations holds", policies.configure_inspect, policies.inspect),
    "compare": Command("compare two evaluations of policies", policies.configure_compare, policies.compare),
    "export": Command("write a one-step policy as ONNX", policies.configure_export, policies.export),
    "report": Command("write the HTML report of a run", _configure_run, _report),
    "serve-reward": Command("serve a reward over HTTP, for RemoteReward", cli_serve.configure, cli_serve.serve, True),
    "doctor": Command("show versions, devices and what is missing", lambda parser: None, _doctor),
}


if __name__ == "__main__":
    sys.exit(main())
