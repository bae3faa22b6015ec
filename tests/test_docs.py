"""What the README and the pages in docs/ say exists and runs.

`python tests/test_docs.py` copies the configurations into the pages of the methods again after a change of one.
"""

from __future__ import annotations

import argparse
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from genrl.cli import COMMANDS
from genrl.config import load_config
from genrl.parts import import_object
from genrl.signatures import parameters
from genrl.training.settings import EvaluationSettings, TrainerSettings
from genrl.yaml_files import parse_yaml

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md", *ROOT.glob("docs/**/*.md")]
)
METHODS = sorted(path for path in ROOT.glob("docs/methods/*.md") if path.name != "README.md")
EXAMPLES = sorted(ROOT.glob("examples/*.py"))
NOT_METHODS = {"task.yaml"}
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
    for mentioned in re.findall(r"\b((?:configs|benchmarks|examples)/[\w./-]+\.(?:yaml|py))\b", text):
        assert (ROOT / mentioned).is_file(), f"{names(page)} mentions {mentioned}, which does not exist"


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of every `genrl ...` in the shell examples and in the text of a page."""
    text = page.read_text(encoding="utf-8")
    lines = "\n".join(blocks(text, "sh") + blocks(text, "text")).replace("\\\n", " ").splitlines()
    inline = re.findall(r"`([^`\n]+)`", without_code(text))
    for line in [*lines, *inline]:
        found = re.match(r"\s*(?:\$ )?(?:\S* -m )?genrl ([a-z].*)", line)
        if found and not line.lstrip().startswith("genrl:"):
            yield re.sub(r"\s+#.*", "", found[1]).split()


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
        for section, settings in (("trainer", TrainerSettings), ("evaluation", EvaluationSettings)):
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


def excerpt(method: str) -> str:
    """The configuration of a method without the comments at its head."""
    lines = (ROOT / f"configs/digits/{method}.yaml").read_text(encoding="utf-8").rstrip().splitlines()
    start = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(lines[start:]) + "\n"


def test_every_method_has_a_page_and_a_line_in_both_tables():
    configs = {p.stem for p in ROOT.glob("configs/digits/*.yaml") if p.name not in NOT_METHODS}
    assert {page.stem for page in METHODS} <= configs
    for page in METHODS:
        assert f"docs/methods/{page.name}" in (ROOT / "README.md").read_text(encoding="utf-8")
        assert f"({page.name})" in (ROOT / "docs/methods/README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", METHODS, ids=names)
def test_the_page_of_a_method_shows_its_configuration_as_it_is(page):
    shown, *_ = blocks(page.read_text(encoding="utf-8"), "yaml")
    current = parse_yaml(excerpt(page.stem), page.stem)
    assert parse_yaml(shown, names(page)) == current, "the configuration has changed; run `python tests/test_docs.py`"


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
    for page in METHODS:
        text = page.read_text(encoding="utf-8")
        new = text.replace(blocks(text, "yaml")[0], excerpt(page.stem), 1)
        page.write_text(new, encoding="utf-8")
        print(f"{names(page)}: {'as it was' if new == text else 'updated'}")


if __name__ == "__main__":
    update_pages()
