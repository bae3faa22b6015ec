"""A reward as a small HTTP service, for `RemoteReward`: the standard library, no pickle, one batch at a time.

    GET  /health  {"status": "ok", "reward": name, "range": [low, high], "max_bytes": n}, null for infinite
    POST /score   see `remote`; status 400 malformed, 411 no length, 413 too large, 422 the reward refuses such input,
                  500 it failed

There is no authentication: keep it on localhost or in a network that you trust, or put a proxy in front.
"""

from __future__ import annotations

import contextlib
import json
import math
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor

from .base import UNBOUNDED, Reward, RewardError, reward_name, score
from .compose import Compose
from .remote import decode_request

PATIENCE = 60.0  # seconds for which a connection may stand still while a request is read


@dataclass(frozen=True)
class ServeSettings:
    """A reward as a service (`genrl serve-reward CONFIG`).

    Args:
        reward: what is served.
        host: address to listen at; 127.0.0.1 is reached from this machine only, 0.0.0.0 from everywhere.
        port: 0 takes a free one.
        device: ``"auto"`` is the first GPU, or the CPU.
        max_megabytes: of one request.
    """

    reward: Reward
    host: str = "127.0.0.1"
    port: int = 8000
    device: str = "auto"
    max_megabytes: float = 1024.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; give 1 to 65535, or 0 for a free one.")
        if self.max_megabytes <= 0:
            raise ValueError(f"max_megabytes is {self.max_megabytes}; give a number above 0.")

    def resolved_device(self) -> str:
        """The device with ``"auto"`` resolved."""
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"


class RewardServer:
    """Serves one reward until it is closed.

    The port is taken at once, so that a busy one is noticed before a model is loaded; it answers after `prepare`.

    Args:
        reward: any reward; see `genrl.rewards`.
        host: address to listen at; 127.0.0.1 is reached from this machine only, 0.0.0.0 from everywhere.
        port: 0 takes a free one, see `url`.
        device: where the reward is prepared and the media are put.
        max_megabytes: of one request; larger ones are refused with status 413.
        log: called with one line for each request.

    Raises:
        OSError: the port is taken, or the address is not of this machine.
        ValueError: the reward has caps or gates, which act where advantages are made.
    """

    def __init__(
        self,
        reward: Any,
        host: str = "127.0.0.1",
        port: int = 8000,
        device: str | torch.device = "cpu",
        max_megabytes: float = 1024.0,
        log: Callable[[str], None] | None = None,
    ) -> None:
        _refuse_caps_and_gates(reward)
        self.reward, self.device = reward, torch.device(device)
        self.max_bytes, self.log = int(max_megabytes * 1e6), log or (lambda line: None)
        self._one_at_a_time = threading.Lock()
        self._idle = threading.Condition()
        self._active = 0
        self._http = _HTTPServer((host, port), _Handler, bind_and_activate=False)
        self._http.owner = self
        try:
            self._http.server_bind()
        except OSError as error:
            self._http.server_close()
            reason = error.strerror or error
            raise OSError(
                f"cannot listen at {host}:{port} ({reason}); choose another port, 0 for a free one."
            ) from error
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        host, port = self._http.server_address[:2]
        return f"http://{host!s}:{port}"

    def prepare(self, progress: bool = True) -> None:
        """Load the reward and begin to answer."""
        if hasattr(self.reward, "prepare"):
            self.reward.prepare(self.device, progress=progress)
        self._http.server_activate()

    def serve(self) -> None:
        """Answer until `close`, or an exception such as KeyboardInterrupt, in this thread."""
        self._http.serve_forever(poll_interval=0.1)

    def start(self) -> RewardServer:
        """Prepare, and answer in a thread."""
        self.prepare(progress=False)
        self._thread = threading.Thread(target=self.serve, name="genrl-reward-server", daemon=True)
        self._thread.start()
        return self

    def close(self, patience: float = 30.0) -> None:
        """Take no more requests, and wait for those that are being answered, at most `patience` seconds."""
        if self._thread is not None:
            self._http.shutdown()
            self._thread.join()
            self._thread = None
        self._http.server_close()
        with self._idle:
            self._idle.wait_for(lambda: not self._active, patience)

    def __enter__(self) -> RewardServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ answers

    def health(self) -> dict[str, Any]:
        """What a client is told of the reward."""
        bounds = [float(b) if math.isfinite(b) else None for b in getattr(self.reward, "range", UNBOUNDED)]
        return {"status": "ok", "reward": reward_name(self.reward), "range": bounds, "max_bytes": self.max_bytes}

    def scores(self, body: bytes, wanted: Callable[[], bool]) -> dict[str, Any] | None:
        """The answer to the body of a request: scores and weights; None if nobody waits for it any more.

        Raises:
            ValueError: the body is malformed.
            RewardError: the reward failed.
        """
        media, prompts, metadata = decode_request(body)
        watched = _Watched(self.reward)
        with self._one_at_a_time, self._on_device():
            if not wanted():  # it has given up, and may have asked again
                return None
            named = score(watched, media.to(self.device), prompts, metadata)
        lists = {name: [None if math.isnan(v) else v for v in values.tolist()] for name, values in named.items()}
        if not watched.returned_dict:
            return {"scores": next(iter(lists.values()))}
        weigh = self.reward.weight if isinstance(self.reward, Compose) else getattr(self.reward, "entry_weight", None)
        weights = {name: float(weigh(name)) for name in lists} if weigh else {}
        return {"scores": lists, "weights": {name: weight for name, weight in weights.items() if weight != 1}}

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        """The current GPU belongs to a thread, and a new one has the first."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """A request that `close` waits for."""
        with self._idle:
            self._active += 1
        try:
            yield
        finally:
            with self._idle:
                self._active -= 1
                self._idle.notify_all()


def _described(scores: Any, name: str) -> str:
    """Number of samples, and the mean of every name over those that have a score."""
    named = scores if isinstance(scores, dict) else {name: scores}
    means = []
    for label, values in named.items():
        scored = [value for value in values if value is not None]
        missing = f" ({len(values) - len(scored)} not scored)" if len(scored) < len(values) else ""
        means.append(f"{label} {sum(scored) / len(scored):.4g}{missing}" if scored else f"{label} not scored")
    count = len(next(iter(named.values())))
    return f"{count} sample{'' if count == 1 else 's'}, mean {', '.join(means)}"


def _refuse_caps_and_gates(reward: Any) -> None:
    for part in [reward, *reward.rewards.values()] if isinstance(reward, Compose) else []:
        if isinstance(part, Compose) and (part.caps or part.gates):
            raise ValueError(
                "the reward to serve has caps or gates, which act where advantages are made and would be lost; move "
                "them to the Compose of the run, under the names NAME/reward"
            )


class _Watched:
    """The reward under its own name; remembers whether it returned a dict."""

    def __init__(self, reward: Any) -> None:
        self.reward, self.name, self.returned_dict = reward, reward_name(reward), False

    def __call__(self, media: Tensor, prompts: Any, metadata: Any) -> Any:
        result = self.reward(media, prompts, metadata)
        self.returned_dict = isinstance(result, dict)
        return result


class _HTTPServer(ThreadingHTTPServer):
    daemon_threads = True
    owner: RewardServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no event."""


