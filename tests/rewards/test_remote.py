from __future__ import annotations

import http.client
import json
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
import yaml

from genrl.cli import main
from genrl.config import load_settings
from genrl.rewards import (
    Compose,
    Conjunction,
    Gate,
    JPEGCompressibility,
    RemoteReward,
    RemoteRewardError,
    RewardError,
    score,
)
from genrl.rewards.remote import decode_request, encode_request
from genrl.rewards.server import RewardServer, ServeSettings

CONFIGS = Path(__file__).resolve().parents[2] / "configs/rewards"
PROMPTS = ["a cat", "ein Hund, größer", "日本"]
METADATA = [{"label": 7, "nested": {"a": [1, 2.5, None]}}, {}, {"text": "x"}]


def media(batch: int = 3, video: bool = False) -> torch.Tensor:
    shape = (batch, 4, 3, 8, 8) if video else (batch, 3, 8, 8)
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


class Brightness:
    """Mean intensity; NaN for the second sample of what it gets, and what it was given is remembered."""

    name = "brightness"
    range = (0.0, 1.0)

    def __init__(self, nan: bool = False) -> None:
        self.nan, self.seen = nan, []

    def __call__(self, media, prompts, metadata):
        self.seen.append((media, prompts, metadata))
        values = media.flatten(1).mean(1)
        if self.nan:
            values[1] = torch.nan
        return values


def both(media, prompts, metadata):
    """Two scores."""
    return {"mean": media.flatten(1).mean(1), "length": torch.tensor([float(len(prompt)) for prompt in prompts])}


def quick(url: str, **settings) -> RemoteReward:
    return RemoteReward(url, **{"timeout": 5.0, "backoff": 0.01, "wait": 0.0, **settings})


def test_scores_equal_those_of_the_reward_itself():
    for reward in (Brightness(), Brightness(nan=True), both, JPEGCompressibility()):
        with RewardServer(reward, port=0) as server:
            client = quick(server.url)
            client.prepare()
            for pictures in (media(), media(video=True)):
                local, remote = (score(r, pictures, PROMPTS, METADATA) for r in (reward, client))
                assert local.keys() == remote.keys()
                assert all(torch.equal(local[name].nan_to_num(9), remote[name].nan_to_num(9)) for name in local)


def test_what_the_reward_is_given_is_what_was_sent():
    reward = Brightness()
    with RewardServer(reward, port=0) as server:
        quick(server.url)(media(), PROMPTS, METADATA)
    ((pictures, prompts, metadata),) = reward.seen
    assert torch.equal(pictures, media()) and prompts == PROMPTS and metadata == METADATA


def test_the_client_takes_name_and_range_of_the_server():
    with RewardServer(JPEGCompressibility(), port=0) as server:
        remote = quick(server.url)
        remote.prepare()
        assert remote.name == "jpeg_compressibility" and remote.range == (-torch.inf, 0.0)
        composed = Compose({"size": quick(server.url), "bright": Brightness()})
        assert set(score(composed, media(), PROMPTS)) == {"size", "bright"}


def test_what_is_trained_on_is_the_same_as_without_the_server():
    """A group's criteria and entries of weight 0 are logged only; else they would be summed up with the score."""
    group = Conjunction({"a": Brightness(), "b": Brightness()}, {"a": 0.4, "b": 0.6})
    for reward in (group, Compose({"a": Brightness(), "b": Brightness(), "c": group}, {"a": 2.0, "b": 0.0}), both):
        with RewardServer(reward, port=0) as server:
            local, remote = Compose({"it": reward}), Compose({"it": quick(server.url)})
            raw = score(remote, media(), PROMPTS, METADATA)
            assert remote.for_advantage(raw)[1] == local.for_advantage(score(local, media(), PROMPTS, METADATA))[1]
            own = Compose({"it": quick(server.url)}, {f"it/{name}": 0.5 for name in (n.split("/", 1)[1] for n in raw)})
            assert set(own.for_advantage(score(own, media(), PROMPTS, METADATA))[1].values()) == {0.5}


def test_caps_and_gates_are_not_served():
    parts = {"a": Brightness(), "b": Brightness()}
    for settings in ({"caps": {"a": 1.0}}, {"gates": {"a": Gate("b", at_least=0.5)}}):
        for reward in (Compose(parts, **settings), Compose({"inner": Compose(parts, **settings)})):
            with pytest.raises(ValueError, match=r"has caps or gates.*move them to the Compose of the run"):
                RewardServer(reward, port=0)


