"""Reading a diffusers pipeline from a folder or the hub, and what its libraries need not say meanwhile."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from genrl.progress import loading

# Loggers of diffusers, and how their remarks begin that say nothing about a run.
_CHATTER = {
    "diffusers.loaders.peft": "No LoRA keys associated",
    "diffusers.loaders.lora_base": "No LoRA keys associated",
    "diffusers.loaders.lora_pipeline": "No LoRA keys associated",
    "diffusers.models.modeling_utils": "Attention backends are an experimental",
}


def load_pipeline(
    model: str | os.PathLike[str], dtypes: Mapping[str, torch.dtype], load: Mapping[str, Any], progress: bool
) -> Any:
    """A pipeline by `from_pretrained`.

    Args:
        model: hub id or folder.
        dtypes: {part or "default": dtype}.
        load: further arguments of `from_pretrained`.
        progress: show the time so far.

    Raises:
        ImportError: without diffusers.
        ValueError: when it cannot be loaded; names `generator.model` and what can be done.
    """
    try:
        from diffusers.pipelines import DiffusionPipeline, pipeline_utils
    except ImportError as error:
        raise ImportError('diffusers pipelines need the package: pip install "genrl[diffusers]"') from error
    key = "dtype" if hasattr(pipeline_utils, "_resolve_dtype") else "torch_dtype"  # its name before 0.4x
    folder = Path(model)
    if folder.is_dir() and not (folder / "model_index.json").is_file():
        single = " but a single model" if (folder / "config.json").is_file() else ""
        raise ValueError(
            f"generator.model={str(model)!r}: this folder holds no pipeline{single}, it has no model_index.json; give "
            "the folder of a whole pipeline, as its save_pretrained writes it"
        )
    try:
        with loading(f"loading {model}", progress, "diffusers", "transformers"):
            return DiffusionPipeline.from_pretrained(model, **{key: dict(dtypes)}, **load)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # each library has its own kinds
        raise ValueError(f"generator.model={str(model)!r} cannot be loaded: {_reason(model, error)}") from error


def _reason(source: str | os.PathLike[str], error: BaseException) -> str:
    """Why something on the disk or the hub could not be read, and what helps."""
    folder, original = Path(source), f"{type(error).__name__}: {str(error).strip()}"
    if _is_path(source) and not folder.exists():
        return f"the folder does not exist ({type(error).__name__}); give a folder, or a hub id OWNER/NAME"
    if folder.exists() or not (isinstance(error, OSError) or "offline" in original):
        return f"reading it failed with {original}; check its files, and generator.load"
    if "gated" in f"{original} {error.__cause__}".lower():
        return "access to it is gated: accept its licence on its page of the hub and log in with `hf auth login`"
    offline = [
        name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name, "0") not in ("", "0")
    ]
    return (
        "it is no folder, and could not be fetched from the hub"
        + (f" because {', '.join(offline)} is set; unset it" if offline else "; check the name and the network")
        + f", download it first with `hf download {source}`, log in with `hf auth login` if it is gated, or try the "
        f"recipe with --tiny ({original.splitlines()[0][:300]})"
    )


@contextlib.contextmanager
def reading_adapter(name: str, source: str | os.PathLike[str]) -> Iterator[None]:
    """Inside, an adapter is read: chatter is left out, and what cannot be found is a ValueError that names it."""
    try:
        if _is_path(source) and not Path(source).exists():
            raise FileNotFoundError(str(source))
        with quiet():
            yield
    except (OSError, ValueError) as error:  # those of the hub are OSErrors, but without network diffusers has its own
        if isinstance(error, ValueError) and (Path(source).exists() or "offline" not in str(error)):
            raise
        about = f"generator.adapters.{name}={str(source)!r} cannot be loaded: {_reason(source, error)}"
        raise ValueError(about) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave out what libraries remark, and their progress bars, where nothing is wrong; warnings that tell stay."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(loading("", False, "diffusers", "transformers"))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Already found a `peft_config` attribute")
        for name, start in _CHATTER.items():
            told = _Without(start)
            logging.getLogger(name).addFilter(told)
            stack.callback(logging.getLogger(name).removeFilter, told)
        yield


def _is_path(source: str | os.PathLike[str]) -> bool:
    """Whether something can only be meant as a path, not as a hub id."""
    text = str(source)
    return Path(text).is_absolute() or text.startswith(("./", "../", "~")) or text.count("/") != 1


class _Without(logging.Filter):
    def __init__(self, start: str):
        super().__init__()
        self.start = start

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self.start)
