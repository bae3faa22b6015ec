"""The command line: quick help, quiet start-up, short errors with the right exit code."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from genrl import cli

ROOT = Path(__file__).resolve().parent.parent
# Complete configurations; the others are their bases and the files of `accelerate launch`.
SHIPPED = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if "algorithm:" in path.read_text())

CONFIG = """
generator: {class_path: cli_parts.Model}
prompts: {class_path: cli_parts.Prompts}
reward: {class_path: cli_parts.Score}
algorithm: {class_path: cli_parts.Method, init_args: {kernel: {class_path: genrl.diffusion.FlowSDE}}}
"""
PARTS = """
from genrl.diffusion.kernels import Kernel

class Model:
    def encode(self, prompts): ...

class Prompts:
    pass

class Score:
    def __call__(self, media, prompts, metadata): ...

class Method:
    def __init__(self, kernel: Kernel, epochs: int = 1):
        self.kernel, self.epochs = kernel, epochs
"""


def run_genrl(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "default", "-m", "genrl", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1", **environment},
        cwd=ROOT,
        timeout=120,
    )


class FakeLoop:
    """Stands for `genrl.training.Loop`; keeps what it was given."""

    last: FakeLoop
    failure: BaseException | None = None

    def __init__(self, **given):
        FakeLoop.last = self
        self.given = given
        self.resume = None

    def run(self, resume="auto"):
        self.resume = resume
        if self.failure:
            raise self.failure

    def dry_run(self):
        return {"trainable parameters": 123456, "memory": {"peak MiB": 12.3456}}


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A configuration of classes that lie in the current folder only, and a loop that trains nothing."""
    import genrl.training

    monkeypatch.setattr(genrl.training, "Loop", FakeLoop, raising=False)
    monkeypatch.setattr(FakeLoop, "failure", None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("GENRL_DEBUG", "0")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cli_parts.py").write_text(PARTS)
    (tmp_path / "run.yaml").write_text(CONFIG)
    yield "run.yaml"
    sys.modules.pop("cli_parts", None)


def test_help_needs_no_heavy_import():
    program = (
        "import sys; from genrl.cli import main; code = main(['--help']);"
        "heavy = {'torch', 'numpy', 'jsonargparse', 'rich', 'yaml', 'accelerate', 'diffusers'} & set(sys.modules);"
        "sys.exit(code or f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for command in ("train", "sample", "evaluate", "report", "doctor"):
        assert command in done.stdout


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("doctor",), ("train", "--help")], ids=" ".join)
def test_start_up_prints_nothing_on_stderr(arguments):
    done = run_genrl(*arguments)
    assert done.stderr == ""
    assert done.returncode == 0


@pytest.mark.parametrize("path", SHIPPED[:1], ids=lambda path: path.stem)
def test_help_of_a_shipped_config_is_quiet_and_lists_its_keys(path):
    done = run_genrl("train", str(path), "--help")
    assert done.stderr == ""
    assert done.returncode == 0
    assert "trainer.iterations" in done.stdout and "evaluation.every" in done.stdout


def test_doctor_names_versions_devices_and_folders(tmp_path):
    done = run_genrl("doctor", GENRL_CACHE=str(tmp_path / "cache"))
    for word in ("python", "torch", "accelerate", "cores", "gpu", str(tmp_path / "cache"), "torchrun"):
        assert word in " ".join(done.stdout.split())


def test_doctor_says_how_to_add_what_is_missing(monkeypatch, capsys):
    from genrl import doctor

    monkeypatch.setattr(doctor, "requirements", lambda: (["torch"], {"ocr": ["no-such-package"]}))
    assert doctor.run() == 0
    assert 'pip install "genrl[ocr]"' in capsys.readouterr().out
    monkeypatch.setattr(doctor, "requirements", lambda: (["torch", "no-such-package"], {}))
    assert doctor.run() == 1
    assert "pip install no-such-package" in capsys.readouterr().out


def test_train_builds_the_parts_and_runs_the_loop(config):
    assert (
        cli.main(["train", config, "trainer.iterations=3", "--resume", "never", "algorithm.kernel.noise_level=0.5"])
        == 0
    )
    loop = FakeLoop.last
    assert loop.resume == "never"
    assert loop.given["trainer"].iterations == 3
    assert loop.given["algorithm"].kernel.noise_level == 0.5
    assert loop.given["config"]["algorithm"]["init_args"]["kernel"]["init_args"]["noise_level"] == 0.5
    assert loop.given["name"] == "run" and loop.given["run_dir"] == "runs/run" and loop.given["seed"] == 0


