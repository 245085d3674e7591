from collections.abc import Sequence
from typing import Any, Required, TypedDict, Unpack

KERNELS: list[str]
KERNEL_BITS: tuple[int, ...]
COMPILED_BITS: tuple[int, ...]
SCHEMA: int
PRODUCT_FIELDS: tuple[str, ...]
STEP_FIELDS: tuple[str, ...]
MAX_TABLE_BITS: int
LAYOUT_VERSION: int
PLACE_ALIGNMENT: int
MAX_SPLIT_K: int
MAX_RMS_NORM_COLUMNS: int
MAX_ATTEND_HEAD_SIZE: int
MAX_ATTEND_SHARED: int
MAX_CPU_ATTEND_HEAD_SIZE: int
MAX_EXCHANGE_ROWS: int
MAX_WORKSPACE_BYTES: int

def targets() -> dict[str, dict[str, Any]]: ...
def build_info() -> dict[str, Any]: ...

# With CUDA kernels only.
def toolchain() -> dict[str, str]: ...
def set_nvrtc_paths(paths: Sequence[str]) -> None: ...
def instances(bits: int) -> list[tuple[str, str, bool, str, str, str, str]]: ...
def architecture(compute_capability: int) -> str: ...
def loaded() -> dict[str, int]: ...
def can_exchange(devices: Sequence[int]) -> bool: ...
def take_exchange_failure() -> str: ...
def execute_count() -> int: ...
def compile(
    instances: Sequence[tuple[str, str]], architecture: str, *, wait: bool = True
) -> list[dict[str, Any]]: ...

# With any build.
def product(**fields: int | bool | str) -> list[int]: ...
def step(**fields: int | bool | str) -> list[int]: ...
def unsupported(product: Sequence[int], compute_capability: int, kernel: str = "") -> str: ...
def min_rows_for_8bit(product: Sequence[int]) -> int: ...
def codebook(numbers: Sequence[float]) -> str: ...
def max_partial_sums_bytes(rows: int, columns: int) -> int: ...

# The keyword arguments that describe a product, a device and a build.
class _Asked(TypedDict, total=False):
    m: Required[int]
    n: Required[int]
    k: Required[int]
    bits: int
    codebook: str
    group_size: int
    batch: int
    lhs: str
    float32_scale: bool
    narrow_scale: str
    zero: str
    scale_accumulators: bool
    accumulate_float16: bool
    transposed: bool
    gated: bool
    early_start: bool
    aligned: bool
    compute_capability: int
    num_sms: int
    shared_bytes_per_sm: int
    clock_mhz: int
    memory_gb_per_s: int
    clusters: Sequence[Sequence[int]]
    compiles: bool
    device_name: str
    workspace_bytes: int

def select(**asked: Unpack[_Asked]) -> dict[str, Any]: ...
def candidates(**asked: Unpack[_Asked]) -> list[tuple[str, int, int, int, int, int]]: ...
def question(**asked: Unpack[_Asked]) -> Question: ...

class Question: ...

class CostModel:
    def __init__(
        self,
        kernel: str,
        choices: Sequence[tuple[Question, Sequence[int]]],
    ) -> None: ...
    @property
    def constants(self) -> list[float]: ...
    def microseconds(self, constants: Sequence[float]) -> list[float]: ...

def set_tuned(
    device_name: str,
    entries: Sequence[
        tuple[
            tuple[int, int, int, int, int, str, bool, str],
            tuple[str, int, int, int, int, int],
            int,
        ]
    ],
    *,
    compute_capability: int,
    num_sms: int,
    shared_bytes_per_sm: int,
) -> list[str]: ...