class _Handler(BaseHTTPRequestHandler):
    server: _HTTPServer
    timeout = PATIENCE

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, self.server.owner.health())
        elif self.path == "/score":
            self._answer(405, {"error": "use POST for /score"})
        else:
            self._unknown()

    def do_POST(self) -> None:
        if self.path != "/score":
            return self._unknown()
        owner, started = self.server.owner, time.monotonic()
        with owner.counted():
            body = self._body()
            if body is None:
                return
            said = "failed"
            try:
                scores = owner.scores(body, self._waits)
            except (ValueError, TypeError) as error:  # the format, or check_media
                self._answer(400, {"error": str(error)})
            except RewardError as error:
                refused = isinstance(error.__cause__, (ValueError, TypeError, KeyError))
                if not refused:
                    owner.log(traceback.format_exc())
                self._answer(422 if refused else 500, {"error": str(error)})
            except Exception as error:  # whatever it is, the client learns it and the service goes on
                owner.log(traceback.format_exc())
                self._answer(500, {"error": f"{type(error).__name__}: {error}"})
            else:
                said = "given up by the client"
                if scores is not None:
                    said = _described(scores["scores"], reward_name(owner.reward))
                    self._answer(200, scores)
            size = f"{len(body) / 1e6:.1f} MB in {time.monotonic() - started:.2f} s"
            owner.log(f"{self.client_address[0]} {size}: {said}")

    def _body(self) -> bytes | None:
        """The body, or None after an answer that says why there is none."""
        given, most = self.headers.get("Content-Length", ""), self.server.owner.max_bytes
        if not given.isdigit():
            self._answer(411, {"error": "Content-Length is missing"})
        elif int(given) > most:
            self._answer(
                413, {"error": f"the request has {given} bytes; this server takes {most}. Send fewer samples."}
            )
        else:
            body = self.rfile.read(int(given))
            if len(body) == int(given):
                return body
            self._answer(400, {"error": f"the request ended after {len(body)} of {given} bytes"})
        return None

    def _waits(self) -> bool:
        """Whether the client is still connected; it sends nothing more, so what can be read is the end."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        try:
            return not readable or bool(self.connection.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def _unknown(self) -> None:
        self._answer(404, {"error": f"there is no {self.path}; this server has GET /health and POST /score"})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content, allow_nan=False).encode()
        with contextlib.suppress(OSError):  # the client may have gone
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """The base class writes every request to stderr; `RewardServer.log` has what matters."""