@pytest.mark.parametrize(("encoding", "error"), [("float32", 0.0), ("float16", 2.5e-4), ("uint8", 0.5 / 255 + 1e-7)])
def test_encodings_round_as_documented(encoding, error):
    pictures = media(video=True)
    body = encode_request(pictures, PROMPTS, METADATA, encoding)
    received, prompts, metadata = decode_request(body)
    assert (received - pictures).abs().max() <= error
    assert prompts == PROMPTS and metadata == METADATA
    assert received.dtype == torch.float32
    if encoding == "uint8":
        assert len(body) < pictures.numel() + 2000
        assert torch.equal(decode_request(encode_request(received, PROMPTS, METADATA, encoding))[0], received)


def test_batches_are_cut_to_size_and_put_together_in_order():
    reward = Brightness()
    with RewardServer(reward, port=0) as server:
        together = quick(server.url, batch_size=2)(media(5), [str(i) for i in range(5)], [{"i": i} for i in range(5)])
    assert [len(prompts) for _, prompts, _ in reward.seen] == [2, 2, 1]
    assert torch.equal(together, media(5).flatten(1).mean(1))


def test_only_the_listed_metadata_are_sent():
    reward = Brightness()
    entries = [{"label": 1, "image": object()}] * 3
    with RewardServer(reward, port=0) as server:
        quick(server.url, metadata_keys=["label", "text"])(media(), PROMPTS, entries)
        with pytest.raises(ValueError, match=r"metadata 'image' of prompt 'a cat' is object.*metadata_keys"):
            quick(server.url)(media(), PROMPTS, entries)
    assert reward.seen[0][2] == [{"label": 1}] * 3


# ---------------------------------------------------------------------------------------------------- failures


class Scripted:
    """A server that answers /score as told: one (status, body) after the other, the last one for ever."""

    def __init__(self, *answers: tuple[int, object] | Callable) -> None:
        self.answers, self.requests, self.headers = list(answers), 0, []

    def __enter__(self) -> Scripted:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(200, {"status": "ok", "reward": "toy", "range": [0, None]})

            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                outer.headers.append(dict(self.headers))
                told = outer.answers[min(outer.requests, len(outer.answers) - 1)]
                outer.requests += 1
                if callable(told):
                    told(self)
                else:
                    self.answer(*told)

            def answer(self, status, content):
                body = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments):
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()


GOOD = (200, {"scores": [0.1, None, 0.3]})
BUSY = (503, {"error": "model is reloading"})


def drop(handler):
    handler.connection.shutdown(socket.SHUT_RDWR)


def half(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"scores": [')


def test_failures_of_the_server_are_retried():
    with Scripted(BUSY, drop, half, GOOD) as server:
        values = quick(server.url, retries=3)(media(), PROMPTS, METADATA)
        assert torch.equal(values.nan_to_num(9), torch.tensor([0.1, 9.0, 0.3])) and server.requests == 4


def test_an_error_names_address_attempts_and_the_last_cause():
    with Scripted(BUSY) as server, pytest.raises(RemoteRewardError) as caught:
        quick(server.url, retries=2)(media(), PROMPTS, METADATA)
    text = str(caught.value)
    assert server.url in text and "3 attempts" in text and "status 503: model is reloading" in text
    assert (caught.value.attempts, server.requests) == (3, 3)


def test_waiting_times_double(monkeypatch):
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with Scripted(BUSY) as server, pytest.raises(RemoteRewardError):
        quick(server.url, retries=4, backoff=20.0)(media(), PROMPTS, METADATA)
    assert waits == [20.0, 40.0, 60.0, 60.0]


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429, 301])
def test_refusals_are_final(status):
    with Scripted((status, {"error": "no such label"})) as server, pytest.raises(RemoteRewardError) as caught:
        quick(server.url, retries=5)(media(), PROMPTS, METADATA)
    assert server.requests == 1
    assert caught.value.status == status and f"status {status}: no such label" in str(caught.value)


def test_a_slow_answer_times_out_and_is_asked_for_again():
    with Scripted(lambda handler: time.sleep(0.4), GOOD) as server:
        assert len(quick(server.url, timeout=0.15, retries=3, backoff=0.2)(media(), PROMPTS, METADATA)) == 3
    limit = r"timeout = 0.1 s"
    with Scripted(lambda handler: time.sleep(0.3)) as server, pytest.raises(RemoteRewardError, match=limit):
        quick(server.url, timeout=0.1, retries=0)(media(), PROMPTS, METADATA)


