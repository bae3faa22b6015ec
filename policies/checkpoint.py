"""Policies on disk: config.json (class, settings, observations, task) and model.safetensors (weights, statistics)."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import genrl
from genrl.config import build_part
from genrl.networks import ObsSpec
from genrl.parts import UNWRITABLE, to_plain
from genrl.policies.normalizer import Normalizer
from genrl.policies.teacher import Teacher

if TYPE_CHECKING:
    from genrl.policies.base import ChunkPolicy

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FORMAT = 1


def save(policy: ChunkPolicy, folder: Path) -> None:
    """See `ChunkPolicy.save_pretrained`.

    Raises:
        ValueError: a setting of the policy has no plain form, or `task` is not made of plain values.
    """
    from safetensors.torch import save_file

    part = to_plain(policy)
    if part is UNWRITABLE:
        raise ValueError(
            f"the settings of {type(policy).__name__} cannot be written: each argument of __init__ must be stored as "
            "an attribute of its name and be a plain value, a settings dataclass or a part"
        )
    config = {
        "format": FORMAT,
        "genrl": genrl.__version__,
        "policy": part,
        "specs": {name: spec.to_dict() for name, spec in policy.specs.items()},
        "action_dim": policy.action_dim,
        "normalizer": policy.normalizer.spec(),
        "task": policy.task,
    }
    try:
        text = json.dumps(config, indent=2)
    except TypeError as error:
        raise ValueError(f"the policy's task cannot be written to {CONFIG}: {error}; use plain values") from error
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.detach().cpu().contiguous() for k, v in _weights(policy).items()}, folder / WEIGHTS)
    (folder / CONFIG).write_text(text, encoding="utf-8")


def load_policy(folder: str | os.PathLike[str], device: str | torch.device = "cpu") -> ChunkPolicy:
    """The policy that `save_pretrained` wrote, in evaluation mode; its class is named in the checkpoint.

    Raises:
        FileNotFoundError, ValueError: see `ChunkPolicy.from_pretrained`.
    """
    from safetensors.torch import load_file

    folder = Path(folder)
    config = read_config(folder)
    policy = build_part(config["policy"], f"policy in {folder / CONFIG}")
    specs = {name: ObsSpec.from_dict(spec) for name, spec in config["specs"].items()}
    encoder = policy.encoder
    policy.encoder = replace(encoder, image_weights=None)  # the checkpoint has them; their file may be elsewhere
    policy.configure(specs, config["action_dim"], Normalizer.from_spec(config["normalizer"]), task=config["task"])
    policy.encoder = encoder
    state = load_file(folder / WEIGHTS)  # to the CPU first: every process of a node would else fill device 0
    own = _weights(policy)
    problems = [f"{name} is missing" for name in own if name not in state]
    problems += [f"{name} is not part of the policy" for name in state if name not in own]
    problems += [
        f"{name} has shape {list(state[name].shape)}, the configuration makes {list(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    if problems:
        raise ValueError(
            f"{folder / WEIGHTS} does not fit {CONFIG}: {'; '.join(problems[:5])}"
            f"{f' and {len(problems) - 5} more' if len(problems) > 5 else ''}. Both must come from one save_pretrained"
        )
    dtypes = {value.dtype for name, value in state.items() if name.startswith("net.")}
    if dtypes == {torch.float64} or dtypes == {torch.bfloat16} or dtypes == {torch.float16}:
        policy.to(dtypes.pop())
    policy.load_state_dict(state, strict=False)
    for module in policy.modules():
        if isinstance(module, Teacher):
            module.update(decay=0)
    return policy.to(device).eval()


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a policy.

    Raises:
        FileNotFoundError: the folder or one of its two files is not there; names what is.
        ValueError: the file is of another kind, or of a newer version.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            found = sorted(path.name for path in folder.iterdir())[:10] if folder.is_dir() else "no such folder"
            raise FileNotFoundError(
                f"{folder} holds no policy: {name} is missing (found: {found or 'nothing'}). Give the folder that "
                "save_pretrained wrote"
            )
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder / CONFIG} is not valid JSON: {error}") from error
    if not isinstance(config, dict) or "policy" not in config or "specs" not in config:
        raise ValueError(f"{folder / CONFIG} does not describe a policy of genrl; it was written by another tool")
    if config.get("format", 0) > FORMAT:
        raise ValueError(
            f"{folder / CONFIG} has format {config['format']}, written by genrl {config.get('genrl')}; this version "
            f"reads up to {FORMAT}: update genrl"
        )
    return config


def _weights(policy: ChunkPolicy) -> dict[str, Tensor]:
    """The state dict without teachers."""
    teachers = tuple(f"{name}." for name, module in policy.named_modules() if isinstance(module, Teacher))
    return {name: value for name, value in policy.state_dict().items() if not name.startswith(teachers or ("\0",))}