def test_dry_run_prints_the_sizes_and_does_not_train(config, capsys):
    assert cli.main(["train", config, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "123,456" in out and "memory/peak MiB" in out and "12.35" in out
    assert FakeLoop.last.resume is None


def test_help_with_a_config_lists_keys_types_and_meanings(config, capsys):
    assert cli.main(["train", config, "--help"]) == 0
    out = capsys.readouterr().out
    for word in ("algorithm.kernel.noise_level", "algorithm.epochs", "trainer.group_size", "int", "samples per prompt"):
        assert word in out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["trian"], 2, "did you mean 'genrl train'"),
        (["xyz"], 2, "commands: train, sample"),
        (["train", "rum.yaml"], 2, "did you mean run.yaml"),
        (["train", "run.yaml", "trainer.iteratons=3"], 2, "did you mean 'trainer.iterations'"),
        (["train", "run.yaml", "trainer.iterations=0"], 2, "genrl: trainer.iterations = 0"),
        (["train", "run.yaml", "trainer.iterations=x"], 2, "expected int"),
        (["sample", "runs/none"], 2, "run directory runs/none does not exist"),
        (["evaluate", "."], 2, "has no config.yaml"),
        (["report", "runs/none"], 2, "'genrl train CONFIG' makes one"),
    ],
)
def test_mistakes_get_a_short_answer(config, capsys, arguments, code, said):
    assert cli.main(arguments) == code
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err and len(err.strip().splitlines()) == 1


def test_a_failed_run_exits_1_without_a_traceback(config, capsys, monkeypatch):
    from genrl.rewards import RewardError

    monkeypatch.setattr(FakeLoop, "failure", RewardError("returned inf", "sharpness", ["a seven"]))
    assert cli.main(["train", config]) == 1
    err = capsys.readouterr().err
    assert "sharpness" in err and "a seven" in err and "Traceback" not in err


def test_traceback_can_be_asked_for(config, monkeypatch):
    monkeypatch.setattr(FakeLoop, "failure", OSError("disk full"))
    with pytest.raises(OSError, match="disk full"):
        cli.main(["train", config, "--traceback"])
    monkeypatch.setenv("GENRL_DEBUG", "1")
    with pytest.raises(OSError, match="disk full"):
        cli.main(["train", config])


def test_a_missing_file_of_prompts_is_a_fault_of_the_configuration(config, capsys):
    override = "prompts={class_path: genrl.prompts.TextFile, init_args: {path: nowhere.txt}}"
    assert cli.main(["train", config, override]) == 2
    assert "prompts: prompt file 'nowhere.txt' does not exist" in " ".join(capsys.readouterr().err.split())


def test_an_error_of_the_program_is_not_hidden(config, monkeypatch):
    monkeypatch.setattr(FakeLoop, "failure", AttributeError("a bug"))
    with pytest.raises(AttributeError):
        cli.main(["train", config])


def test_sample_evaluate_and_report_reach_their_functions(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.yaml").write_text("name: x\n")
    calls = {}
    evaluation = types.ModuleType("genrl.training.evaluation")
    evaluation.sample_run = lambda run_dir, **given: calls.setdefault("sample", (run_dir, given)) and "out.png"
    evaluation.evaluate_run = lambda run_dir, **given: (
        calls.setdefault("evaluate", (run_dir, given)) and {"eval/judge": 0.5}
    )
    evaluation.save_evaluation = lambda found, *given: calls.setdefault("save", (found, *given)) and "found.json"
    report = types.ModuleType("genrl.report")
    report.write_report = lambda run_dir: run_dir / "report.html"
    monkeypatch.setitem(sys.modules, "genrl.training.evaluation", evaluation)
    monkeypatch.setitem(sys.modules, "genrl.report", report)
    run = str(tmp_path)
    assert cli.main(["sample", run, "--prompt", "7", "--prompt", "8", "-n", "3", "--checkpoint", "best"]) == 0
    assert calls["sample"][0] == tmp_path
    assert calls["sample"][1] == {
        "prompts": ["7", "8"], "n": 3, "out": None, "checkpoint": "best", "steps": None, "seed": 0, "weights": "auto",
    }  # fmt: skip
    assert cli.main(["evaluate", run, "--samples", "5", "--sampler", "train", "--out", "a.json"]) == 0
    assert calls["save"] == ({"eval/judge": 0.5}, tmp_path, "train", "a.json")
    assert calls["evaluate"][1] == {
        "samples_per_prompt": 5, "checkpoint": "last", "steps": None, "seed": None, "sampler": "train",
        "weights": "auto",
    }  # fmt: skip
    assert cli.main(["report", run]) == 0
    out = capsys.readouterr().out
    assert "out.png" in out and "eval/judge" in out and "report.html" in out and "written: found.json" in out


def test_functions_of_evaluation_take_what_the_command_line_gives():
    import inspect

    from genrl.training.evaluation import evaluate_run, sample_run

    inspect.signature(evaluate_run).bind(
        "run", samples_per_prompt=1, checkpoint="", steps=1, seed=1, sampler="", weights=""
    )
    inspect.signature(sample_run).bind("run", prompts=[], n=1, out="", checkpoint="", steps=1, seed=1, weights="")


def test_impossible_number_of_samples_is_refused(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("name: x\n")
    assert cli.main(["sample", str(tmp_path), "-n", "0"]) == 2
    assert "'0' is not a whole number above 0" in capsys.readouterr().err
