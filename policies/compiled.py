"""Acting through torch.compile or a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from genrl.policies.export import OneStepGraph
from genrl.policies.settings import Draw

if TYPE_CHECKING:
    from genrl.policies.base import ChunkPolicy

Mode = Literal["compile", "cuda_graph", "plain"]


class CompiledPolicy:
    """`act` of a one-step policy with less overhead per call.

    - ``"compile"``: the whole way from observations to actions through torch.compile; one compilation per batch size.
    - ``"cuda_graph"``: the same kernels as without, recorded once per batch size and replayed in one launch; only on
      CUDA, elsewhere it is the plain path and says so.
    - ``"plain"``: the policy's own `act`.

    The weights are those of the policy, also when they are trained on. After the policy is moved to another device,
    make a new object: a graph remembers addresses.

    Args:
        policy: configured, with one network call per chunk.
        mode: see above.
        backend: of torch.compile, a name or a function; ``"inductor"`` needs a C++ compiler on CPUs, ``"aot_eager"``
            needs none and mainly serves tests.

    Attributes:
        mode: the one in use, ``"plain"`` where the wanted one is not available.

    Raises:
        ValueError: another mode, an unknown backend, or a policy of several steps.
    """

    def __init__(self, policy: ChunkPolicy, mode: Mode = "compile", backend: str | Callable[..., Any] = "inductor"):
        if mode not in get_args(Mode):
            raise ValueError(f"mode = {mode!r}; allowed are {list(get_args(Mode))}")
        if mode == "compile" and isinstance(backend, str):
            known = torch._dynamo.list_backends(exclude_tags=())
            if backend not in known:
                raise ValueError(f"backend = {backend!r} is unknown to torch.compile; it has {known}")
        self.policy, self.mode = policy, mode
        self._graph = OneStepGraph(policy)
        self._recordings: dict[int, _Recording] = {}
        if mode == "cuda_graph" and policy.device.type != "cuda":
            self._fall_back(f"CUDA graphs need a CUDA device, the policy is on {policy.device}")
        if mode == "compile":
            self._compiled = torch.compile(self._graph, backend=backend, dynamic=False)
            try:
                self._call(self._compiled, list(self._graph.example(1)))
            except Exception as error:  # of many kinds: no C++ compiler, an operator that the backend lacks
                reason = " ".join(str(error).split())[:300]
                name = getattr(backend, "__name__", backend)
                self._fall_back(f"torch.compile with {name!r} failed ({type(error).__name__}: {reason})")

    def act(self, obs: Mapping[str, Tensor], generator: torch.Generator | None = None) -> Tensor:
        """See `ChunkPolicy.act`; equal to it up to rounding."""
        if self.mode == "plain":
            return self.policy.act(obs, generator)
        policy = self.policy
        inputs = [torch.as_tensor(obs[name]).to(policy.device) for name in policy.specs if name in obs]
        if len(inputs) < len(policy.specs):
            return policy.act(obs, generator)  # names what is missing
        shape = (inputs[0].shape[0], policy.chunking.horizon, policy.action_dim)
        inputs.append(Draw(generator, policy.device, policy.dtype).normal(shape))
        if self.mode == "compile":
            return self._call(self._compiled, inputs)
        recording = self._recordings.get(shape[0])
        if recording is None:
            recording = self._recordings[shape[0]] = _Recording(self._graph, inputs)
        return recording(inputs)

    def _call(self, function: Callable[..., Any], inputs: list[Tensor]) -> Tensor:
        with torch.no_grad():
            return function(*inputs)[0].clone()

    def _fall_back(self, reason: str) -> None:
        self.mode = "plain"
        warnings.warn(f"{reason}; acting without it, which gives the same actions more slowly", stacklevel=3)


class _Recording:
    """A CUDA graph of one batch size with its input and output buffers."""

    def __init__(self, function: Callable[..., Any], inputs: list[Tensor]):
        self.inputs = [value.clone() for value in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(3):  # libraries choose their kernels and allocate workspaces outside of the recording
                function(*self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph):
            self.output = function(*self.inputs)[0]

    def __call__(self, inputs: list[Tensor]) -> Tensor:
        for own, value in zip(self.inputs, inputs, strict=True):
            if own.shape != value.shape:
                raise ValueError(
                    f"an observation has shape {list(value.shape)}, the first call had {list(own.shape)}; give all "
                    "observations the shapes of the policy's data"
                )
            own.copy_(value)
        self.graph.replay()
        return self.output.clone()  # the next replay overwrites it
