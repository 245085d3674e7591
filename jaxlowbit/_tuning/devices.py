"""Devices as the selection knows them, here or not."""

from typing import Any, NamedTuple

import jax

from .._backends import selection

# KiB of shared memory per multiprocessor, by compute capability (CUDA programming guide); 100 for
# the others that there are: 8.6, 8.8, 8.9, 12.0 and 12.1.
_SHARED_KIB = {75: 64, 80: 164, 87: 164, 90: 228, 100: 228, 103: 228, 110: 228}


class Device(NamedTuple):
    name: str
    platform: str  # as programs are compiled for it
    capability: int = 0
    num_sms: int = 0
    here: bool = True  # so that the build of this installation counts

    @property
    def facts(self) -> selection.DeviceFacts:
        shared = 1024 * _SHARED_KIB.get(self.capability, 100)
        return selection.DeviceFacts(self.name, self.capability, self.num_sms, shared)


# GPUs that need not be here, by compute capability and multiprocessors. H100 is the SXM module; the
# PCIe card has 114.
GPUS = {
    name: Device(f"NVIDIA {name}", "cuda", capability, num_sms, here=False)
    for name, capability, num_sms in (
        ("A100", 80, 108),
        ("B200", 100, 148),
        ("H100", 90, 132),
        ("H200", 90, 132),
        ("L4", 89, 58),
        ("T4", 75, 40),
    )
}


def describe(device: Any) -> Device:
    """Facts of a `jax.Device`; a GPU that does not tell its multiprocessors counts as an H200."""
    if device.platform != "gpu":
        return Device(device.device_kind, device.platform)
    num_sms = getattr(device, "core_count", GPUS["H200"].num_sms)
    return Device(device.device_kind, "cuda", selection.compute_capability(device), num_sms)


def first() -> Device:
    """The first device that JAX sees."""
    return describe(jax.devices()[0])
