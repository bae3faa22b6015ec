"""Configurations: complete, loadable again, and mistakes answered with what is right."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from genrl.config import Config, ConfigError, build, listing, load_config, save
from genrl.parts import import_path, to_plain
from genrl.signatures import check_value, parameters, type_name

ROOT = Path(__file__).resolve().parent.parent
# Complete configurations; the others are their bases and the files of `accelerate launch`.
SHIPPED = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if "algorithm:" in path.read_text())

PARTS = '''
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol
from collections.abc import Sequence

class Kernel(Protocol):
    def rf_coefficients(self, t, t_next): ...

@dataclass(frozen=True)
class Loud:
    """Adds noise.

    Args:
        noise_level: how much, in [0, 1].
    """
    noise_level: float = 0.7
    def rf_coefficients(self, t, t_next): ...

@dataclass(frozen=True)
class Quiet:
    def rf_coefficients(self, t, t_next): ...

class Score:
    differentiable = False
    def __init__(self, path: str = "a.b", limits: tuple[float, float] = (0.0, 1.0)):
        self.path, self.limits = path, limits
    def __call__(self, media, prompts, metadata): ...

class Sum:
    def __init__(self, rewards: dict[str, Any], weights: dict[str, float] | None = None):
        self.rewards, self.weights = rewards, weights
    def __call__(self, media, prompts, metadata): ...

class Model:
    def __init__(self, width: int = 8, sizes: Sequence[int] = (1, 2), folder: Path | None = None, **others: Any):
        self.width, self.sizes, self.folder, self.others = width, sizes, folder, others
    def encode(self, prompts): ...
    @classmethod
    def small(cls, width: int = 2):
        return cls(width)

class Prompts:
    pass

class Method:
    def __init__(self, kernel: Kernel = Loud(), clip: float | Literal["auto"] = "auto", epochs: int = 1,
                 regularizers: list[Any] = (), helper: Kernel | None = None, order: Literal["up", "down"] = "up"):
        if epochs < 1:
            raise ValueError(f"epochs = {epochs} must be at least 1")
        self.kernel, self.clip, self.epochs, self.regularizers, self.helper = kernel, clip, epochs, regularizers, helper
'''
BASIC = """
generator: {class_path: my_parts.Model}
prompts: {class_path: my_parts.Prompts}
reward:
  class_path: my_parts.Sum
  init_args:
    rewards: {right: {class_path: my_parts.Score}}
algorithm:
  class_path: my_parts.Method
  init_args:
    kernel: {class_path: my_parts.Loud, init_args: {noise_level: 0.5}}
