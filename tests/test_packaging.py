"""The wheel: everything below `genrl`, nothing under names that users' own projects have."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import genrl

ROOT = Path(__file__).resolve().parent.parent
# Top-level folders that are subpackages of genrl.
MAPPED = {"genrl.envs": "envs", "genrl.policies": "policies", "genrl.rewards": "rewards"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this tree, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # built from a copy, so that no build folder appears in the tree
    source.mkdir()
    for name in ("genrl", "envs", "policies", "rewards", "pyproject.toml", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--no-build-isolation", "--wheel-dir", str(folder), str(source)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("genrl-*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def source_modules() -> set[str]:
    """Every module of the tree under its import name."""
    roots = {"genrl": ROOT / "genrl", **{name: ROOT / folder for name, folder in MAPPED.items()}}
    found = set()
    for name, root in roots.items():
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found.add(".".join((name, *(part for part in parts if part != "__init__"))))
    return found


def test_wheel_holds_every_module_and_only_genrl(wheel):
    top = {path.name for path in wheel.iterdir() if not path.name.endswith(".dist-info")}
    assert top == {"genrl"}
    packed = set()
    for path in (wheel / "genrl").rglob("*.py"):
        parts = path.relative_to(wheel).with_suffix("").parts
        packed.add(".".join(part for part in parts if part != "__init__"))
    assert packed == source_modules()
    assert (wheel / "genrl" / "py.typed").exists()


def test_every_module_of_the_wheel_imports_without_a_warning(wheel):
    names = sorted(source_modules() - {"genrl.__main__"})
    program = (
        "import importlib, sys, genrl\n"
        f"assert genrl.__file__.startswith({str(wheel)!r}), genrl.__file__\n"
        f"for name in {names!r}:\n"
        "    module = importlib.import_module(name)\n"
        f"    assert module.__file__.startswith({str(wheel)!r}), module.__file__\n"
        "clash = {'rewards', 'policies', 'envs'} & set(sys.modules)\n"
        "assert not clash, clash\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=wheel,
        env={**os.environ, "PYTHONPATH": str(wheel)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_metadata_says_licence_scripts_and_extras(wheel):
    (info,) = wheel.glob("*.dist-info")
    metadata = (info / "METADATA").read_text()
    assert f"Version: {genrl.__version__}" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "genrl = genrl.cli:main" in (info / "entry_points.txt").read_text()
    assert {"ocr", "diffusers", "dev"} <= set(importlib.metadata.metadata("genrl").get_all("Provides-Extra") or [])
    assert "Apache License" in next(info.rglob("LICENSE")).read_text()


def test_every_package_is_listed():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    roots = {"genrl": ROOT / "genrl", **{name: ROOT / folder for name, folder in MAPPED.items()}}
    found = {
        ".".join((name, *path.parent.relative_to(root).parts))
        for name, root in roots.items()
        for path in root.rglob("__init__.py")
    }
    assert listed == found
