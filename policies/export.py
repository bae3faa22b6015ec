"""One-step policies as ONNX files: encoder, normalisation and network in one graph, for robots without Python."""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from genrl.networks import ObservationError, ObsSpec

if TYPE_CHECKING:
    from genrl.policies.base import ChunkPolicy

NOISE = "noise"
TOLERANCE = 1e-5


class OneStepGraph(nn.Module):
    """A one-step policy as a function of tensors: (observations in the order of `policy.specs`, noise) -> actions.

    Args:
        policy: configured, with `nfe` 1.

    Raises:
        ValueError: the policy calls its network more than once, or has an observation called "noise".
    """

    def __init__(self, policy: ChunkPolicy):
        super().__init__()
        if policy.nfe != 1:
            raise ValueError(
                f"a {type(policy).__name__} with {policy.nfe} network calls per chunk has no single graph; a policy of "
                "one step has (set steps=1 where the policy offers it, or use MeanFlowPolicy, OneStepFlowPolicy, "
                "ConsistencyPolicy, DriftingPolicy or RegressionPolicy)"
            )
        if NOISE in policy.specs:
            raise ValueError(f"an observation is called {NOISE!r}, which is the name of the graph's other input")
        self.policy = policy

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Raw observations [B, n_obs_steps, *shape] and noise [B, H, A] -> (executed [B, n, A], chunk [B, H, A])."""
        *observations, noise = inputs
        policy = self.policy
        cond = policy.encode(dict(zip(policy.specs, observations, strict=True)))
        chunk = policy._sample(cond, lambda step, shape: noise, None)
        chunk = policy.normalizer.unnormalize("action", chunk)
        return chunk[:, policy.chunking.first : policy.chunking.last], chunk

    def example(self, batch: int, seed: int = 0) -> tuple[Tensor, ...]:
        """Random inputs of the graph, about in the range of the training data, on the policy's device."""
        policy = self.policy
        generator = torch.Generator().manual_seed(seed)
        obs = example_observations(policy, batch, generator)
        noise = torch.randn(batch, policy.chunking.horizon, policy.action_dim, generator=generator)
        return (*obs.values(), noise.to(policy.device))