trainer: {iterations: 3}
"""


@dataclass
class TrainerSettings:
    """How long and how fast."""

    iterations: int = 10
    lr: float = 3e-4  # of AdamW
    betas: tuple[float, float] = (0.9, 0.999)
    precision: Literal["fp32", "bf16"] = "fp32"
    ema: float | None = None


@dataclass
class EvaluationSettings:
    every: int = 5
    gauges: dict[str, Any] = field(default_factory=dict)


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    """Writes YAML text to a file; classes come from a module that only this test's folder has."""
    settings = types.ModuleType("genrl.training.settings")
    settings.TrainerSettings, settings.EvaluationSettings = TrainerSettings, EvaluationSettings
    monkeypatch.setitem(sys.modules, "genrl.training.settings", settings)
    monkeypatch.setitem(sys.modules, "my_parts", None)
    monkeypatch.delitem(sys.modules, "my_parts")
    (tmp_path / "my_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def write(text: str = BASIC, name: str = "x.yaml") -> str:
        (tmp_path / name).write_text(text)
        return name

    return write


def refused(path: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        build(load_config(path, overrides))
    return str(caught.value)


def test_defaults_are_filled_in_at_every_level(config_file):
    raw = load_config(config_file()).raw
    assert raw["name"] == "x" and raw["run_dir"] == "runs/x" and raw["seed"] == 0
    assert raw["trainer"] == {"iterations": 3, "lr": 3e-4, "betas": [0.9, 0.999], "precision": "fp32", "ema": None}
    assert raw["evaluation"] == {"every": 5, "gauges": {}}
    assert raw["reward"]["init_args"]["rewards"]["right"]["init_args"] == {"path": "a.b", "limits": [0.0, 1.0]}
    assert raw["algorithm"]["init_args"]["clip"] == "auto"


def test_a_default_part_is_written_out(config_file):
    text = BASIC.replace("    kernel: {class_path: my_parts.Loud, init_args: {noise_level: 0.5}}\n", "    epochs: 2\n")
    raw = load_config(config_file(text)).raw
    assert raw["algorithm"]["init_args"]["kernel"] == {"class_path": "my_parts.Loud", "init_args": {"noise_level": 0.7}}


def test_saved_config_loads_to_the_same(config_file, tmp_path):
    config = load_config(config_file(), ["trainer.lr=1e-5", "algorithm.regularizers=[{class_path: my_parts.Quiet}]"])
    save(config, tmp_path / "saved.yaml")
    again = load_config(tmp_path / "saved.yaml")
    assert again == config
    assert again.text == config.text
    save(config.raw, tmp_path / "raw.yaml")
    assert load_config(tmp_path / "raw.yaml") == config


def test_build_gives_instances_with_python_types(config_file):
    built = build(load_config(config_file(), ["generator.folder=data", "generator.sizes=[3]", "generator.extra=7"]))
    assert set(built) == {
        "name", "run_dir", "seed", "generator", "prompts", "reward", "algorithm", "trainer", "evaluation",
    }  # fmt: skip
    assert isinstance(built["trainer"], TrainerSettings) and built["trainer"].betas == (0.9, 0.999)
    assert built["algorithm"].kernel.noise_level == 0.5
    assert built["reward"].rewards["right"].limits == (0.0, 1.0)
    assert built["generator"].folder == Path("data")
    assert built["generator"].others == {"extra": 7}


def test_parts_may_be_nested_in_lists_and_made_by_class_methods(config_file):
    path = config_file(BASIC.replace("my_parts.Model", "my_parts.Model.small"))
    built = build(
        load_config(path, ["algorithm.regularizers=[{class_path: my_parts.Loud}, {class_path: my_parts.Quiet}]"])
    )
    assert [type(part).__name__ for part in built["algorithm"].regularizers] == ["Loud", "Quiet"]
    assert built["generator"].width == 2


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.init_args.kernel.init_args.noise_level=0.25",
        "algorithm.kernel.noise_level=0.25",
        "algorithm.kernel={class_path: my_parts.Loud, init_args: {noise_level: 0.25}}",
        "algorithm.kernel={noise_level: 0.25}",
    ],
)
def test_override_with_and_without_init_args(config_file, override):
    assert build(load_config(config_file(), [override]))["algorithm"].kernel.noise_level == 0.25


def test_override_reaches_into_a_part_that_only_the_default_names(config_file):
    path = config_file(
        BASIC.replace("{class_path: my_parts.Loud, init_args: {noise_level: 0.5}}", "{noise_level: 0.1}")
    )
    assert build(load_config(path))["algorithm"].kernel.noise_level == 0.1
    assert build(load_config(path, ["algorithm.kernel.noise_level=0.2"]))["algorithm"].kernel.noise_level == 0.2


def test_another_class_starts_from_its_own_defaults(config_file):
    for override in ("algorithm.kernel.class_path=my_parts.Quiet", "algorithm.kernel=my_parts.Quiet"):
        raw = load_config(config_file(), [override]).raw
        assert raw["algorithm"]["init_args"]["kernel"] == {"class_path": "my_parts.Quiet", "init_args": {}}


def test_override_into_a_dictionary_of_parts(config_file):
    overrides = ["reward.rewards.right.path=z", "evaluation.gauges.judge={class_path: my_parts.Score}"]
    built = build(load_config(config_file(), overrides))
    assert built["reward"].rewards["right"].path == "z"
    assert type(built["evaluation"].gauges["judge"]).__name__ == "Score"


def test_base_files_are_merged_below_their_user(config_file, tmp_path):
    config_file("name: first\n" + BASIC)
    (tmp_path / "sub").mkdir()
    path = config_file("base: ../x.yaml\ntrainer: {lr: 1e-3}\nalgorithm: {init_args: {epochs: 4}}\n", "sub/y.yaml")
    raw = load_config(path).raw
    assert raw["name"] == "y" and raw["run_dir"] == "runs/y"
    assert raw["trainer"]["iterations"] == 3 and raw["trainer"]["lr"] == 1e-3
    assert raw["algorithm"]["init_args"]["epochs"] == 4
    assert raw["algorithm"]["init_args"]["kernel"]["init_args"]["noise_level"] == 0.5
    assert "base" not in raw
    assert "includes itself" in refused(config_file("base: z.yaml\n", "z.yaml"))