def test_an_answer_that_drips_is_no_answer():
    def drip(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "100")
        handler.end_headers()
        for _ in range(20):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.05)

    with Scripted(drip) as server:
        started = time.monotonic()
        with pytest.raises(RemoteRewardError, match=r"timeout = 0.2 s"):
            quick(server.url, timeout=0.2, retries=0)(media(), PROMPTS, METADATA)
        assert time.monotonic() - started < 0.6


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"scores": [0.1, 0.2]}, "2 values in scores for 3 samples"),
        ({"scores": {"a": [0.1, 0.2, 0.3, 0.4]}}, r"4 values in scores\['a'\]"),
        ({"scores": 0.5}, "float in scores"),
        ({"result": [1, 2, 3]}, "NoneType in scores"),
        ({"scores": [0.1, "high", 0.3]}, "'high'"),
        ({"scores": [0.1, True, 0.3]}, "True"),
        (b'{"scores": [0.1, Infinity, 0.3]}', "inf"),
        (b'{"scores": [0.1, NaN, 0.3]}', "nan"),
        ({"scores": {}}, "scores"),
        (b"<html>", "no JSON object"),
        ([0.1, 0.2, 0.3], "no JSON object"),
        ({"scores": {"a": [1, 2, 3]}, "weights": {"a": None}}, "no finite numbers by name"),
        ({"scores": {"a": [1, 2, 3]}, "weights": [0]}, "no finite numbers by name"),
    ],
)
def test_answers_that_are_no_scores_are_errors(content, problem):
    with Scripted((200, content)) as server, pytest.raises(RemoteRewardError, match=problem):
        quick(server.url)(media(), PROMPTS, METADATA)
    assert server.requests == 1


def test_names_may_not_change_between_requests():
    with Scripted((200, {"scores": {"a": [1, 2, 3]}}), (200, {"scores": {"b": [1, 2, 3]}})) as server:
        remote = quick(server.url)
        assert set(remote(media(), PROMPTS, METADATA)) == {"a"}
        with pytest.raises(RemoteRewardError, match=r"\['b'\], and had \['a'\]"):
            remote(media(), PROMPTS, METADATA)


def test_a_server_that_is_not_there_is_named_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(RemoteRewardError, match=rf"127.0.0.1:{port}/health failed in 1 attempt.*ConnectionRefused"):
        quick(f"http://127.0.0.1:{port}").prepare()


def test_prepare_waits_for_a_server_that_starts_late():
    server = RewardServer(Brightness(), port=0)  # has its port and does not answer yet
    remote = quick(server.url, wait=10.0, backoff=0.05)
    starter = threading.Timer(0.3, server.start)
    starter.start()
    remote.prepare()
    starter.join()
    server.close()
    assert remote.name == "brightness"


def test_a_failure_reaches_the_run_as_a_reward_error_and_never_as_a_score():
    with Scripted(BUSY) as server, pytest.raises(RewardError, match=r"RemoteRewardError.*503"):
        score(quick(server.url, retries=0), media(), PROMPTS, METADATA)


def test_headers_are_sent_and_take_keys_from_the_environment(monkeypatch):
    monkeypatch.setenv("REWARD_KEY", "s3cret")
    with Scripted(GOOD) as server:
        quick(server.url, headers={"Authorization": "Bearer $REWARD_KEY"})(media(), PROMPTS, METADATA)
    assert server.headers[0]["Authorization"] == "Bearer s3cret"


def test_a_key_that_is_not_in_the_environment_is_named(monkeypatch):
    """Else the server would be sent the name itself, and refuse it without saying why."""
    monkeypatch.delenv("REWARD_KEY", raising=False)
    with Scripted((200, {"scores": [1, 2, 3]})) as server:
        with pytest.raises(ValueError, match=r"'Authorization' takes \$REWARD_KEY, which is not set"):
            quick(server.url, headers={"Authorization": "Bearer ${REWARD_KEY}"}).prepare()
        assert server.requests == 0


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"url": "gpu-2:8000"}, "http:// or https://"),
        ({"encoding": "png"}, "encoding is 'png'; give one of float32"),
        ({"timeout": 0}, "timeout is 0"),
        ({"retries": -1}, "retries is -1"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, problem):
    with pytest.raises(ValueError, match=problem):
        RemoteReward(**{"url": "http://localhost:8000", **settings})


