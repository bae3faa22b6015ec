"""Which format a path is of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, cast, get_args

from genrl.envs.data import lerobot, minari, ogbench, robomimic, zarr
from genrl.envs.data.episodes import DataError
from genrl.envs.data.reading import Format, Reader

FormatName = Literal["auto", "robomimic", "lerobot", "minari", "zarr", "ogbench"]
FORMATS: dict[str, Format] = {
    module.name: cast(Format, module) for module in (robomimic, lerobot, minari, zarr, ogbench)
}


def find_format(path: Path, name: FormatName = "auto") -> Format:
    """The format of a path, recognised from names and headers alone.

    Raises:
        FileNotFoundError: nothing is there.
        DataError: no format fits, or the name is unknown; the message lists those that are read.
    """
    if name not in get_args(FormatName):
        raise DataError(f"format {name!r} is unknown; choose one of {', '.join(get_args(FormatName))}", path)
    if not path.exists():
        raise FileNotFoundError(f"there is no data set at {path}; give the path of a file or folder on this machine")
    if name != "auto":
        return FORMATS[name]
    found = [candidate for candidate in FORMATS.values() if candidate.detect(path)]
    if not found:
        listed = "\n".join(f"  {candidate.name}: {candidate.description}" for candidate in FORMATS.values())
        raise DataError(f"is of no known format ({_contents(path)}). Formats that are read:\n{listed}", path)
    return found[0]


@contextlib.contextmanager
def open_reader(path: str | Path, format: FormatName = "auto") -> Iterator[tuple[str, Reader]]:
    """(name of the format, open reader); the file is closed at the end, also after an error."""
    path = Path(path).expanduser()
    chosen = find_format(path, format)
    with chosen.open(path) as reader:
        yield chosen.name, reader


def _contents(path: Path) -> str:
    if path.is_dir():
        entries = sorted(entry.name for entry in path.iterdir())[:8]
        return f"a folder with {', '.join(entries)}" if entries else "an empty folder"
    if robomimic.is_hdf5(path):
        with contextlib.suppress(DataError), robomimic.open_hdf5(path) as file:
            return f"an HDF5 file with {', '.join(sorted(file)[:8]) or 'nothing in it'}"
    return f"a file called {path.name} of {path.stat().st_size} bytes"
