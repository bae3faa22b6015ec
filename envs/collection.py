"""Files of demonstrations by scripted experts: `collect`, its configuration, and the part that trainings name."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import genrl
from genrl.envs.data import Demonstrations, Episode, open_demonstrations, write_robomimic
from genrl.envs.demonstrate import Demonstrating, attempts, start_facts
from genrl.envs.experts import ExpertError
from genrl.envs.settings import EnvSettings
from genrl.progress import progress_bar

FILE = "demonstrations.hdf5"


@dataclass(frozen=True)
class CollectSettings:
    """A file of demonstrations (`genrl collect CONFIG`).

    Args:
        env: the task, with the observations that the file shall hold.
        out: the HDF5 file to write.
        expert: ``"auto"``, the scripted expert of the environment, or the import path of your own.
        episodes: demonstrations in the file.
        seed: attempt i starts from ``reset(seed=seed + i)``. Evaluations start at 50,000 and 100,000: stay below.
        noise: standard deviation of what is added to executed actions, in units of half the action range.
        noise_label: the action that is stored: ``"clean"``, what the expert wanted, or ``"executed"``.
        keep_failures: store failed attempts too, marked (filter keys ``success`` and ``failure``), instead of trying
            further seeds until `episodes` have succeeded.
        after_success: steps recorded beyond the success.
        workers: processes; the file does not depend on it.
    """

    env: EnvSettings
    out: str = FILE
    expert: str = "auto"
    episodes: int = 50
    seed: int = 0
    noise: float = 0.0
    noise_label: Literal["clean", "executed"] = "clean"
    keep_failures: bool = False
    after_success: int = 10
    workers: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "env", EnvSettings.of(self.env))
        for name in ("episodes", "workers"):
            if getattr(self, name) < 1:
                raise ExpertError(f"{name} = {getattr(self, name)} is too small; the least is 1")
        if self.seed < 0:
            raise ExpertError(f"seed = {self.seed} must not be negative")
        self.demonstrating()  # checks the rest

    def demonstrating(self) -> Demonstrating:
        """How each attempt is made."""
        return Demonstrating(self.env, self.expert, self.noise, self.noise_label, self.after_success)

    def run(self, progress: bool = False) -> Path:
        """Collect, and write the file.

        Raises:
            ExpertError: no expert, one that fails, or too few successes.
        """
        path = Path(self.out)
        if path.suffix not in (".hdf5", ".h5"):
            raise ExpertError(f"out = {self.out!r} must end in .hdf5 or .h5")
        path.parent.mkdir(parents=True, exist_ok=True)  # not after all episodes
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise ExpertError(f"out = {self.out!r} cannot be written: it is a folder, or its folder is read-only")
        kept, failed = self._attempts(progress)
        with contextlib.closing(self.env.make()) as env:
            facts = start_facts(env)
        masks = {}
        if self.keep_failures:
            masks = {
                key: [episode.name for episode in kept if bool(episode.success) is wanted]
                for key, wanted in (("success", True), ("failure", False))
            }
        meta = {
            "env": self.env.to_dict(),
            "expert": self.expert,
            "noise": self.noise,
            "noise_label": self.noise_label,
            "after_success": self.after_success,
            "seeds": [episode.seed for episode in kept],
            "failed_seeds": failed,
            "genrl": genrl.__version__,
            **facts,
        }
        return write_robomimic(
            path, Demonstrations.of(kept, meta), {key: names for key, names in masks.items() if names}
        )

    def _attempts(self, progress: bool) -> tuple[list[Episode], list[int]]:
        most = self.episodes if self.keep_failures else 20 + 5 * self.episodes
        kept: list[Episode] = []
        failed: list[int] = []
        tried = attempts(self.demonstrating(), range(self.seed, self.seed + most), self.workers)
        with contextlib.closing(tried), progress_bar(f"collecting {self.env.id}", self.episodes, progress) as advance:  # type: ignore[type-var]
            for episode in tried:
                if episode.success is False:
                    failed.append(int(episode.seed or 0))
                if episode.success is not False or self.keep_failures:
                    kept.append(episode)
                    advance()
                if len(kept) == self.episodes:
                    return kept, failed
        raise ExpertError(
            f"only {len(kept)} of {most} attempts of the expert succeeded in {self.env.id} (noise {self.noise:g}, "
            f"success rule {self.env.success or 'of the family'}); {self.episodes} are wanted. Lower the noise, raise "
            "env.max_steps, ask for fewer episodes, or set keep_failures"
        )


def collect(
    env: str | Mapping[str, Any] | EnvSettings,
    expert: str = "auto",
    episodes: int = 50,
    seed: int = 0,
    noise: float = 0.0,
    keep_failures: bool = False,
    after_success: int = 10,
    path: str | os.PathLike[str] = FILE,
    *,
    noise_label: Literal["clean", "executed"] = "clean",
    workers: int = 1,
    progress: bool = False,
) -> Path:
    """Write demonstrations of a scripted expert to a file in robomimic's layout.

    The file appears complete or not at all. It holds ``env_args`` and the environment's settings, the seed of every
    demonstration and those of failed attempts, and the versions of the simulator.

    Args:
        env: id or settings. path: the file, ``.hdf5``. progress: show a progress bar on stderr. For the others see
            `CollectSettings`.

    Returns:
        `path`.

    Raises:
        ExpertError: no expert, one that fails, too few successes, or numbers out of range.

    Example:
        >>> collect("metaworld/reach-v3", episodes=10, noise=0.1, path="reach.hdf5")  # doctest: +SKIP
    """
    settings = CollectSettings(
        env=EnvSettings.of(env),
        out=str(path),
        expert=expert,
        episodes=episodes,
        seed=seed,
        noise=noise,
        noise_label=noise_label,
        keep_failures=keep_failures,
        after_success=after_success,
        workers=workers,
    )
    return settings.run(progress)


@dataclass(frozen=True)
class ScriptedDemonstrations:
    """Demonstrations that are collected when they are needed, and kept in the cache (a `data` part of configurations).

    Args:
        env: the task; None takes the one in which the run evaluates.
        validation_fraction: share of the episodes that is held out of training, to measure the loss on.
        cache_dir: the cache's folder; None takes ``$GENRL_CACHE``, else ``~/.cache/genrl``. For the others see
            `CollectSettings`.
    """

    env: EnvSettings | None = None
    episodes: int = 50
    seed: int = 0
    noise: float = 0.0
    after_success: int = 10
    expert: str = "auto"
    noise_label: Literal["clean", "executed"] = "clean"
    keep_failures: bool = False
    workers: int = 1
    validation_fraction: float = 0.0
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        if self.env is not None:
            object.__setattr__(self, "env", EnvSettings.of(self.env))
            self._settings("unused.hdf5")  # checks the rest

    def bound_to(self, env: EnvSettings | None) -> ScriptedDemonstrations:
        """The same with the environment of a run where none of its own is set."""
        return self if self.env is not None or env is None else replace(self, env=env)

    def _settings(self, out: str) -> CollectSettings:
        return CollectSettings(
            env=self._env(),
            out=out,
            expert=self.expert,
            episodes=self.episodes,
            seed=self.seed,
            noise=self.noise,
            noise_label=self.noise_label,
            keep_failures=self.keep_failures,
            after_success=self.after_success,
            workers=self.workers,
        )

    def _env(self) -> EnvSettings:
        if self.env is None:
            raise ExpertError("data.env is not set and the run has no env; name the task whose expert demonstrates")
        return self.env

    def load(self, progress: bool = True) -> Demonstrations:
        """The demonstrations, collected now if no equal ones are in the cache.

        Raises:
            ExpertError: see `collect`.
        """
        from genrl.generators.cache import cached_folder

        with contextlib.closing(self._env().make()) as env:
            versions = env.versions()
        key = {
            "env": self._env().to_dict(),
            "episodes": self.episodes,
            "seed": self.seed,
            "noise": self.noise,
            "noise_label": self.noise_label,
            "after_success": self.after_success,
            "expert": self.expert,
            "keep_failures": self.keep_failures,
            "versions": versions,
            "genrl": genrl.__version__,
            "code": _code_of(self.expert),
        }
        name = f"demonstrations-{self._env().id.replace('/', '-').replace(':', '-')}"
        folder = cached_folder(name, key, lambda made: self._make(made, progress), self.cache_dir)
        return open_demonstrations(folder / FILE)

    def _make(self, folder: Path, progress: bool) -> None:
        self._settings(str(folder / FILE)).run(progress)


def _code_of(expert: str) -> str:
    """Fingerprint of the code that decides about demonstrations: experts change between releases too."""
    import genrl.envs.experts as experts

    files = sorted(Path(experts.__file__).parent.glob("*.py")) + [Path(inspect.getfile(Demonstrating))]
    if expert != "auto":
        from genrl.envs.experts import own_source

        source = own_source(expert)
        files += [] if source is None else [source]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
