"""Devices for the selection, installed here or not."""

import re
from typing import Any, NamedTuple

import jax

from .._backends import selection
from .._backends.target import compute_capability

# KiB of shared memory per multiprocessor, by compute capability (CUDA programming guide); 100 for
# the other existing ones: 8.6, 8.8, 8.9, 12.0 and 12.1.
_SHARED_KIB = {75: 64, 80: 164, 87: 164, 90: 228, 100: 228, 103: 228, 110: 228}


class Device(NamedTuple):
    name: str
    platform: str  # as programs are compiled for it
    capability: int = 0
    num_sms: int = 0
    clock_mhz: int = 0
    memory_gb_per_s: int = 0
    here: bool = True  # if true, the build of this installation is checked

    @property
    def facts(self) -> selection.DeviceFacts:
        shared = 1024 * _SHARED_KIB.get(self.capability, 100)
        rates = self.clock_mhz, self.memory_gb_per_s
        return selection.DeviceFacts(self.name, self.capability, self.num_sms, shared, *rates)


# GPUs that need not be installed here: compute capability, multiprocessors, maximum clock in MHz
# and memory GB/s. A100 and H100 are the SXM modules with 80 GB; the PCIe card of H100 has 114
# multiprocessors.
GPUS = {
    name: Device(f"NVIDIA {name}", "cuda", *facts, here=False)
    for name, *facts in (
        ("A100", 80, 108, 1410, 2039),
        ("B200", 100, 148, 1965, 8183),
        ("H100", 90, 132, 1980, 3352),
        ("H200", 90, 132, 1980, 4814),
        ("L4", 89, 58, 2040, 300),
        ("T4", 75, 40, 1590, 320),
    )
}


def describe(device: Any) -> Device:
    """Properties of a `jax.Device`; a GPU with an unknown number of multiprocessors is an H200."""
    if device.platform != "gpu":
        return Device(device.device_kind, device.platform)
    num_sms = getattr(device, "core_count", GPUS["H200"].num_sms)
    facts = compute_capability(device), num_sms
    for known in GPUS.values():
        same = re.match(rf"{known.name}\b", device.device_kind)
        if same and (known.capability, known.num_sms) == facts:
            return known._replace(name=device.device_kind, here=True)
    return Device(device.device_kind, "cuda", *facts)


def first() -> Device:
    """The first device that JAX sees."""
    return describe(jax.devices()[0])
