"""The platform and the GPUs that a program is lowered for."""

import dataclasses
import re
from typing import Any

import jax

from .._core.activations import EXACT
from .._core.format import Format
from . import call, extension
from .extension import ffi


@dataclasses.dataclass(frozen=True)
class Target:
    """A platform, and the devices there.

    - `platform`: `"cpu"`, `"cuda"`, `"tpu"`, or None for any other one.
    - `capabilities`: the compute capabilities of its GPUs; empty if they are not known, as in an
      exported program, whose custom calls raise when they run on a GPU without kernels.
    - `exported`: whether the program may run on another machine.
    """

    platform: str | None
    capabilities: frozenset[int] = frozenset()
    exported: bool = False

    @classmethod
    def of(cls, context: Any, platform: str | None) -> "Target":
        """The target of the module that JAX lowers in `context`."""
        exported = context.lowering_parameters.for_export
        backend = None if platform != "cuda" or exported else context.backend
        devices = [] if backend is None else backend.local_devices()
        gpus = [device for device in devices if device.platform == "gpu"]
        return cls(platform, frozenset(map(compute_capability, gpus)), exported)

    @property
    def unfit(self) -> str | None:
        """The reason why CUDA kernels of this build do not run on one of the GPUs, or None."""
        return next(filter(None, map(unfit, sorted(self.capabilities))), None)

    def is_only(self, capability: int) -> bool:
        """Whether all GPUs are known to have this compute capability, and kernels run on them."""
        return self.capabilities == {capability} and self.unfit is None


def local_gpus() -> Target:
    """The GPUs that JAX sees in this process."""
    try:
        gpus = jax.local_devices(backend="cuda")
    except RuntimeError:  # JAX has no such backend here
        gpus = []
    return Target("cuda", frozenset(map(compute_capability, gpus)))


def compute_capability(device: Any) -> int:
    """The compute capability of a `jax.Device`, 90 for 9.0."""
    major, minor = map(int, device.compute_capability.split("."))
    return 10 * major + minor


def too_old(capability: int) -> str | None:
    """Returns None if there are CUDA kernels for this compute capability, else the reason."""
    return ffi.unsupported(call.record(Format(4), EXACT, EXACT), capability) or None


def unfit(capability: int) -> str | None:
    """Returns None if CUDA kernels of this build run on such GPUs, else the reason."""
    if reason := too_old(capability):
        return reason
    built = extension.BUILD["cuda_architectures"].split()
    if not built or any(_runs_on(capability, architecture) for architecture in built):
        return None
    return (
        f"this build has kernels for {' '.join(built)}, of which none runs on compute capability "
        f"{capability // 10}.{capability % 10}; build jaxlowbit on that machine"
    )


def _runs_on(capability: int, architecture: str) -> bool:
    """Whether code for a CMake architecture, such as 90a-real, runs on a GPU."""
    found = re.fullmatch(r"(\d+)([af]?)(-real|-virtual)?", architecture)
    if found is None:
        return True
    built, feature, kind = int(found[1]), found[2], found[3]
    if feature == "a":
        return capability == built
    if kind != "-real" and not feature:  # includes PTX, which later GPUs compile
        return capability >= built
    return capability // 10 == built // 10 and capability >= built
