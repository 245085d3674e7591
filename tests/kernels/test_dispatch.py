"""Selection of CUDA kernels: a pure function, tested with descriptions of devices."""

import itertools
from typing import Any

import pytest
import shapes
from fit_costs import asked

from jaxlowbit._backends.extension import ffi


def select(**fields: Any) -> dict[str, Any]:
    return ffi.select(**asked(fields))


def candidates(**fields: Any) -> list[tuple[str, int, int, int, int, int]]:
    return ffi.candidates(**asked(fields))


H200: dict[str, Any] = {"compute_capability": 90, "num_sms": 132, "shared_bytes_per_sm": 228 * 1024}
A100: dict[str, Any] = {"compute_capability": 80, "num_sms": 108, "shared_bytes_per_sm": 164 * 1024}
SMALL: dict[str, Any] = {"compute_capability": 86, "num_sms": 20, "shared_bytes_per_sm": 100 * 1024}
DEVICES = {"H200": H200, "A100": A100, "small": SMALL}

SHAPES = list(
    itertools.product(
        [1, 2, 16, 17, 64, 65, 1000, 4096], [1, 64, 4096, 28672], [1, 64, 129, 4096, 28672]
    )
) + [(m, shape.n, shape.k) for m in (1, 32, 512) for shape in shapes.SHAPES.values()]


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("device", DEVICES)
def test_every_choice_respects_its_limits(device, bits):
    for (m, n, k), batch in itertools.product(SHAPES, [1, 8]):
        for limit in (ffi.MAX_WORKSPACE_BYTES, 1 << 16, 0):
            problem: dict[str, Any] = {"m": m, "n": n, "k": k, "bits": bits, "batch": batch}
            choice = select(**problem, **DEVICES[device], workspace_bytes=limit)
            assert choice["unsupported"] == "", problem
            block_m, split = choice["block_m"], choice["split_k"]
            assert 1 <= split <= ffi.MAX_SPLIT_K and split <= -(-k // 16), problem
            padded = batch * m * -(-n // 64) * 64
            if choice["kernel"] == "qmm_sm80":
                assert block_m in (8, 16, 32, 64), problem
                assert split == 1 or 4 * split * padded <= limit, problem
            elif choice["kernel"] == "qmm_sm90":
                assert block_m % 16 == 0 and 32 <= block_m <= 256 and split <= 8, problem
                assert m > 32 or block_m in (32, 64, 128, 256), problem
                assert split == 1 or limit > 0, problem
            else:
                assert block_m in (8, 16, 32) and split in (1, 2, 4) and block_m >= m, problem


def test_the_workspace_suffices_for_every_choice():
    """The workspace allocated without knowing the device suffices on each device."""
    for (m, n, k), device in itertools.product(SHAPES, DEVICES.values()):
        allocated = ffi.partial_sums_bytes(asked({"m": m, "n": n, "k": k})["product"])
        best = select(m=m, n=n, k=k, **device)
        assert select(m=m, n=n, k=k, **device, workspace_bytes=allocated) == best, (m, n, k)
        assert allocated <= ffi.MAX_WORKSPACE_BYTES


@pytest.mark.parametrize("device", DEVICES)
def test_choices_for_gated_pairs(device):
    """Partial sums fit the workspace of both products."""
    for (m, n, k), limit in itertools.product(SHAPES[::5], (None, 1 << 20)):
        problem: dict[str, Any] = {"m": m, "n": n, "k": k, **DEVICES[device]}
        product = asked({"m": m, "n": n, "k": k, "gated": True})["product"]
        allocated = ffi.partial_sums_bytes(product) if limit is None else limit
        choice = select(**problem, gated=True, workspace_bytes=allocated)
        assert choice["unsupported"] == ""
        sums = 4 * choice["split_k"] * m * 2 * -(-n // 64) * 64
        assert choice["kernel"] != "qmm_sm80" or choice["split_k"] == 1 or sums <= allocated


def test_choices_do_not_change_between_calls():
    """`select` caches some thousands of choices; `candidates` has no cache."""
    for _ in range(2):
        for m in range(1, 5001):
            problem: dict[str, Any] = {"m": m, "n": 128, "k": 128, **SMALL}
            choice = select(**problem)
            (kernel, block_m, split_k, *_), *_ = candidates(**problem)
            found = choice["kernel"], choice["block_m"], choice["split_k"]
            assert found == (kernel, block_m, split_k), problem


@pytest.mark.parametrize(
    ("m", "n", "k", "split"),
    [(1, 64, 8192, True), (1, 28672, 64, False), (4096, 4096, 4096, False)],
)
def test_few_tiles_split_the_sum(m, n, k, split):
    assert (select(m=m, n=n, k=k, **A100)["split_k"] > 1) == split


# Problems on both sides of each crossover between the sm_90 kernels.
@pytest.mark.parametrize(
    ("problem", "kernel"),
    [
        ({}, "qmm_sm90_stream"),
        ({"compute_capability": 80}, "qmm_sm80"),
        ({"compute_capability": 100}, "qmm_sm80"),
        ({"m": 16, "n": 4096, "k": 4096}, "qmm_sm90_stream"),
        ({"m": 32, "n": 28672}, "qmm_sm90"),
        ({"m": 33}, "qmm_sm90"),
        *(({"m": 16, "bits": bits}, "qmm_sm90_stream") for bits in (5, 6, 7, 8)),
        *(({"m": 17, "bits": bits}, "qmm_sm90") for bits in (5, 6, 7, 8)),
        ({"k": 8192 + 64}, "qmm_sm90_stream"),
        ({"k": 8192 + 32}, "qmm_sm80"),
        ({"group_size": 16}, "qmm_sm90_stream"),
        ({"group_size": -1}, "qmm_sm90_stream"),
        ({"group_size": 48}, "qmm_sm80"),
        ({"scale_accumulators": True, "float32_scale": True}, "qmm_sm80"),
        ({"m": 64}, "qmm_sm90"),
        ({"m": 64, "compute_capability": 80}, "qmm_sm80"),
        ({"m": 64, "compute_capability": 100}, "qmm_sm80"),
        ({"m": 64, "k": 8192 + 8}, "qmm_sm90"),
        ({"m": 64, "k": 8192 + 4}, "qmm_sm80"),
        ({"m": 64, "group_size": 32}, "qmm_sm90"),
        ({"m": 64, "group_size": 192}, "qmm_sm90"),
        ({"m": 64, "group_size": -1}, "qmm_sm90"),
        ({"m": 64, "group_size": 16}, "qmm_sm80"),
        ({"m": 64, "group_size": 96}, "qmm_sm80"),
        ({"m": 64, "scale_accumulators": True, "float32_scale": True}, "qmm_sm80"),
        ({"m": 4096, "float32_scale": True, "zero": "float", "bits": 8}, "qmm_sm90"),
        ({"gated": True}, "qmm_sm90_stream"),
        ({"gated": True, "m": 64}, "qmm_sm90"),
        ({"gated": True, "m": 64, "k": 8192 + 4}, "qmm_sm80"),
    ],
)
def test_the_kernel_follows_the_problem(problem: dict[str, Any], kernel):
    asked: dict[str, Any] = {"m": 1, "n": 8192, "k": 8192, **problem}
    assert select(**asked)["kernel"] == kernel


@pytest.mark.parametrize("lacks", [{"float32_scale": True}, {"zero": "float"}])
@pytest.mark.parametrize("m", [1, 64, 4096])
def test_without_a_compiler_the_kernel_that_was_built_runs(m, lacks):
    problem = {"m": m, "n": 8192, "k": 8192}
    assert select(**problem, **lacks)["kernel"] != "qmm_sm80"
    assert select(**problem, **lacks, compiles=False)["kernel"] == "qmm_sm80"
    assert select(**problem, compiles=False)["kernel"] != "qmm_sm80"


@pytest.mark.parametrize(
    ("m", "n", "k", "divided"),
    [(64, 4096, 4096, True), (512, 9472, 3584, True), (1024, 8192, 8192, False)],
)
def test_tiles_that_do_not_fill_a_wave_are_split(m, n, k, divided):
    """On 132 multiprocessors: 32 or 64 small tiles, 148 large ones, and 256 in two waves."""
    choice = select(m=m, n=n, k=k, **H200)
    assert choice["kernel"] == "qmm_sm90" and (choice["split_k"] > 1) == divided
    assert choice["split_k"] == 1 or select(m=m, n=n, k=k, **H200, workspace_bytes=0) != choice


@pytest.mark.parametrize(("m", "n", "k"), [(64, 1536, 1536), (128, 5120, 1728), (256, 4096, 2752)])
def test_small_weights_use_tiles_of_one_strip(m, n, k):
    """Gated pairs need tiles of two strips."""
    tiles = []
    for gated in (False, True):
        kernel, *_, tile, _ = candidates(m=m, n=n, k=k, gated=gated, **H200)[0]
        assert kernel == "qmm_sm90"
        tiles.append(tile)
    assert tiles[0] in (2, 6) and tiles[1] not in (2, 6)  # kTiles of cuda/kernels/sm90/plan.h


@pytest.mark.parametrize(("m", "n", "k"), [(1, 4096, 4096), (16, 6144, 4096)])
def test_products_that_start_early_share_multiprocessors(m, n, k):
    """Larger clusters leave room for CTAs of the previous and the next kernel."""
    alone, early = (select(m=m, n=n, k=k, early_start=early, **H200) for early in (False, True))
    assert alone["kernel"] == early["kernel"] == "qmm_sm90_stream"
    assert alone["split_k"] < early["split_k"]


def test_tiles_of_gated_products_have_whole_pairs():
    """18 of 150 three-strip tiles are divided; a gate and up pair takes 224 two-strip tiles."""
    assert select(m=128, n=28672, k=8192, **H200)["split_k"] == 7
    assert select(m=128, n=14336, k=8192, gated=True, **H200)["split_k"] == 1


def test_more_tokens_use_larger_tiles():
    """Up to 256 tokens per tile; few tiles split k."""
    sizes = (33, 64, 128, 256, 512, 1024, 4096)
    choices = [select(m=m, n=8192, k=8192, **H200) for m in sizes]
    tiles = [choice["block_m"] for choice in choices]
    assert tiles == sorted(tiles) and tiles[0] == 48 and tiles[-1] == 256
    assert choices[0]["split_k"] > 1 and choices[-1]["split_k"] == 1


def microseconds(kernel, **problem):
    """The cost model's time for the first candidate of the kernel."""
    found = next(c for c in candidates(**problem) if c[0] == kernel)
    choice = ffi.KERNELS.index(kernel), *found[1:]
    model = ffi.CostModel(kernel, [(ffi.question(**asked(problem)), choice)])
    return model.microseconds(model.constants)[0]


@pytest.mark.parametrize(
    ("m", "kernel", "device"),
    [
        (1, "qmm_sm80", A100),
        (1, "qmm_sm90_stream", H200),
        (16, "qmm_sm90", H200),
        (1024, "qmm_sm90", H200),
    ],
)
def test_costs_follow_the_rates_of_the_device(m, kernel, device):
    """Unknown rates default to an H200; rates within 5 percent count as equal."""
    problem = {"m": m, "n": 28672, "k": 8192, **device}
    assumed = microseconds(kernel, **problem)
    for clock_mhz, memory_gb_per_s in ((1980, 4814), (1965, 4916), (0, 4814)):
        rates = {"clock_mhz": clock_mhz, "memory_gb_per_s": memory_gb_per_s}
        assert microseconds(kernel, **problem, **rates) == assumed
    slow = microseconds(kernel, **problem, clock_mhz=990, memory_gb_per_s=2407)
    assert slow == pytest.approx(2 * assumed)
    # At a tenth of the memory bandwidth, reading weights dominates.
    starved = microseconds(kernel, **problem, clock_mhz=1980, memory_gb_per_s=481)
    read = 28672 * 8192 / 2 / 481e3
    assert starved > 0.9 * read if m < 1024 else starved == pytest.approx(assumed)


@pytest.mark.parametrize("group_size", [64, 128, -1])
@pytest.mark.parametrize("zero", ["none", "integer"])
def test_int8_lhs_has_a_tile_for_every_number_of_rows(zero, group_size):
    most = 192 if zero == "none" else 160  # rows of a tile with accumulators per group
    for m, (n, k) in itertools.product(
        (1, 33, 100, 256, 1000, 4096), ((64, 64), (200, 1008), (8192, 8192), (4096, 14336))
    ):
        choice = select(m=m, n=n, k=k, lhs="int8", zero=zero, group_size=group_size, **H200)
        assert choice["unsupported"] == "" and choice["kernel"] == "qmm_sm90"
        assert group_size == -1 or k <= group_size or choice["block_m"] <= most


@pytest.mark.parametrize("bits", [4, 8])
def test_int8_lhs_with_one_accumulator_per_channel_has_tiles_of_256_rows(bits):
    for gated in (False, True):
        problem = {"m": 256, "n": 14336, "k": 4096, "bits": bits, "gated": gated, **H200}
        assert select(lhs="int8", group_size=-1, **problem)["block_m"] == 256
        assert select(lhs="int8", group_size=128, **problem)["block_m"] <= 192
        found = candidates(group_size=-1, **problem)
        assert found and all(tile < 18 for *_, tile, _ in found)  # not available for 16 bits


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ({"compute_capability": 75}, "need compute capability 8.0, this device has 7.5"),
        ({"bits": 9}, "do not read weights of 9 bits"),
        ({"bits": 8, "codebook": "table"}, "codebooks of up to 5 bits, the format has 8"),
        ({"codebook": "e4m3"}, "no e4m3 of 4 bits"),
        ({"codebook": "e2m1", "zero": "integer"}, "codebooks nor scales of 8 bits have zeros"),
        ({"narrow_scale": "e8m0", "zero": "float"}, "codebooks nor scales of 8 bits have zeros"),
        ({"narrow_scale": "super", "group_size": 32, "m": 17}, "takes up to 16 rows of lhs"),
        ({"narrow_scale": "super", "group_size": 96}, "groups of 16, 32, 64 or 128"),
        ({"narrow_scale": "super", "group_size": 32, "k": 65}, "k must be a multiple of 64"),
        ({"narrow_scale": "super", "compute_capability": 86}, "needs compute capability 9.0"),
        ({"narrow_scale": "super", "zero": "integer"}, "those of two levels float ones alone"),
        (
            {"codebook": "e2m1", "scale_accumulators": True, "float32_scale": True},
            "with float32 lhs the kernels take integers",
        ),
        (
            {"lhs": "int8", "bits": 8, "zero": "integer"},
            "4-bit integers also with int8 scales or integer zeros",
        ),
        ({"lhs": "int8", "zero": "float"}, "4-bit integers also with int8 scales or integer zeros"),
        ({"n": 2**30 + 1}, "up to 2^30, this matrix has k=64 and n=1073741825"),
        ({"k": 2**30 + 1}, "up to 2^30, this matrix has k=1073741825 and n=64"),
    ],
)
def test_errors_give_the_reason(problem: dict[str, Any], reason):
    asked: dict[str, Any] = {"m": 1, "n": 64, "k": 64, **problem}
    choice = select(**asked)
    assert reason in choice["unsupported"]
    assert "split_k" not in choice


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("n, k, gated", [(14336, 4096, True), (4096, 14336, False)])
def test_a_device_with_a_part_of_the_experts_expects_a_part_of_the_rows(n, k, gated, devices):
    """16 tokens with two of eight experts each: about four rows an expert."""
    own = 8 // devices
    problem = {"m": 32, "n": n, "k": k, "gated": gated, "early_start": True, **H200}
    pair = 2 if gated else 1
    part = {"groups_of_rows": own, "num_weights": pair * own}
    alone = select(**problem, **part)
    assert alone["block_m"] > 8
    assert select(**problem, **part, all_experts=8)["block_m"] == 8


def test_the_number_of_experts_decides_a_ragged_choice():
    """512 rows are 4 of each of 128 experts, or all of one."""
    problem: dict[str, Any] = {"m": 512, "n": 1536, "k": 2048, "group_size": 128}
    many, one = (
        select(num_weights=experts, groups_of_rows=experts, **problem, **H200)
        for experts in (128, 1)
    )
    assert many["kernel"] == "qmm_sm90_stream" and many["block_m"] == 8
    assert one["kernel"] == "qmm_sm90" and one["block_m"] >= 128


@pytest.mark.parametrize("rows", [1, 8, 32, 64])
def test_few_rows_in_groups_have_ctas_of_their_own(rows):
    problem: dict[str, Any] = {"n": 1536, "k": 2048, "group_size": 128, "groups_of_rows": 128}
    chosen = select(m=rows, num_weights=128, **problem, **H200)
    assert chosen["block_m"] == 1 and "ListedInstance" in chosen["instance"][1]
    # Reading weights again would take longer: more rows, or few large experts.
    assert select(m=65, num_weights=128, **problem, **H200)["block_m"] == 8
    large = select(m=rows, n=28672, k=8192, num_weights=2, groups_of_rows=2, **H200)
    assert ("ListedInstance" in large["instance"][1]) == (rows == 1)
