"""The SDE/ODE layer: paths, kernels, transitions, schedules and samplers. No model, reward or trainer in sight."""

from genrl.diffusion.batch import index_batch, map_tensors, repeat_batch
from genrl.diffusion.chunks import ChunkSampler
from genrl.diffusion.kernels import (
    CPS,
    DDIM,
    KERNELS,
    SAGE,
    Consistency,
    DanceSDE,
    Euler,
    FlowSDE,
    Kernel,
    PathKernel,
    Renoise,
)
from genrl.diffusion.noise import RowNoise, derive_seed
from genrl.diffusion.paths import Path, RectifiedFlow, VariancePreserving
from genrl.diffusion.sampler import Sampler, Step, StepNoise, Trajectory, VelocityFn
from genrl.diffusion.schedule import Schedule
from genrl.diffusion.transition import (
    DeterministicTransitionError,
    GaussianTransition,
    NonFiniteError,
    Reduction,
    reduce_elements,
)
from genrl.diffusion.windows import AllSteps, FixedWindow, RandomWindow, SlidingWindow, Window

__all__ = [
    "CPS",
    "DDIM",
    "KERNELS",
    "SAGE",
    "AllSteps",
    "ChunkSampler",
    "Consistency",
    "DanceSDE",
    "DeterministicTransitionError",
    "Euler",
    "FixedWindow",
    "FlowSDE",
    "GaussianTransition",
    "Kernel",
    "NonFiniteError",
    "Path",
    "PathKernel",
    "RandomWindow",
    "RectifiedFlow",
    "Reduction",
    "Renoise",
    "RowNoise",
    "Sampler",
    "Schedule",
    "SlidingWindow",
    "Step",
    "StepNoise",
    "Trajectory",
    "VariancePreserving",
    "VelocityFn",
    "Window",
    "derive_seed",
    "index_batch",
    "map_tensors",
    "reduce_elements",
    "repeat_batch",
]
