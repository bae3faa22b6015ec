"""What the README and the pages in docs/ say exists and runs.

`python tests/test_docs.py` copies the configurations into the pages of methods and policies after a change of one.
"""

from __future__ import annotations

import argparse
import inspect
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from genrl import objectives, policies
from genrl.cli import COMMANDS
from genrl.config import kind_of, load_config, load_settings
from genrl.envs import CollectSettings
from genrl.networks import MLPBackbone, ObsSpec
from genrl.parts import import_object, to_plain
from genrl.policies import ChunkPolicy, Normalizer
from genrl.signatures import parameters
from genrl.training import EvaluationSettings, PolicyEvaluationSettings, PolicyTrainerSettings, TrainerSettings
from genrl.yaml_files import parse_yaml

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md", *ROOT.glob("docs/**/*.md")]
)
METHODS = sorted(path for path in ROOT.glob("docs/methods/*.md") if path.name != "README.md")
POLICIES = sorted(path for path in ROOT.glob("docs/policies/*.md") if path.name != "README.md")
METHOD_FOLDERS = ("digits", "moving_digits", "shapes")
METHOD_CONFIGS = {p.stem: p for folder in METHOD_FOLDERS for p in sorted((ROOT / "configs" / folder).glob("*.yaml"))}
SETTINGS = {
    "generator": (TrainerSettings, EvaluationSettings),
    "policy": (PolicyTrainerSettings, PolicyEvaluationSettings),
}
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
OWN = ("my_rewards.", "my_lab.")  # stand for a reader's own packages


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.*)$", without_code(path.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_relative_links_and_their_anchors_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{names(page)} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(path), f"{names(page)} links to {target}; headings are {sorted(anchors(path))}"


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_configs_and_scripts_that_are_mentioned_exist(page):
    text = page.read_text(encoding="utf-8")
    folders = "configs|benchmarks|examples|tests|policies|envs|rewards|genrl"
    for mentioned in re.findall(rf"(?<![\w/.])((?:{folders})/[\w./-]+\.(?:yaml|py))\b", text):
        assert (ROOT / mentioned).is_file(), f"{names(page)} mentions {mentioned}, which does not exist"


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of every `genrl ...` in the shell examples and in the text of a page."""
    text = page.read_text(encoding="utf-8")
    inline = re.findall(r"`([^`\n]+)`", without_code(text))
    for line in [*shell_lines(text, "sh"), *shell_lines(text, "text"), *inline]:
        found = re.match(r"\s*(?:\$ )?(?:\S* -m )?genrl ([a-z].*)", line)
        if found and not line.lstrip().startswith("genrl:"):
            yield re.sub(r"\s+#.*", "", found[1]).split()


def shell_lines(text: str, language: str) -> list[str]:
    return "\n".join(blocks(text, language)).replace("\\\n", " ").splitlines()


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_commands_and_their_options_exist(page):
    for command, *arguments in commands(page):
        assert command in COMMANDS, f"{names(page)} mentions `genrl {command}`"
        parser = argparse.ArgumentParser(add_help=False)
        COMMANDS[command].configure(parser)
        known = {option for action in parser._actions for option in action.option_strings} | {"--help", "--traceback"}
        for argument in arguments:
            if argument.startswith("-"):
                assert argument in known, f"{names(page)}: genrl {command} has no option {argument}"


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_commands_in_shell_examples_can_be_parsed(page):
    for line in shell_lines(page.read_text(encoding="utf-8"), "sh"):
        found = re.search(r"(?:^|-m )genrl ([a-z].*)", line)
        if found:
            command, *arguments = shlex.split(found[1], comments=True)
            parser = argparse.ArgumentParser(exit_on_error=False, add_help=not COMMANDS[command].lists_keys)
            COMMANDS[command].configure(parser)
            parser.parse_intermixed_args(arguments)


def test_overrides_in_the_examples_are_accepted():
    refused = ("algorithm.kernel.noise=", "trainer.iterations=many", "algorithm.minibatches=5")  # shown as mistakes
    seen = 0
    for page in PAGES:
        for command, *arguments in commands(page):
            overrides = [a for a in arguments if "=" in a and not a.startswith("-") and "$" not in a]
            shown_as_mistake = any(override.startswith(refused) for override in overrides)
            if command == "train" and overrides and (ROOT / arguments[0]).is_file() and not shown_as_mistake:
                load_config(ROOT / arguments[0], overrides)
                seen += 1
            elif command == "collect" and overrides and (ROOT / arguments[0]).is_file():
                load_settings(ROOT / arguments[0], overrides, CollectSettings)
                seen += 1
    assert seen >= 5


def parts(tree: object, where: str = "") -> Iterator[tuple[str, dict]]:
    if isinstance(tree, dict):
        if "class_path" in tree:
            yield where, tree
        for key, value in tree.items():
            yield from parts(value, f"{where}.{key}")
    elif isinstance(tree, list):
        for item in tree:
            yield from parts(item, where)


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_yaml_examples_name_importable_classes_with_arguments_that_they_take(page):
    for block in blocks(page.read_text(encoding="utf-8"), "yaml"):
        tree = parse_yaml(block, names(page))
        for where, part in parts(tree):
            assert set(part) <= {"class_path", "init_args"}, f"{names(page)}{where}: {sorted(part)}"
            if not part["class_path"].startswith(OWN):
                known, takes_any = parameters(import_object(part["class_path"], where))
                unknown = set(part.get("init_args") or {}) - set(known)
                assert takes_any or not unknown, f"{names(page)}{where}: {part['class_path']} has no {unknown}"
        for section, settings in zip(("trainer", "evaluation"), SETTINGS[kind_of(tree)], strict=True):
            unknown = set(tree.get(section) or {}) - set(settings.__dataclass_fields__)
            assert not unknown, f"{names(page)}: {section} has no {sorted(unknown)}"


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_snippets_marked_as_runnable_run(page):
    snippets = re.findall(r"<!-- runnable -->\n```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    for number, code in enumerate(snippets):
        exec(compile(code, f"{names(page)}, snippet {number}", "exec"), {"__name__": "snippet"})


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_other_python_snippets_import_what_exists(page):
    for code in blocks(page.read_text(encoding="utf-8"), "python"):
        compile(code, names(page), "exec")
        imports = re.findall(r"^(?:from genrl.* import .*|import genrl.*)$", code, flags=re.MULTILINE)
        exec("\n".join(imports), {})


def excerpt(page: Path) -> str:
    """The configuration of a method or a policy without the comments at its head."""
    path = METHOD_CONFIGS[page.stem] if page in METHODS else ROOT / f"configs/policies/{page.stem}.yaml"
    lines = path.read_text(encoding="utf-8").rstrip().splitlines()
    start = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(lines[start:]) + "\n"


def test_every_method_has_a_page_and_a_line_in_both_tables():
    assert {page.stem for page in METHODS} <= METHOD_CONFIGS.keys() - {"task"}
    for page in METHODS:
        assert f"docs/methods/{page.name}" in (ROOT / "README.md").read_text(encoding="utf-8")
        assert f"({page.name})" in (ROOT / "docs/methods/README.md").read_text(encoding="utf-8")


def test_every_configuration_of_methods_is_linked():
    text = "".join(page.read_text(encoding="utf-8") for page in METHODS)
    for config in METHOD_CONFIGS.values():
        assert f"../../{names(config)})" in text, f"docs/methods nowhere links to {names(config)}"


@pytest.mark.parametrize("page", [*METHODS, *POLICIES], ids=names)
def test_a_page_shows_its_configuration_as_it_is(page):
    shown, *_ = blocks(page.read_text(encoding="utf-8"), "yaml")
    current = parse_yaml(excerpt(page), page.stem)
    assert parse_yaml(shown, names(page)) == current, "the configuration has changed; run `python tests/test_docs.py`"


# ---------------------------------------------------------------------------------------------------- policies

COMMON = set(inspect.signature(ChunkPolicy).parameters)  # described once, in docs/policies/README.md


def policy_class(page: Path) -> type[ChunkPolicy]:
    """The policy that the configuration of a page trains."""
    return import_object(load_config(ROOT / f"configs/policies/{page.stem}.yaml").raw["policy"]["class_path"], "page")


def section(page: Path, heading: str) -> str:
    text = page.read_text(encoding="utf-8")
    return re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[1]


def test_every_policy_has_a_page_and_a_line_in_the_table():
    public = {
        cls
        for cls in map(policies.__dict__.get, policies.__all__)
        if inspect.isclass(cls) and issubclass(cls, ChunkPolicy)
    } - {ChunkPolicy}
    assert {policy_class(page) for page in POLICIES} == public
    table = (ROOT / "docs/policies/README.md").read_text(encoding="utf-8")
    for page in POLICIES:
        assert f"`{policy_class(page).__name__}`" in table and f"({page.name})" in table


def test_every_configuration_of_policies_is_linked():
    text = "".join(page.read_text(encoding="utf-8") for page in ROOT.glob("docs/policies/*.md"))
    for config in ROOT.glob("configs/policies/*.yaml"):
        assert f"../../configs/policies/{config.name})" in text, f"docs/policies nowhere links to {config.name}"


def test_settings_of_every_policy_are_described():
    found = re.findall(r"^\| `(\w+)` \|", section(ROOT / "docs/policies/README.md", "Settings of every policy"), re.M)
    assert set(found) == COMMON


def value_of(text: str) -> Any:
    """A default as a page writes it: YAML, or the constructor of a part."""
    return eval(text, dict(vars(objectives))) if text.endswith(")") else parse_yaml(text, text)


@pytest.mark.parametrize("page", POLICIES, ids=names)
def test_options_are_complete_and_have_the_defaults_that_the_page_says(page):
    known, _ = parameters(policy_class(page))
    rows = re.findall(r"^\| `([\w.]+)` \| `(.+?)` \| ", section(page, "Options"), re.M)
    assert {name.partition(".")[0] for name, _ in rows} == set(known) - COMMON
    for name, shown in rows:
        first, *inner = name.split(".")
        default = known[first].default
        for attribute in inner:
            default = getattr(default, attribute)
        assert to_plain(value_of(shown)) == to_plain(default), f"{names(page)}: {name} is {default!r}"
    for name in set(known) - COMMON:  # settings classes are described whole
        inner = {row.partition(".")[2] for row, _ in rows if row.startswith(f"{name}.")}
        assert not inner or inner == set(parameters(type(known[name].default))[0])


def test_recipes_of_consistency_training_have_the_values_of_their_table():
    table = section(ROOT / "docs/policies/consistency.md", "Variants")
    assert f"| recipe | {' | '.join(policies.RECIPES)} | meaning |" in table
    rows = re.findall(r"^\| `(\w+)` \| (`.*`) \| [^`]", table.partition("| recipe |")[2], re.M)
    shown = {name: [value_of(cell) for cell in re.findall(r"`([^`]+)`", cells)] for name, cells in rows}
    fields = policies.ConsistencyRecipe.__dataclass_fields__
    assert shown == {name: [getattr(recipe, name) for recipe in policies.RECIPES.values()] for name in fields}
    assert {f"consistency_{name}" for name in policies.RECIPES} - {"consistency_ict"} < set(re.findall(r"\w+", table))


VARIANTS: dict[str, list[dict[str, Any]]] = {
    "mean_flow": [{}, {"dispersive_weight": 0.5}],
    "one_step_flow": [{"guidance_weight": 0.1}],
    "consistency": [{"variant": variant} for variant in ("ct", "ict", "slct", "ect", "sct", "flow_map")],
}


@pytest.mark.parametrize("page", POLICIES, ids=names)
def test_metrics_of_a_policy_are_on_its_page(page):
    specs, logged = {"state": ObsSpec((2,), "state")}, set()
    data = {"state": np.eye(2, dtype=np.float32), "action": np.eye(2, dtype=np.float32)}
    for settings in VARIANTS.get(page.stem, [{}]):
        policy = policy_class(page)(network=MLPBackbone(8, 1), **settings)
        policy.configure(specs, 2, Normalizer.fit(data, policy.normalization.modes(specs)))
        obs, actions = {"state": torch.zeros(8, 1, 2)}, torch.rand(8, 8, 2, generator=torch.Generator().manual_seed(0))
        batch = {"obs": obs, "actions": actions, "valid": torch.ones(8, 8, dtype=torch.bool)}
        _, metrics = policy.loss(batch, torch.Generator().manual_seed(0), progress=1.0)
        logged |= set(metrics) - {"loss"}
    documented = re.findall(r"^\| `policy/(\w+)`", section(page, "What its metrics look like"), re.M)
    assert set(documented) == logged


@pytest.mark.parametrize("example", EXAMPLES, ids=names)
def test_examples_can_be_imported(example):
    assert callable(runpy.run_path(str(example), run_name="example")["main"])


def test_the_sampler_example_shows_what_it_says(capsys):
    runpy.run_path(str(ROOT / "examples/sampler_alone.py"), run_name="__main__")
    unchanged, moved = capsys.readouterr().out.strip().splitlines()[-2:]
    assert "mean 0.0000, variance 0.0000" in unchanged
    kl, mean, variance = (float(x) for x in re.findall(r"(?:step 5|mean|variance) (-?[\d.]+\d)", moved)[:3])
    assert mean == pytest.approx(-kl, rel=0.05) and variance == pytest.approx(2 * kl, rel=0.05)


def update_pages() -> None:
    for page in [*METHODS, *POLICIES]:
        text = page.read_text(encoding="utf-8")
        new = text.replace(f"```yaml\n{blocks(text, 'yaml')[0]}```", f"```yaml\n{excerpt(page)}```", 1)
        page.write_text(new, encoding="utf-8")
        print(f"{names(page)}: {'as it was' if new == text else 'updated'}")


if __name__ == "__main__":
    update_pages()
