"""How JAX, hypothesis and the markers are set up for every test."""

import os

import hypothesis
import jax
import pytest

# What was measured on this machine must not change what the tests see.
os.environ["JAXLOWBIT_TUNED"] = ""
# Tests start further processes on the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# A GPU would otherwise multiply float32 in TF32, outside the bound of float32.
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_num_cpu_devices", 8)

hypothesis.settings.register_profile("default", deadline=None, derandomize=True, max_examples=200)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=5000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs can be lowered for CUDA, also by a build without its kernels."""
    from jaxlowbit._backends import extension

    monkeypatch.setattr(extension, "unavailable", lambda platform: None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if jax.default_backend() != "gpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="JAX sees no CUDA device"))
