"""Rewards that run elsewhere: a client of `genrl serve-reward`, and the format in which the two talk.

A request is one safetensors file: the tensor `media`, and under the metadata key `request` the JSON object
`{"prompts": [...], "metadata": [...]}`. It is read without executing anything, in any language. The answer is JSON:
`{"scores": [...]}` or `{"scores": {name: [...]}}`, null for NaN, and `"weights": {name: number}` of names that do not
count once each; or `{"error": "..."}` with status 4xx (the request is wrong, and is not sent again) or 5xx (the server
is in trouble).
"""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import torch
from torch import Tensor

from .base import UNBOUNDED

ENCODINGS = {"float32": torch.float32, "float16": torch.float16, "uint8": torch.uint8}
LONGEST_WAIT = 60.0  # seconds between two attempts


class RemoteRewardError(RuntimeError):
    """A reward server did not answer, refused, or answered no scores. `.url`, `.attempts`, `.status`."""

    def __init__(self, message: str, url: str, attempts: int, status: int | None = None) -> None:
        super().__init__(message)
        self.url, self.attempts, self.status = url, attempts, status


class _Trouble(Exception):
    """Something that may go away: no connection, no answer in time, status 5xx."""


class _Answer(NamedTuple):
    status: int
    body: bytes


class RemoteReward:
    """A reward that another process computes, on this machine or elsewhere (`genrl serve-reward CONFIG`).

    Values, names and NaN are those of the reward there. A failure is an error that names the address, the number of
    attempts and the last cause; it is never a score.

    Args:
        url: of the server, such as ``"http://gpu-2:8000"``; a path in front of /score and /health is kept.
        timeout: seconds for one attempt, from connecting to the last byte of the answer.
        retries: further attempts after a refused connection, a time-out or a status 5xx; 4xx is final.
        backoff: seconds before the first retry; doubled each time, up to 60.
        batch_size: samples in one request; None sends a batch whole.
        encoding: how media travel. ``"float32"`` and ``"float16"`` as they are (float16 rounds by up to 2.4e-4);
            ``"uint8"`` rounded to 1/255, as an image file would be, in a quarter of the bytes.
        headers: added to each request; ``$NAME`` in a value is the environment variable of that name, so that keys
            need not be in a configuration.
        metadata_keys: what is sent of the metadata; None sends all, which must then be JSON.
        wait: seconds that `prepare` waits for a server that is still starting.
    """

    differentiable = False

    def __init__(
        self,
        url: str,
        timeout: float = 120.0,
        retries: int = 3,
        backoff: float = 1.0,
        batch_size: int | None = None,
        encoding: Literal["float32", "float16", "uint8"] = "float32",
        headers: dict[str, str] | None = None,
        metadata_keys: list[str] | None = None,
        wait: float = 60.0,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url is {url!r}; give http:// or https:// and a host, such as 'http://localhost:8000'.")
        if encoding not in ENCODINGS:
            raise ValueError(f"encoding is {encoding!r}; give one of {', '.join(ENCODINGS)}.")
        for name, value, least in (("timeout", timeout, 1e-3), ("retries", retries, 0), ("backoff", backoff, 0)):
            if value < least:
                raise ValueError(f"{name} is {value}; give {least:g} or more.")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; give 1 or more samples a request, or null for all at once.")
        self.url, self.timeout, self.retries, self.backoff = url.rstrip("/"), timeout, retries, backoff
        self.batch_size, self.encoding, self.wait = batch_size, encoding, wait
        self.headers, self.metadata_keys = dict(headers or {}), metadata_keys
        self.name, self.range = "remote", UNBOUNDED
        self._prepared = False
        self._most_bytes = math.inf
        self._names: list[str] | None = None
        self._weights: dict[str, float] = {}  # of several scores, as the server says

    def entry_weight(self, inner: str) -> float:
        """The weight that the reward there gives one of its scores, such as 0 for what is only logged."""
        return self._weights.get(inner, 1.0)

    def prepare(self, device: Any = "cpu", progress: bool = True) -> None:
        """Ask the server for the name and the range of its reward, once it is up.

        Raises:
            RemoteRewardError: it did not answer within `wait` seconds, or is no reward server.
            ValueError: a header takes an environment variable that is not set.
        """
        if self._prepared:
            return
        for name, value in self.headers.items():
            for variable in re.findall(r"\$\{?(\w+)", value):
                if variable not in os.environ:
                    raise ValueError(f"header {name!r} takes ${variable}, which is not set; export {variable}=...")
        until, attempts = time.monotonic() + self.wait, 0
        while True:
            attempts += 1
            try:
                facts = self._read(self._exchange("GET", "/health"), "/health", attempts)
                break
            except _Trouble as trouble:
                if time.monotonic() >= until:
                    raise self._failure(
                        "/health",
                        attempts,
                        trouble,
                        f"{self.wait:g} s were waited. Is it running? Start it with: genrl serve-reward CONFIG"
                        f"{self._port_option()}",
                    ) from trouble
                time.sleep(min(1.0, max(self.backoff, 0.05)))
        if not isinstance(facts.get("reward"), str):
            raise self._wrong("/health", attempts, "names no reward")
        low, high = facts.get("range") or (None, None)
        self.name = facts["reward"]
        self.range = (-math.inf if low is None else float(low), math.inf if high is None else float(high))
        self._most_bytes = facts.get("max_bytes") or math.inf
        self._prepared = True

    def __call__(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Tensor | dict[str, Tensor]:
        """[B], or name -> [B], as the server's reward returns it, on the device of media."""
        self.prepare()
        size = self.batch_size or len(prompts)
        parts = []
        for start in range(0, len(prompts), size):
            rows = slice(start, start + size)
            parts.append(self._score(media[rows], prompts[rows], metadata[rows]))
        first = parts[0]
        if isinstance(first, dict):
            return {
                name: torch.tensor([v for part in parts for v in part[name]], device=media.device) for name in first
            }
        return torch.tensor([value for part in parts for value in part], device=media.device)

    def _score(self, media: Tensor, prompts: Sequence[str], metadata: Sequence[dict]) -> Any:
        kept = [
            dict(entry) if self.metadata_keys is None else {k: entry[k] for k in self.metadata_keys if k in entry}
            for entry in metadata
        ]
        body = encode_request(media, list(prompts), kept, self.encoding)
        if len(body) > self._most_bytes:
            raise ValueError(
                f"a request of {len(prompts)} samples has {len(body) / 1e6:.0f} MB, and the server at {self.url} takes "
                f"{self._most_bytes / 1e6:.0f} MB; lower batch_size ({self.batch_size}), or send uint8."
            )
        attempts = 0
        while True:
            attempts += 1
            try:
                answer = self._read(self._exchange("POST", "/score", body), "/score", attempts)
                self._weights = self._checked_weights(answer.get("weights"), attempts)
                return self._checked(answer.get("scores"), len(prompts), attempts)
            except _Trouble as trouble:
                if attempts > self.retries:
                    raise self._failure("/score", attempts, trouble, "Look at the server's output.") from trouble
                time.sleep(min(self.backoff * 2 ** (attempts - 1), LONGEST_WAIT))

    # ------------------------------------------------------------------------------------------------ transport

    def _exchange(self, method: str, path: str, body: bytes | None = None) -> _Answer:
        """One attempt, on a connection of its own. Environment variables about proxies are not followed."""
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout)
        until = time.monotonic() + self.timeout
        headers = {"Content-Type": "application/octet-stream", "Accept": "application/json"}
        headers |= {name: os.path.expandvars(value) for name, value in self.headers.items()}
        try:
            try:
                connection.request(method, parts.path + path, body, headers)
            except (BrokenPipeError, ConnectionResetError):  # a server may refuse a request before it has read all
                if connection.sock is None:
                    raise
            if connection.sock is not None:
                connection.sock.settimeout(max(until - time.monotonic(), 1e-3))
            response = connection.getresponse()
            received = bytearray()
            while part := response.read1(1 << 16):
                received += part
                if time.monotonic() > until:
                    raise TimeoutError("timed out")
            if response.length:  # announced bytes that did not come
                raise http.client.IncompleteRead(bytes(received), response.length)
            return _Answer(response.status, bytes(received))
        except TimeoutError as error:
            raise _Trouble(f"no answer within timeout = {self.timeout:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise _Trouble(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def _read(self, answer: _Answer, path: str, attempts: int) -> dict[str, Any]:
        """The JSON object of a good answer."""
        try:
            content = json.loads(answer.body)
        except ValueError:
            content = None
        if answer.status != 200:
            reason = content.get("error") if isinstance(content, dict) else answer.body[:200].decode(errors="replace")
            said = f"status {answer.status}: {str(reason).strip()[:1000]}"
            if answer.status >= 500:
                raise _Trouble(said)
            raise RemoteRewardError(
                f"reward server {self.url}{path} refused: {said}", self.url, attempts, answer.status
            )
        if not isinstance(content, dict):
            raise self._wrong(path, attempts, f"is no JSON object ({answer.body[:80]!r})")
        return content

    def _failure(self, path: str, attempts: int, trouble: Exception, remedy: str) -> RemoteRewardError:
        tried = f"{attempts} attempt{'s' if attempts > 1 else ''}"
        text = f"reward server {self.url}{path} failed in {tried}; the last: {trouble}. {remedy}"
        return RemoteRewardError(text, self.url, attempts)

    def _port_option(self) -> str:
        port = urlsplit(self.url).port
        return "" if port is None else f" --port {port}"

    def _wrong(self, path: str, attempts: int, problem: str) -> RemoteRewardError:
        text = f"the answer of reward server {self.url}{path} {problem}. Is it `genrl serve-reward`, of this version?"
        return RemoteRewardError(text, self.url, attempts, 200)

    def _checked_weights(self, weights: Any, attempts: int) -> dict[str, float]:
        given = {} if weights is None else weights
        if not isinstance(given, dict) or not all(type(w) in (int, float) and math.isfinite(w) for w in given.values()):
            raise self._wrong("/score", attempts, f"has the weights {given!r}, which are no finite numbers by name")
        return given

    def _checked(self, scores: Any, count: int, attempts: int) -> Any:
        """[count] floats or name -> [count] floats, with the same names as before."""
        named = scores if isinstance(scores, dict) else {"": scores}
        if self._names is None and named:
            self._names = sorted(named)
        if sorted(named) != self._names:
            raise self._wrong("/score", attempts, f"has the scores {sorted(named)}, and had {self._names} before")
        result = {}
        for name, values in named.items():
            what = f"scores[{name!r}]" if name else "scores"
            if not isinstance(values, list) or len(values) != count:
                size = f"{len(values)} values" if isinstance(values, list) else type(values).__name__
                raise self._wrong("/score", attempts, f"has {size} in {what} for {count} samples")
            result[name] = [math.nan if value is None else value for value in values]
            for value in values:
                number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
                if value is not None and not number:
                    raise self._wrong("/score", attempts, f"has {value!r} in {what}, which is no finite number or null")
        return result if isinstance(scores, dict) else result[""]


# ---------------------------------------------------------------------------------------------------- the format


def encode_request(media: Tensor, prompts: Sequence[str], metadata: Sequence[dict], encoding: str = "float32") -> bytes:
    """The body of a request.

    Raises:
        ValueError: metadata that JSON does not have, such as images, tensors or NaN.
    """
    from safetensors.torch import save

    for prompt, entry in zip(prompts, metadata, strict=True):
        for key, value in entry.items():
            try:
                json.dumps({key: value}, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"metadata {key!r} of prompt {prompt!r} is {type(value).__name__}, which cannot be sent ({error}); "
                    "list the keys that the reward reads in metadata_keys."
                ) from error
    pixels = media.detach()
    pixels = (pixels.clamp(0, 1) * 255).round() if encoding == "uint8" else pixels
    pixels = pixels.to("cpu", ENCODINGS[encoding]).contiguous()
    return save({"media": pixels}, {"request": json.dumps({"prompts": list(prompts), "metadata": list(metadata)})})


def decode_request(body: bytes) -> tuple[Tensor, list[str], list[dict]]:
    """Media as float32, prompts and metadata of a request.

    Raises:
        ValueError: the body is not of the format, or lengths differ.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(body)
        length = int.from_bytes(body[:8], "little")
        request = json.loads(json.loads(body[8 : 8 + length])["__metadata__"]["request"])
        media, prompts, metadata = tensors["media"], request["prompts"], request["metadata"]
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the body is not a request of a RemoteReward ({type(error).__name__}: {error})") from error
    if media.dtype not in ENCODINGS.values() or media.dim() not in (4, 5):
        known = ", ".join(ENCODINGS)
        raise ValueError(
            f"media is {media.dtype} {tuple(media.shape)}; send [B, C, H, W] or [B, F, C, H, W] of {known}."
        )
    for name, items, kind in (("prompts", prompts, str), ("metadata", metadata, Mapping)):
        if not isinstance(items, list) or len(items) != len(media) or not all(isinstance(i, kind) for i in items):
            raise ValueError(f"{name} must be a list of {len(media)}, one {kind.__name__.lower()} for each sample.")
    return (media.float() / 255 if media.dtype == torch.uint8 else media.float()), prompts, metadata
