"""Which path and grid a diffusers scheduler belongs to."""

from __future__ import annotations

import copy
import difflib
import inspect
import logging
import math
import re
from typing import Any

import torch

from genrl.diffusion.paths import Path, Prediction, RectifiedFlow, VariancePreserving


def choose_path(scheduler: Any, other: str | None = None) -> tuple[Any, Path, Prediction]:
    """The scheduler whose grid is used, the path that its model was trained on, and what the model predicts.

    Flow matching is the rectified flow. Schedulers of alphas_cumprod are the variance-preserving path, sampled on
    their own timesteps; one that rescales its input or takes other than n steps is replaced by DDIM.

    Args:
        scheduler: of a pipeline.
        other: name of a diffusers scheduler to use instead, with the same configuration.

    Raises:
        ValueError: for a scheduler that is neither, or a name that diffusers does not have.
    """
    if other is not None:
        scheduler = _named(other).from_config(scheduler.config)
    config, tried, name = scheduler.config, copy.deepcopy(scheduler), type(scheduler).__name__
    kind = config.get("prediction_type", "flow_prediction")
    tried.set_timesteps(5, **({"mu": 1.0} if config.get("use_dynamic_shifting") else {}))
    x, v, t = torch.full((1, 1, 1, 1), 0.3), torch.full((1, 1, 1, 1), 0.7), tried.timesteps[0]
    if kind in ("epsilon", "v_prediction", "sample") and hasattr(tried, "alphas_cumprod"):
        scaled = tried.scale_model_input(x, t) if hasattr(tried, "scale_model_input") else x
        if len(tried.timesteps) != 5 or not torch.equal(scaled, x) or float(tried.init_noise_sigma) != 1:
            scheduler = _as_ddim(scheduler)
        final = float(getattr(scheduler, "final_alpha_cumprod", 1.0))
        return scheduler, VariancePreserving(scheduler.alphas_cumprod, final), kind
    if kind == "flow_prediction" and hasattr(tried, "sigmas"):
        sigma, after = (float(s) for s in tried.sigmas[:2])
        moved = tried.step(v, t, x, return_dict=False)[0]
        known = abs(float(t) - sigma * config.get("num_train_timesteps", math.nan)) <= 1
        if known and after < sigma and torch.allclose(moved, x + (after - sigma) * v, atol=1e-3):
            return scheduler, RectifiedFlow(), "velocity"
    raise ValueError(
        f"{name} (prediction type {kind}) neither follows alphas_cumprod nor takes Euler steps of a rectified flow at "
        "timesteps 1000 sigma; choose scheduler='FlowMatchEulerDiscreteScheduler' or another pipeline"
    )


def _named(name: str) -> Any:
    import diffusers

    known = [key for key in dir(diffusers) if key.endswith("Scheduler")]
    if name not in known:
        own = {key.removesuffix("Scheduler"): key for key in known}  # the common ending makes all names alike
        close = [own[key] for key in difflib.get_close_matches(re.sub(r"[Ss]ched\w*$", "", name), own, 3, 0.6)]
        close = close or ["FlowMatchEulerDiscreteScheduler", "DDIMScheduler"]
        raise ValueError(f"generator.scheduler={name!r} is no scheduler of diffusers; did you mean {', '.join(close)}?")
    return getattr(diffusers, name)


def _as_ddim(scheduler: Any) -> Any:
    """DDIM with the same configuration; says which settings have no meaning there and which are guessed."""
    from diffusers import DDIMScheduler

    config = scheduler.config
    given = {key for key in config if not key.startswith("_")} - set(config.get("_use_default_values", ()))
    # DDIM would clip by default, which none that it stands in for does.
    ddim = DDIMScheduler.from_config(config, clip_sample=config.get("clip_sample", False))
    known = inspect.signature(DDIMScheduler.__init__).parameters
    guessed = {key: ddim.config[key] for key in known if key != "self" and key not in given}
    logging.getLogger("genrl").warning(
        f"{type(scheduler).__name__} rescales its input or takes other steps, so DDIM samples and trains in its place. "
        f"Without effect are its settings {sorted(given - known.keys())}; not given, so by default: {guessed}"
    )
    return ddim
