"""`genrl serve-reward CONFIG`: a reward as a service for `genrl.rewards.RemoteReward`.

Like `genrl.cli`, it imports only the standard library at the top.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from typing import Any

Arguments = argparse.Namespace


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `genrl serve-reward`."""
    parser.usage = "genrl serve-reward CONFIG [key=value ...] [--host ADDRESS] [--port PORT] [--device DEVICE]"
    parser.add_argument("config", nargs="?", help="YAML file with the key reward, see configs/rewards/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes, e.g. reward.batch_size=8")
    parser.add_argument("--host", help="address to listen at; 0.0.0.0 for other machines (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="0 for a free one (default: 8000)")
    parser.add_argument("--device", help="such as cuda:1 (default: the first GPU, or the CPU)")
    parser.add_argument("-h", "--help", action="store_true", help="this text, or with CONFIG all keys of that file")


def serve(options: Arguments) -> int:
    """Load the reward, say where it is served, and answer until Ctrl-C."""
    if options.config is None:
        options.parser.print_help()
        return 0 if options.help else 2
    from genrl.config import load_settings, settings_listing
    from genrl.rewards.server import RewardServer, ServeSettings

    if options.help:
        from genrl.cli import print_keys

        options.parser.print_usage()
        print_keys(options.config, settings_listing(options.config, options.overrides, ServeSettings))
        return 0
    given = [f"{key}={value}" for key in ("host", "port", "device") if (value := getattr(options, key)) is not None]
    settings = load_settings(options.config, [*options.overrides, *given], ServeSettings)
    server = RewardServer(
        settings.reward, settings.host, settings.port, settings.resolved_device(), settings.max_megabytes, _log
    )
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        server.prepare()
        facts = server.health()
        print(f"serving {facts['reward']} at {server.url} on {server.device}; Ctrl-C stops", flush=True)
        server.serve()
    except KeyboardInterrupt:
        print("stopping: requests that are being answered are finished, Ctrl-C again stops at once", flush=True)
    finally:
        server.close()
    return 0


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _log(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
