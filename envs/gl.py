"""Which OpenGL library draws off-screen: chosen before MuJoCo is imported, used when the first picture is drawn."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import os
import sys
import weakref
from typing import Any

from genrl.envs.settings import EnvError

LIBRARIES = {"egl": "libEGL.so.1", "osmesa": "libOSMesa.so.8"}
OFF = "disabled"  # value of MUJOCO_GL with which MuJoCo can be imported without any OpenGL library
INSTALL = "apt-get install -y --no-install-recommends libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri libosmesa6"

_open: weakref.WeakSet[GLContext] = weakref.WeakSet()


class RendererError(EnvError):
    """OpenGL does not work here; the message names the packages, and the renderer that needs none."""


def has_library(backend: str) -> bool:
    """The shared library of ``"egl"`` or ``"osmesa"`` is installed."""
    names = [LIBRARIES[backend], LIBRARIES[backend].rsplit(".", 1)[0]]
    for name in names:
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return True
    return False


def prepare_rendering(renderer: str = "auto") -> None:
    """Set MUJOCO_GL where the user did not, before MuJoCo is imported: it reads the variable only then.

    Without a display this is what `renderer` asks for, else EGL, OSMesa, or no OpenGL at all, whichever is installed.

    Raises:
        RendererError: MUJOCO_GL names a library that is not installed, with which MuJoCo could not even be imported.
    """
    if "mujoco" in sys.modules or not sys.platform.startswith("linux"):
        return
    chosen = os.environ.get("MUJOCO_GL", "").lower()
    if chosen in LIBRARIES and not has_library(chosen):
        raise RendererError(
            f"MUJOCO_GL={chosen}, but {LIBRARIES[chosen]} is not installed. Install it ({INSTALL}), or unset "
            "MUJOCO_GL: environments work without OpenGL, and renderer: rays draws without it"
        )
    if chosen or os.environ.get("DISPLAY"):
        return
    wanted = [renderer] if renderer in LIBRARIES else []
    found = [name for name in (*wanted, *LIBRARIES) if has_library(name)]
    os.environ["MUJOCO_GL"] = found[0] if found else OFF


def candidates() -> list[str]:
    """Libraries that ``renderer: auto`` tries, in order: what MUJOCO_GL says first, only those that are installed."""
    wanted = os.environ.get("MUJOCO_GL", "").lower()
    return [name for name in sorted(LIBRARIES, key=lambda name: (name != wanted, name)) if has_library(name)]


def gl_in_use() -> bool:
    """This process has drawn with OpenGL, so that a fork of it could not."""
    return bool(_open)


def load_compiler_first() -> None:
    """Load Triton, which torch's optimizers import, before Mesa.

    Both bring an LLVM of their own, and the process crashes when Triton's comes second.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("triton")


class GLContext:
    """An off-screen OpenGL context of MuJoCo's, freed before the libraries go.

    Args:
        backend: ``"egl"`` or ``"osmesa"``.
        size: (height, width) of the largest picture (OSMesa needs to know).

    Raises:
        RendererError: the library is missing or does not work.
    """

    def __init__(self, backend: str, size: tuple[int, int]) -> None:
        self.process = os.getpid()
        self._context: Any = None
        first = not _open
        load_compiler_first()
        try:
            kind = importlib.import_module(f"mujoco.{backend}").GLContext
            self._context = kind.__new__(kind)
            self._context._context = None  # MuJoCo's destructor asks for it, also where the constructor fails
            self._context.__init__(size[1], size[0])
            self._context.make_current()
        except Exception as error:  # PyOpenGL raises AttributeError, OSError, ImportError, RuntimeError and its own
            taken = os.environ.get("PYOPENGL_PLATFORM", backend)
            other = f"; this process already uses {taken}, set MUJOCO_GL={backend} before it starts"
            raise RendererError(
                f"OpenGL through {backend} does not work here ({type(error).__name__}: {error})"
                f"{other if taken != backend else ''}. Install it ({INSTALL}), or draw without OpenGL: renderer: rays"
            ) from error
        if first:
            # Registered after EGL's own handler, hence called before it: contexts outlive no display.
            atexit.register(_free_all)
        _open.add(self)

    def make_current(self) -> None:
        """Direct what is drawn next to this context.

        Raises:
            RendererError: the context was made before this process was forked.
        """
        if self.process != os.getpid():
            raise RendererError(
                "this picture would be drawn in an OpenGL context that belongs to the process before its fork; "
                'make environments that draw in the process that uses them, or start processes with context="spawn"'
            )
        self._context.make_current()

    def free(self) -> None:
        """Free the context; a fork only forgets it."""
        _open.discard(self)
        if self._context is not None and self.process == os.getpid():
            with contextlib.suppress(Exception):
                self._context.free()
        if self._context is not None:
            self._context._context = None  # so that MuJoCo's destructor does not free it again
        self._context = None


def _free_all() -> None:
    for context in list(_open):
        context.free()
