"""Where twins are saved: folders that are filled once and read by ordinary loading code."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path

LIBRARIES = ("diffusers", "transformers", "open_clip_torch")


def saved(name: str, make: Callable[[Path], None], folder: str | os.PathLike[str] | None = None) -> Path:
    """`folder`, or a folder of genrl's cache, filled by `make(path)` unless it already is."""
    from genrl.generators.cache import cached_folder
    from genrl.progress import loading

    def make_quietly(path: Path) -> None:
        with loading(f"making a tiny {name}", True, "transformers", "diffusers"):
            make(path)

    if folder is None:
        return cached_folder(f"tiny-{name}", {"name": name, "code": code_version()}, make_quietly)
    path = Path(folder)
    complete = path / ".complete"  # written last: what a killed process left is made again
    if not complete.exists():
        path.mkdir(parents=True, exist_ok=True)
        make_quietly(path)
        complete.touch()
    return path


def code_version() -> str:
    """A hash of this package's source and of the libraries' versions: whoever edits a builder gets new folders."""
    source = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    versions = [f"{name} {installed(name)}" for name in LIBRARIES]
    return hashlib.sha256(source + "\n".join(versions).encode()).hexdigest()[:12]


def installed(name: str) -> str:
    """The version of a distribution, or "none"."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"
