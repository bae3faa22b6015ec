"""`genrl doctor`: what is installed, what this machine offers, and the command that adds what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
from pathlib import Path

import genrl

# Shown first, whatever they are a dependency of.
ALWAYS = ("torch", "accelerate", "diffusers")


def run() -> int:
    """Print the findings; returns 0 when the core is complete, 1 otherwise."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    core, extras = requirements()
    missing = [name for name in core if not version(name)]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("genrl", f"{genrl.__version__} in {Path(genrl.__file__).parent}")
    table.add_row("python", f"{platform.python_version()} ({sys.executable})")
    table.add_row("core", ", ".join(f"{name} {version(name) or 'MISSING'}" for name in core))
    for extra, names in extras.items():
        absent = [name for name in names if not version(name)]
        found = ", ".join(f"{name} {version(name)}" for name in names if name not in absent)
        advice = f'missing {", ".join(absent)}; pip install "genrl[{extra}]"' if absent else found
        table.add_row(f"extra {extra}", escape(advice))
    for name, text in {**devices(), **rendering(), **storage(), **launching()}.items():
        table.add_row(name, escape(text))
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=120)
    console.print(table)
    if missing:
        console.print(f"The core is incomplete: pip install {' '.join(missing)}", style="red", markup=False)
        return 1
    console.print("The core is complete. Start with: genrl train configs/demo.yaml", style="green", markup=False)
    return 0


def version(package: str) -> str | None:
    """The installed version; None where the package is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements() -> tuple[list[str], dict[str, list[str]]]:
    """The names that genrl requires, and those of each extra, as its own metadata says."""
    core: list[str] = []
    extras: dict[str, list[str]] = {}
    try:
        entries = importlib.metadata.requires("genrl") or []
    except importlib.metadata.PackageNotFoundError:  # run from a folder that was never installed
        return list(ALWAYS[:2]), {}
    for entry in entries:
        name = re.split(r"[\s\[<>=!~;]", entry, maxsplit=1)[0]
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", entry)
        (extras.setdefault(extra[1], []) if extra else core).append(name)
    return core, extras


def devices() -> dict[str, str]:
    """GPUs as torch sees them, and the processor threads that torch may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if not importlib.util.find_spec("torch"):
        return {"cpu": f"{cores} cores"}
    import torch

    gpus = "none; runs use the CPU"
    if torch.cuda.is_available():
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        gpus = ", ".join(f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in found)
        gpus += f"; CUDA {torch.version.cuda}"
    elif torch.backends.mps.is_available():
        gpus = "Apple MPS"
    advice = "" if torch.get_num_threads() == 1 else "; small networks run faster with OMP_NUM_THREADS=1"
    return {"cpu": f"{cores} cores, torch uses {torch.get_num_threads()} threads{advice}", "gpu": gpus}


def rendering() -> dict[str, str]:
    """What simulators can draw with, for images, point clouds and videos."""
    if not importlib.util.find_spec("mujoco"):
        return {}
    from genrl.envs.gl import has_library

    found = [name for name in ("egl", "osmesa") if has_library(name)]
    if found:
        return {"rendering": f"OpenGL through {', '.join(found)}, and ray casting"}
    advice = "apt-get install libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri brings OpenGL, which images need"
    return {"rendering": f"ray casting only, enough for point clouds and videos; {advice}"}


def cache_folder() -> Path:
    """Where trained bases and reward networks are kept: $GENRL_CACHE, or ~/.cache/genrl."""
    return Path(os.environ.get("GENRL_CACHE") or Path.home() / ".cache" / "genrl")


def storage() -> dict[str, str]:
    """The cache with its size, and whether runs can be written in the current folder."""
    cache = cache_folder()
    size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) if cache.is_dir() else 0
    state = f"{size / 2**20:.1f} MiB" if cache.is_dir() else "empty so far"
    return {
        "cache": f"{cache} ({state}, {_writable(cache)}); set GENRL_CACHE to move it",
        "runs": f"{Path('runs').resolve()} ({_writable(Path('runs'))}, {_free(Path('runs'))} free)",
    }


def _existing(folder: Path) -> Path:
    folder = folder.resolve()
    return next(path for path in (folder, *folder.parents) if path.exists())


def _writable(folder: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=_existing(folder)):
            return "writable"
    except OSError as error:
        return f"NOT writable: {error.strerror}; choose another folder"


def _free(folder: Path) -> str:
    return f"{shutil.disk_usage(_existing(folder)).free / 2**30:.0f} GiB"


def launching() -> dict[str, str]:
    """How to start a run on several processes."""
    if not importlib.util.find_spec("torch"):
        return {}
    return {
        "processes": "torchrun --nproc_per_node N -m genrl train CONFIG; on GPUs also "
        "accelerate launch --config_file configs/accelerate/ddp_8gpu.yaml -m genrl train CONFIG "
        "(accelerate launch --cpu starts one process only)"
    }
