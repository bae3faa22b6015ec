"""Environments, demonstrations of scripted experts and honest evaluation of policies.

Importing this package loads no simulator: names are looked up when they are used.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "EnvError": "settings",
    "EnvSettings": "settings",
    "episode_success": "settings",
    "success_parameters": "settings",
    "TaskEnv": "base",
    "Simulator": "base",
    "SimStep": "base",
    "make_env": "make",
    "list_envs": "make",
    "list_families": "make",
    "MissingExtraError": "make",
    "make_vec": "vector",
    "default_n_envs": "vector",
    "WorkerDiedError": "vector",
    "probe": "probing",
    "ProbeReport": "probing",
    "make_env_from_env_args": "env_args",
    "settings_from_env_args": "env_args",
    "EnvVersionWarning": "env_args",
    "RendererError": "gl",
    "evaluate": "evaluator",
    "Evaluation": "evaluation",
    "EpisodeResult": "evaluation",
    "PolicyError": "episodes",
    "RowPolicy": "actors",
    "Comparison": "compare",
    "ComparisonError": "compare",
    "compare_evaluations": "compare",
    "StacSettings": "stac",
    "Latency": "latency",
    "measure_latency": "latency",
    "VideoWriter": "videos",
    "expert": "experts",
    "list_experts": "experts",
    "Expert": "experts",
    "ExpertError": "experts",
    "collect": "collection",
    "CollectSettings": "collection",
    "ScriptedDemonstrations": "collection",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
