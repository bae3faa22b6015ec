"""Prompts that a diffusers pipeline encodes once, in memory or on disk."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from genrl.diffusion.batch import map_tensors

KEPT = 16  # results that stay on the device
_TEXTS = re.compile(r"(negative_)?prompt(_\d)?")  # arguments that have one entry a row


class PromptCache:
    """A pipeline's `encode_prompt` that encodes one prompt at a time, and each only once.

    Batches are joined from results for single prompts. So a batch's conditioning does not depend on who shares it, and
    no text encoder runs when training goes over samples again.

    Args:
        pipe: a diffusers pipeline.
        folder: where results are kept, by text, arguments and text encoders, also for other runs; or "memory".
        offload: the text encoders start on the CPU, see `move_encoders`.

    Raises ValueError when the folder cannot be made.
    """

    def __init__(self, pipe: Any, folder: str | os.PathLike[str] = "memory", offload: bool = False):
        self.pipe, self.offload, self.asleep = pipe, offload, offload
        self.folder = None if folder == "memory" else Path(folder)
        try:
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"generator.prompt_cache={str(folder)!r} cannot be a folder of prompts ({error.strerror}); give "
                'a folder that can be made, or "memory"'
            ) from error
        names = [n for n, part in pipe.components.items() if isinstance(part, nn.Module) and n.startswith("text_enc")]
        self.encoders = [getattr(pipe, name) for name in names]
        self.shapes: list[Any] = []  # of the results since it was last cleared
        self._identity = (type(pipe).__name__, "" if self.folder is None else _fingerprint(self.encoders))
        self._signature = inspect.signature(pipe.encode_prompt)
        self._rows: dict[Any, Any] = {}  # result of every prompt, on the CPU
        self._recent: OrderedDict[Any, Any] = OrderedDict()  # joined results, on the device

    def move_encoders(self, asleep: bool) -> None:
        """Take the text encoders from the device, if they may leave it, or back to it; new prompts wake them."""
        if self.offload and self.asleep != asleep:
            self.asleep = asleep
            for encoder in self.encoders:
                encoder.to("cpu" if asleep else self.pipe._execution_device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What `encode_prompt` gives for these arguments."""
        call = self._signature.bind(*args, **kwargs)
        given = dict(call.arguments)
        texts = [name for name, value in given.items() if _TEXTS.fullmatch(name) and isinstance(value, list)]
        common = repr(sorted((k, v) for k, v in given.items() if k not in texts and k != "device"))
        rows = tuple(zip(*(given[name] for name in texts), strict=True))
        if (common, rows) not in self._recent:
            found = []
            for row in rows:
                call.arguments = {**given, **{name: [text] for name, text in zip(texts, row, strict=True)}}
                found.append(self._encode_row(call, (common, row)))
            single = not isinstance(found[0], tuple)
            slots = zip(*([(item,) for item in found] if single else found), strict=True)
            joined = map_tensors(lambda x: x.to(self.pipe._execution_device), tuple(collate(slot) for slot in slots))
            keep(self._recent, (common, rows), joined[0] if single else joined)
        result = self._recent[common, rows]
        self.shapes.append([getattr(x, "shape", None) for x in result])
        return result

    def _encode_row(self, call: inspect.BoundArguments, key: Any) -> Any:
        if key in self._rows:
            return self._rows[key]
        name = hashlib.sha256(repr((self._identity, key)).encode()).hexdigest()
        file = None if self.folder is None else self.folder / f"{name}.pt"
        if file is not None and file.is_file():
            return torch.load(file, weights_only=True)
        self.move_encoders(asleep=False)
        with torch.no_grad():
            result = type(self.pipe).encode_prompt(self.pipe, *call.args, **call.kwargs)
        result = map_tensors(lambda x: x.detach().cpu(), result)
        if file is None:
            self._rows[key] = result
        else:
            torch.save(result, file.with_suffix(f".{id(self)}"))
            file.with_suffix(f".{id(self)}").replace(file)
        return result


def collate(rows: Sequence[Any]) -> Any:
    """One slot of `encode_prompt`'s results for several prompts: what has one row is joined, all else is shared."""
    first = rows[0]
    if isinstance(first, list):
        return [item for row in rows for item in row]
    return torch.cat(list(rows)) if isinstance(first, Tensor) and first.shape[:1] == (1,) else first


def keep(recent: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    """Enter a value, and drop the oldest when there are more than `KEPT`."""
    recent[key] = value
    if len(recent) > KEPT:
        recent.popitem(last=False)


def _fingerprint(modules: Sequence[nn.Module]) -> str:
    """Tells text encoders apart by the names, shapes and some values of their weights."""
    digest = hashlib.sha256()
    for name, p in (item for module in modules for item in module.named_parameters()):
        some = p.detach().flatten()[:: max(1, p.numel() // 16)].float().cpu().numpy()
        digest.update(f"{name} {tuple(p.shape)}".encode() + some.tobytes())
    return digest.hexdigest()
