from collections.abc import Sequence
from typing import Any

KERNELS: list[str]
CALL_VERSION: int
LAYOUT_VERSION: int
PLACE_ALIGNMENT: int
MAX_SPLIT_K: int
MAX_RMS_NORM_COLUMNS: int
MAX_WORKSPACE_BYTES: int

def targets() -> dict[str, dict[str, Any]]: ...
def build_info() -> dict[str, Any]: ...
def most_sums_bytes(rows: int, columns: int) -> int: ...
def select(
    *,
    m: int,
    n: int,
    k: int,
    bits: int = ...,
    group_size: int = ...,
    batch: int = ...,
    lhs: str = ...,
    float32_scale: bool = ...,
    zero: str = ...,
    scale_sums: bool = ...,
    gated: bool = ...,
    early_start: bool = ...,
    compute_capability: int = ...,
    num_sms: int = ...,
    shared_bytes_per_sm: int = ...,
    device_name: str = ...,
    workspace_bytes: int = ...,
) -> dict[str, Any]: ...
def candidates(
    *,
    m: int,
    n: int,
    k: int,
    bits: int = ...,
    group_size: int = ...,
    batch: int = ...,
    lhs: str = ...,
    float32_scale: bool = ...,
    zero: str = ...,
    scale_sums: bool = ...,
    gated: bool = ...,
    early_start: bool = ...,
    compute_capability: int = ...,
    num_sms: int = ...,
    shared_bytes_per_sm: int = ...,
    device_name: str = ...,
    workspace_bytes: int = ...,
) -> list[tuple[str, int, int, int, int, int]]: ...
def set_tuned(
    device_name: str,
    entries: Sequence[tuple[tuple, tuple]],
    *,
    compute_capability: int,
    num_sms: int,
    shared_bytes_per_sm: int,
) -> list[str]: ...
def toolchain() -> dict[str, str]: ...
def set_nvrtc_paths(paths: Sequence[str]) -> None: ...
def compile(
    instances: Sequence[tuple[str, str]], architecture: str, *, wait: bool = ...
) -> list[dict[str, Any]]: ...
