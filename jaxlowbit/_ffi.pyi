from typing import Any

MAX_SPLIT_K: int
MAX_WORKSPACE_BYTES: int

def targets() -> dict[str, dict[str, Any]]: ...
def build_info() -> dict[str, Any]: ...
def select(
    *,
    m: int,
    n: int,
    k: int,
    bits: int = ...,
    group_size: int = ...,
    batch: int = ...,
    float32_scale: bool = ...,
    zero: str = ...,
    scale_sums: bool = ...,
    gated: bool = ...,
    compute_capability: int = ...,
    num_sms: int = ...,
    shared_bytes_per_sm: int = ...,
    workspace_bytes: int = ...,
) -> dict[str, Any]: ...