def example_observations(policy: ChunkPolicy, batch: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Random raw observations {name: [B, n_obs_steps, *shape]}, normal around the centre of the training data."""
    obs = {}
    for name, spec in policy.specs.items():
        shape = (batch, policy.chunking.n_obs_steps, *spec.shape)
        if spec.kind == "image":
            obs[name] = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(policy.device)
        else:
            normal = torch.randn(shape, generator=generator).to(policy.device)
            obs[name] = policy.normalizer.unnormalize(name, normal)
    return obs


def export_onnx(policy: ChunkPolicy, path: str | os.PathLike[str], opset: int = 18) -> Path:
    """Write a one-step policy as an ONNX file and check it against the policy in onnxruntime.

    Inputs: every observation under its name, [B, n_obs_steps, *shape] in raw units (images uint8), and ``noise``
    [B, H, A], standard normal (a regression policy ignores it). Outputs: ``actions`` [B, n_action_steps, A], which are
    to be executed, and ``chunk`` [B, H, A]. B is free. The weights are those at the time of the export.

    Args:
        policy: configured, on any device; it is not changed.
        path: file to write, by custom *.onnx.
        opset: ONNX operator set.

    Returns:
        The path.

    Raises:
        ValueError: a policy of several steps, or a file whose actions differ by more than 1e-5 (relative to the
            largest action, if that is above 1).
        ImportError: the packages of the extra ``onnx`` are missing.
    """
    try:
        import onnx
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(f'export needs {error.name}; install it with: pip install "genrl[onnx]"') from error
    graph = OneStepGraph(copy.deepcopy(policy).to("cpu", torch.float32)).eval()
    names = [*policy.specs, NOISE]
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    batch = torch.export.Dim("batch")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="# The axis name")  # all inputs share the axis
        torch.onnx.export(
            graph,
            graph.example(2),
            str(path),
            input_names=names,
            output_names=["actions", "chunk"],
            dynamic_shapes=(tuple({0: batch} for _ in names),),
            opset_version=opset,
            dynamo=True,
            verbose=False,
            external_data=False,
        )
    model = onnx.load(str(path))
    fixed = [value.name for value in model.graph.input if not value.type.tensor_type.shape.dim[0].dim_param]
    if fixed:
        raise ValueError(
            f"the graph of this {type(policy).__name__} works for one batch size only (inputs {fixed}): something in "
            "it turns the batch size into a Python number; use x.shape[0] where it says len(x)"
        )
    facts = {"specs": {name: spec.to_dict() for name, spec in policy.specs.items()}, "task": policy.task}
    onnx.helper.set_model_props(model, {"genrl": json.dumps(facts)})
    onnx.save(model, str(path))
    difference = onnx_difference(graph, path)
    if not difference <= TOLERANCE:
        raise ValueError(
            f"{path} acts differently from the policy: largest difference {difference:.3g}, allowed {TOLERANCE:g}; "
            "the file stays for inspection, do not deploy it"
        )
    return path


def onnx_difference(graph: OneStepGraph, path: Path, batches: tuple[int, ...] = (1, 3)) -> float:
    """Largest difference between a policy and its file, over random inputs of several batch sizes."""
    session = _session(path, threads=1)
    names = [*graph.policy.specs, NOISE]
    worst = 0.0
    for batch in batches:
        inputs = graph.example(batch, seed=batch)
        with torch.no_grad():
            expected = graph(*inputs)
        feed: Mapping[str, object] = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
        for found, wanted in zip(session.run(["actions", "chunk"], feed), expected, strict=True):
            scale = max(1.0, float(wanted.abs().max()))
            worst = max(worst, float((torch.from_numpy(found) - wanted).abs().max()) / scale)
    return worst


class OnnxPolicy:
    """An exported policy in onnxruntime, with the `act` of the original: the fastest way to act on a CPU.

    Args:
        path: what `export_onnx` wrote.
        threads: of the runtime; 1 is fastest for small networks.

    Attributes:
        specs: the observations, by name. n_obs_steps: history that it sees. task: what travelled with the policy.

    Raises:
        FileNotFoundError: no such file. ValueError: a file of another tool.
        ImportError: the packages of the extra ``onnx`` are missing.
    """

    def __init__(self, path: str | os.PathLike[str], threads: int = 1):
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no file {path}; export_onnx(policy, path) writes one")
        self._run = _session(Path(path), threads)
        facts = self._run.get_modelmeta().custom_metadata_map.get("genrl")
        if facts is None:
            raise ValueError(f"{path} was not written by export_onnx; use onnxruntime itself for other files")
        facts = json.loads(facts)
        self.specs = {name: ObsSpec.from_dict(spec) for name, spec in facts["specs"].items()}
        self.task: dict[str, Any] = facts["task"]
        self._shapes = {node.name: tuple(node.shape[1:]) for node in self._run.get_inputs()}
        self.n_obs_steps = int(next(self._shapes[name][0] for name in self.specs))

    def act(self, obs: Mapping[str, Any], generator: torch.Generator | None = None) -> Tensor:
        """The actions to execute: [B, n_action_steps, A] for raw observations {name: [B, n_obs_steps, *shape]}.

        Args:
            obs: tensors or arrays; names that the policy does not use are ignored.
            generator: on the CPU; equal seeds give the actions of the original policy up to rounding.

        Raises:
            ObservationError: a missing name or a wrong shape.
        """
        feed = {}
        for name, spec in self.specs.items():
            if name not in obs:
                raise ObservationError(f"observation {name!r} is missing; found are {list(obs)}")
            value = np.asarray(obs[name], np.uint8 if spec.kind == "image" else np.float32)
            if value.shape[1:] != self._shapes[name]:
                raise ObservationError(
                    f"observation {name!r} has shape {list(value.shape)}; expected [B, "
                    f"{', '.join(map(str, self._shapes[name]))}] (batch, history, ...)"
                )
            feed[name] = value
        rows = len(next(iter(feed.values())))
        feed[NOISE] = torch.randn((rows, *self._shapes[NOISE]), generator=generator).numpy()
        return torch.from_numpy(self._run.run(["actions"], feed)[0])


def _session(path: Path, threads: int) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(f'this needs {error.name}; install it with: pip install "genrl[onnx]"') from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