# ---------------------------------------------------------------------------------------------------- the server


def ask(url: str, method: str, path: str, body: bytes = b"", headers: dict | None = None) -> tuple[int, dict]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)
    connection.request(method, path, body, headers or {})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def body(**changes) -> bytes:
    return encode_request(media(), changes.get("prompts", PROMPTS), METADATA)


def test_health_says_what_is_served():
    with RewardServer(JPEGCompressibility(), port=0, max_megabytes=3) as server:
        expected = {"status": "ok", "reward": "jpeg_compressibility", "range": [None, 0.0], "max_bytes": 3_000_000}
        assert ask(server.url, "GET", "/health") == (200, expected)


def test_malformed_requests_are_refused_and_nothing_is_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    from safetensors.torch import save

    good = json.dumps({"prompts": PROMPTS, "metadata": METADATA})
    short = json.dumps({"prompts": PROMPTS[:2], "metadata": METADATA})
    bodies = [
        b"",
        b"not a tensor",
        pickle.dumps(Evil()),
        save({"media": media()}),
        save({"pictures": media()}, {"request": good}),
        save({"media": media().double()}, {"request": good}),
        save({"media": media()[0]}, {"request": good}),
        save({"media": media()}, {"request": short}),
        save({"media": media()}, {"request": json.dumps({"prompts": PROMPTS, "metadata": [1, 2, 3]})}),
        save({"media": media()}, {"request": json.dumps({"prompts": "abc", "metadata": METADATA})}),
        save({"media": media() * 255}, {"request": good}),  # not in [0, 1]
    ]
    with RewardServer(Brightness(), port=0) as server:
        for request in bodies:
            status, content = ask(server.url, "POST", "/score", request)
            assert status == 400 and content["error"], request[:40]
    assert not (tmp_path / "executed").exists()


def test_unknown_paths_methods_and_lengths():
    with RewardServer(Brightness(), port=0, max_megabytes=0.01) as server:
        assert ask(server.url, "GET", "/score")[0] == 405
        assert ask(server.url, "GET", "/other")[0] == 404
        assert ask(server.url, "POST", "/other")[0] == 404
        status, content = ask(server.url, "POST", "/score", b"x" * 20_000)
        assert status == 413 and "20000 bytes; this server takes 10000" in content["error"]
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=5)
        connection.putrequest("POST", "/score")
        connection.endheaders()
        assert connection.getresponse().status == 411


def test_the_log_has_a_line_a_batch_with_the_number_of_samples_and_the_mean_scores():
    def two(media, prompts, metadata):
        return {"a": [0.5, None, 1.0][: len(prompts)], "b": [None] * len(prompts)}

    lines = []
    with RewardServer(two, port=0, log=lines.append) as server:
        quick(server.url)(media(3), ["x"] * 3, [{}] * 3)
        quick(server.url)(media(1), ["x"], [{}])
    assert lines[0].endswith("3 samples, mean a 0.75 (1 not scored), b not scored")
    assert lines[1].endswith("1 sample, mean a 0.5, b not scored")


def test_a_server_that_is_not_there_is_named_with_the_command_that_starts_it():
    with pytest.raises(RemoteRewardError, match=r"Start it with: genrl serve-reward CONFIG --port 9$"):
        RemoteReward("http://127.0.0.1:9", wait=0).prepare()


def test_the_client_says_before_it_sends_that_a_request_is_too_large():
    with (
        RewardServer(Brightness(), port=0, max_megabytes=0.001) as server,
        pytest.raises(ValueError, match="batch_size"),
    ):
        quick(server.url)(media(), PROMPTS, METADATA)


def test_wrong_input_is_final_and_failures_are_not():
    def picky(media, prompts, metadata):
        raise {"x": ValueError("no label in the metadata"), "y": RuntimeError("out of memory")}[prompts[0]]

    lines = []
    with RewardServer(picky, port=0, log=lines.append) as server:
        for prompt, status, attempts in (("x", 422, 1), ("y", None, 3)):
            with pytest.raises(RemoteRewardError, match=r"no label|out of memory") as caught:
                quick(server.url, retries=2)(media(1), [prompt], [{}])
            assert (caught.value.status, caught.value.attempts) == (status, attempts)
    assert sum("Traceback" in line for line in lines) == 3  # of failures only


