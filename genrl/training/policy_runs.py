"""Policies of finished runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from genrl.training.checkpoint import STATE, find_checkpoint, load_state


def load_policy_of(
    folder: str | Path, checkpoint: str = "last", weights: str = "auto", device: str = "cpu"
) -> tuple[Any, str, Path]:
    """The policy of a run directory, or of a folder that `save_pretrained` wrote.

    Args:
        folder: a run directory or a saved policy.
        checkpoint: of a run: ``"last"``, ``"best"`` or ``"step-000500"``.
        weights: ``"ema"`` (the moving average), ``"raw"`` (the trained weights), or ``"auto"``: what the run evaluated.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"``, which is CUDA when there is one.

    Returns:
        The policy in evaluation mode, the name of its weights (``"ema"``, ``"raw"`` or ``"saved"``), and its folder.

    Raises:
        FileNotFoundError: there is no such checkpoint or policy.
        ValueError: it does not have the weights that were asked for.
    """
    from genrl.policies import load_policy

    folder = Path(folder)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if (folder / "config.json").is_file():
        if weights != "auto":
            raise ValueError(f"{folder} is a saved policy, which has one set of weights; leave out --weights {weights}")
        return load_policy(folder, device), "saved", folder
    path = find_checkpoint(folder, checkpoint)
    policy = load_policy(path / "model", device)
    if not (path / STATE).is_file():  # the best checkpoint holds what was evaluated, and nothing to train on from
        if weights == "raw":
            raise ValueError(f"{path} holds the evaluated weights only; ask for --checkpoint last or step-N")
        measured = json.loads((path / "evaluation.json").read_text(encoding="utf-8"))
        return policy, "ema" if measured["eval/uses_ema"] else "raw", path
    state = load_state(path)
    averaged = state["ema"] is not None
    if weights == "ema" and not averaged:
        raise ValueError(f"{path} has no moving average; set trainer.ema_decay in training, or ask for raw weights")
    if weights == "raw" and averaged:
        own = policy.state_dict()
        policy.load_state_dict({name: value for name, value in state["weights"].items() if name in own}, strict=False)
    return policy.eval(), "ema" if averaged and weights != "raw" else "raw", path