def test_numbers_are_read_as_people_write_them(config_file):
    path = config_file(BASIC.replace("iterations: 3", "lr: 1e-3"))
    assert load_config(path).raw["trainer"]["lr"] == 1e-3
    assert load_config(path, ["trainer.lr=5E-4"]).raw["trainer"]["lr"] == 5e-4
    assert (
        load_config(path, ["reward.rewards.right.path=no"]).raw["reward"]["init_args"]["rewards"]["right"]["init_args"][
            "path"
        ]
        == "no"
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.iteratons=3", ["'trainer.iteratons'", "on the command line", "did you mean 'trainer.iterations'"]),
        ("trianer.lr=1", ["'trianer'", "did you mean 'trainer'"]),
        ("iterations=3", ["'iterations'", "did you mean 'trainer.iterations'"]),
        ("algorithm.kernal.noise_level=1", ["'algorithm.kernal'", "did you mean 'algorithm.kernel'"]),
        ("algorithm.kernel.noise=1", ["'algorithm.kernel.noise'", "'algorithm.kernel.noise_level'"]),
        ("trainer.zzz=1", ["'trainer.zzz'", "allowed here: iterations, lr"]),
        ("trainer.iterations=many", ["trainer.iterations = 'many'", "expected int"]),
        ("trainer.iterations=2.5", ["trainer.iterations = 2.5", "expected int"]),
        ("trainer.iterations=null", ["trainer.iterations = None", "expected int"]),
        ("trainer.precision=fp8", ["'fp8'", "'fp32' or 'bf16'"]),
        ("algorithm.clip=automatic", ["'automatic'", "expected float or 'auto'"]),
        ("reward.weights={right: heavy}", ["reward.weights", "'heavy'", "mapping of float"]),
        ("reward.rewards.right.limits=[1]", ["reward.rewards.right.limits = [1]", "[float, float]"]),
        ("algorithm.kernel=3", ["algorithm.kernel = 3", "Kernel"]),
        ("algorithm.kernel=my_parts.Score", ["algorithm.kernel", "my_parts.Score", "rf_coefficients"]),
        ("reward.class_path=my_parts.Prompts", ["reward", "my_parts.Prompts", "Reward"]),
        ("algorithm.kernel.class_path=genrl.diffusion.FlowSED", ["FlowSED", "did you mean genrl.diffusion.FlowSDE"]),
        ("algorithm.kernel.class_path=FlowSDE", ["no import path", "genrl.diffusion.FlowSDE"]),
        ("algorithm.kernel.class_path=my_lib.Loud", ["no class my_lib.Loud", "'my_lib' installed"]),
        ("algorithm.epochs=0", ["algorithm: epochs = 0 must be at least 1"]),
        ("trainer", ["key=value"]),
        ("seed.x=3", ["'seed.x'"]),
    ],
)
def test_a_mistake_is_answered_with_what_is_right(config_file, override, said):
    message = refused(config_file(BASIC + "seed: 1\n"), override)
    assert "\n" not in message
    for part in said:
        assert part in message


def test_a_mistake_in_the_file_names_the_file(config_file):
    assert "in x.yaml; did you mean 'trainer.iterations'" in refused(
        config_file(BASIC.replace("iterations", "itrations"))
    )


def test_required_keys_are_all_named(config_file):
    assert "'prompts', 'algorithm'" in refused(
        config_file("generator: {class_path: my_parts.Model}\nreward: {class_path: a.b}")
    )
    assert "'reward.rewards'" in refused(config_file(BASIC), "reward={class_path: my_parts.Sum}")


def test_arguments_beside_class_path_are_pointed_below_init_args(config_file):
    path = config_file(BASIC.replace("{class_path: my_parts.Model}", "{class_path: my_parts.Model, width: 3}"))
    assert "'width' beside class_path" in refused(path)


@pytest.mark.parametrize("text", ["a: [1", "- 1", "seed: 1\nseed: 2"])
def test_broken_yaml_names_file_and_line(config_file, text):
    message = refused(config_file(text))
    assert message.startswith("x.yaml")
    assert text == "- 1" or "line" in message


def test_missing_file_lists_what_is_there(config_file):
    config_file(name="flow_grpo.yaml")
    message = refused("flow_gpro.yaml")
    assert "flow_gpro.yaml" in message and "did you mean flow_grpo.yaml" in message
    assert "flow_grpo.yaml" in refused("nowhere/else.yaml")