@pytest.mark.parametrize("wrong", [lambda m, p, d: [1.0], lambda m, p, d: torch.full((3,), torch.inf)])
def test_results_that_are_no_scores_are_failures_of_the_server(wrong):
    with RewardServer(wrong, port=0) as server, pytest.raises(RemoteRewardError, match=r"status 500.*returned"):
        quick(server.url, retries=0)(media(), PROMPTS, METADATA)


def test_one_batch_is_scored_at_a_time():
    class Counting:
        inside, most = 0, 0

        def __call__(self, media, prompts, metadata):
            self.inside += 1
            self.most = max(self.most, self.inside)
            time.sleep(0.03)
            self.inside -= 1
            return media.flatten(1).mean(1)

    reward, results = Counting(), []
    with RewardServer(reward, port=0) as server:
        threads = [
            threading.Thread(target=lambda: results.append(quick(server.url)(media(), PROMPTS, METADATA)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert reward.most == 1 and len(results) == 4


def test_work_for_a_client_that_has_given_up_is_not_done():
    class Slow(Brightness):
        def __call__(self, media, prompts, metadata):
            time.sleep(0.3)
            return super().__call__(media, prompts, metadata)

    reward = Slow()
    with RewardServer(reward, port=0) as server:
        impatient = quick(server.url, retries=0)
        impatient.prepare()
        impatient.timeout = 0.1
        first = threading.Thread(target=quick(server.url), args=(media(), PROMPTS, METADATA))
        first.start()
        time.sleep(0.1)
        with pytest.raises(RemoteRewardError):
            impatient(media(), PROMPTS, METADATA)
        first.join()
    assert len(reward.seen) == 1


def test_closing_waits_for_what_is_being_answered():
    class Slow:
        def __call__(self, media, prompts, metadata):
            time.sleep(0.3)
            return media.flatten(1).mean(1)

    results = []
    server = RewardServer(Slow(), port=0).start()
    client = threading.Thread(target=lambda: results.append(quick(server.url)(media(), PROMPTS, METADATA)))
    client.start()
    time.sleep(0.1)
    server.close()
    client.join()
    assert len(results) == 1


def test_a_busy_port_is_an_error_before_anything_is_loaded():
    with RewardServer(Brightness(), port=0) as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(OSError, match=rf"cannot listen at 127.0.0.1:{port} .*choose another port"):
            RewardServer(Brightness(), port=port)


def test_serve_settings_are_checked():
    with pytest.raises(ValueError, match="port is 70000"):
        ServeSettings(Brightness(), port=70000)
    with pytest.raises(ValueError, match="max_megabytes"):
        ServeSettings(Brightness(), max_megabytes=0)
    assert ServeSettings(Brightness(), device="cpu").resolved_device() == "cpu"


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configurations_build(config):
    settings = load_settings(config, ["device=cpu"], ServeSettings)
    assert callable(settings.reward) and settings.resolved_device() == "cpu"


def test_mistakes_on_the_command_line_are_told(tmp_path, capsys):
    assert main(["serve-reward"]) == 2
    assert main(["serve-reward", str(tmp_path / "none.yaml")]) == 2
    (tmp_path / "reward.yaml").write_text("reward: {class_path: genrl.rewards.JPEGCompressibility}\nports: 1\n")
    assert main(["serve-reward", str(tmp_path / "reward.yaml")]) == 2
    assert "port" in capsys.readouterr().err
    (tmp_path / "reward.yaml").write_text("reward: {class_path: genrl.rewards.JPEGCompressibility}\n")
    assert main(["serve-reward", str(tmp_path / "reward.yaml"), "--help"]) == 0
    assert "reward.quality" in capsys.readouterr().out


def test_the_command_serves_until_it_is_interrupted(tmp_path):
    config = tmp_path / "reward.yaml"
    part = {"class_path": "genrl.rewards.JPEGCompressibility", "init_args": {"quality": 80}}
    config.write_text(yaml.safe_dump({"reward": part, "port": 0, "device": "cpu"}))
    process = subprocess.Popen(
        [sys.executable, "-m", "genrl", "serve-reward", str(config), "reward.quality=90"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        line = process.stdout.readline()
        assert line.startswith("serving jpeg_compressibility at http://127.0.0.1:")
        remote = RemoteReward(line.split()[3], wait=5)
        assert torch.equal(remote(media(), PROMPTS, METADATA), JPEGCompressibility(90)(media(), PROMPTS, METADATA))
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=10)
        assert process.returncode == 0 and "stopping" in output
        assert "MB in" in errors and "Traceback" not in errors
    finally:
        process.kill()
