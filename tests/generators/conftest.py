from pathlib import Path

import pytest
from generator_members import PROMPTS, TINY, VARIANTS


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(params=VARIANTS)
def variant(request) -> str:
    return request.param


@pytest.fixture
def make(variant, cache):
    """Build the prepared tiny generator of this variant."""
    kind, arguments = VARIANTS[variant]

    def build(**more):
        generator = kind(**{**TINY, **arguments, "cache_dir": cache, **more})
        generator.prepare("cpu", progress=False)
        return generator

    return build


@pytest.fixture
def prompts(variant) -> list[str]:
    return PROMPTS[variant.split("-")[0]]