def test_missing_package_is_named(config_file, tmp_path):
    (tmp_path / "needy.py").write_text("import a_package_that_is_not_there\nclass Model: pass\n")
    message = refused(config_file(), "generator.class_path=needy.Model")
    assert "'a_package_that_is_not_there'" in message and "genrl doctor" in message


def test_listing_names_every_key_with_type_and_help(config_file):
    rows = {key: (parameter, value) for key, parameter, value in listing(load_config(config_file()))}
    assert rows["trainer.lr"][0].help == "of AdamW"
    assert rows["algorithm.kernel.noise_level"][0].help == "how much, in [0, 1]."
    assert rows["algorithm.kernel.noise_level"][1] == 0.5
    assert rows["reward.rewards.right.limits"][1] == [0.0, 1.0]
    assert type_name(rows["algorithm.clip"][0].hint) == "float or 'auto'"


def test_an_entry_of_a_docstring_about_several_arguments_is_the_help_of_each():
    class Picture:
        """A picture.

        Args:
            height, width: of the picture,
                in pixels.
            seed (int, optional): of the noise.
        """

        def __init__(self, height: int = 1, width: int = 1, seed: int = 0):
            pass

    helps = {name: parameter.help for name, parameter in parameters(Picture)[0].items()}
    assert helps == dict.fromkeys(("height", "width"), "of the picture, in pixels.") | {"seed": "of the noise."}


def test_help_that_points_to_another_class_is_what_is_said_there():
    from genrl.objectives import GRPO, GroupRelative

    for part in (GRPO, GroupRelative):
        assert parameters(part)[0]["eps"].help == "added to standard deviations."
        assert parameters(part)[0]["clip"].help == "largest absolute value, or None."


def test_every_listed_key_can_be_set(config_file):
    path = config_file()
    config = load_config(path)
    for key, _, value in listing(config):
        if not isinstance(value, dict):
            assert (
                load_config(path, [f"{key}={yaml.safe_dump(value, default_flow_style=True).split(chr(10))[0]}"])
                == config
            )


def test_values_without_a_plain_form_are_left_to_the_class():
    class Closed:
        def __init__(self, size: int):
            self._size = size

    assert to_plain((1, "a", None, Path("b"))) == [1, "a", None, "b"]
    assert not isinstance(to_plain(Closed(3)), dict)


def test_import_path_is_the_shortest_public_one():
    from genrl.diffusion.kernels import FlowSDE

    assert import_path(FlowSDE) == "genrl.diffusion.FlowSDE"


def test_functions_may_be_named_where_a_callable_is_wanted(config_file, tmp_path):
    (tmp_path / "my_functions.py").write_text(
        "from collections.abc import Callable\n"
        "def first(steps): return steps[:1]\n"
        "class Method:\n"
        "    def __init__(self, window: Callable[[list], list] | None = None): self.window = window\n"
    )
    path = config_file(BASIC)
    config = load_config(path, ["algorithm={class_path: my_functions.Method}", "algorithm.window=my_functions.first"])
    assert config.raw["algorithm"]["init_args"]["window"] == "my_functions.first"
    assert build(config)["algorithm"].window([1, 2]) == [1]


def test_strings_stay_strings():
    assert check_value("007", str) == "007"
    assert check_value("1", str | int) == "1"
    with pytest.raises(ValueError):
        check_value(7, str)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_are_complete_and_build(path, tmp_path):
    config = load_config(path)
    build(config)
    save(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_start_with_what_they_show(path):
    assert path.read_text().lstrip().startswith("#"), f"{path} needs a comment: what it shows, needs and reaches"


def test_config_equality_ignores_where_it_came_from():
    assert Config({"a": 1}, Path("x")) == Config({"a": 1}, Path("y"))


def test_an_empty_mapping_empties_what_the_base_has(tmp_path):
    base = next(path for path in SHIPPED if path.stem == "flow_grpo")
    (tmp_path / "c.yaml").write_text(f"base: {base}\nevaluation: {{gauges: {{}}}}\n")
    assert load_config(base).raw["evaluation"]["gauges"]
    assert load_config(tmp_path / "c.yaml").raw["evaluation"]["gauges"] == {}
    assert load_config(tmp_path / "c.yaml").raw["evaluation"]["steps"] == load_config(base).raw["evaluation"]["steps"]
