"""Folders that are made once and reused: trained bases, named by everything that determines their content."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The cache folder: the argument, else `$GENRL_CACHE`, else `~/.cache/genrl`."""
    return Path(cache_dir or os.environ.get("GENRL_CACHE") or "~/.cache/genrl").expanduser()


def cached_folder(
    name: str,
    config: dict[str, Any],
    make: Callable[[Path], None],
    cache_dir: str | os.PathLike[str] | None = None,
) -> Path:
    """Return the folder `<cache>/<name>-<hash of config>`, made by `make` if it does not exist yet.

    `make(folder)` fills an empty temporary folder that is renamed when it is complete, so that a killed process leaves
    nothing half-made behind. A lock lets the second of two processes wait for the first instead of doing its work
    again; where locks do not work (some network file systems), the process that renames last drops its own copy.

    Args:
        name: readable beginning of the folder's name.
        config: JSON values that determine the content; include a version number of the code that makes it.
        make: called with the temporary folder.
        cache_dir: see `cache_root`.
    """
    from filelock import FileLock

    text = json.dumps(config, sort_keys=True)
    root = cache_root(cache_dir)
    folder = root / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f"{folder.name}.lock"):
        if folder.is_dir():
            return folder
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=root))
        try:
            make(temporary)
            (temporary / "cache_key.json").write_text(json.dumps(config, sort_keys=True, indent=2))
            temporary.chmod(0o755)  # mkdtemp makes folders that only their owner can read
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder
