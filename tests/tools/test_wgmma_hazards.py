"""tools/wgmma_hazards.py on correct and deliberately incorrect machine code."""

import subprocess

import pytest
import wgmma_hazards

PRODUCT = "HGMMA.64x8x16.F32.BF16 R24, R28, gdesc[UR4], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, "


def kernel(*lines: str) -> wgmma_hazards.Kernel:
    """A kernel from lines of nvdisasm."""
    printed, count = [], 0
    for line in lines:
        if line.startswith(".L"):
            printed.append(line)
        else:
            printed.append(f"        /*{16 * count:04x}*/    {line} ;")
            count += 1
    return wgmma_hazards.Kernel("\n".join(printed))


@pytest.mark.parametrize(
    "instruction",
    [
        "IADD3 R28, P1, R18, 0x4, RZ",
        "@!P1 MOV R31, R2",
        "LDG.E.64 R30, desc[UR4][R4.64]",
        "LDS.128 R28, [R4+UR5]",
        "LDSM.16.M88.4 R28, [R8]",
        "HMMA.16816.F32.BF16 R28, R4.reuse, R8, R12",
        "IMAD.WIDE.U32 R30, R3, 0x10, R4",
        "SHFL.IDX PT, R29, R3, RZ, 0x1f",
        "LOP3.LUT P0, R29, R4, 0x1f, RZ, 0xc0, !PT",
        "CS2R R26, SRZ",
        "FADD R2, R3, R24.reuse",
        "STG.E.128 desc[UR4][R2.64], R24",
        "STS [R27+0x10], R2",
        "HGMMA.64x8x16.F32.BF16 R32, R24, gdesc[UR4], R32, gsb0",
        "HGMMA.64x8x16.F32.BF16 R28, gdesc[UR8], R28, gsb0",
        "HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], R24, gsb0",
        "CALL.REL.NOINC `($__internal_0_$__cuda_sm20_div_s64)",
    ],
)
def test_registers_in_flight_are_not_touched(instruction):
    (hazard,) = kernel(PRODUCT, instruction, WAIT + "0x0", "EXIT").hazards().items()
    assert hazard[0] == 16 and hazard[1].startswith(instruction)
    assert not kernel(PRODUCT, WAIT + "0x0", instruction, "EXIT").hazards()


@pytest.mark.parametrize(
    "instruction",
    [
        "IADD3 R32, R28, R29, RZ",
        "STS.128 [R2], R28",
        "ISETP.NE.AND P0, PT, R28, RZ, PT",
        "UMOV UR28, 0x1",
        "R2UR UR24, R28",
        "LDS.128 R32, [R28]",
        "HGMMA.64x8x16.F32.BF16 R24, R32, gdesc[UR4], R24, gsb0",
        "HGMMA.64x8x16.F32.BF16 R32, R28, gdesc[UR4], RZ, !UPT, gsb0",
    ],
)
def test_operands_may_be_read_and_accumulators_be_added_to(instruction):
    assert not kernel(PRODUCT, instruction, WAIT + "0x0", "EXIT").hazards()


@pytest.mark.parametrize(
    ("product", "last"),
    [
        ("HGMMA.64x256x16.F32 R24, gdesc[UR4], R24, gsb0", 151),
        ("HGMMA.64x64x16.F16 R24, gdesc[UR4], R24, gsb0", 39),
        ("QGMMA.64x16x32.F32.E4M3.E5M2 R24, gdesc[UR4], R24, gsb0", 31),
        ("IGMMA.64x8x32.S8.S8 R24, gdesc[UR4], R24, gsb0", 27),
    ],
)
def test_accumulators_are_counted(product, last):
    assert kernel(product, f"MOV R{last}, R2", "EXIT").hazards()
    assert not kernel(product, f"MOV R{last + 1}, R2", "EXIT").hazards()


def test_accumulators_in_pairs():
    product = "HGMMA.64x8x16.F16 R46, gdesc[UR4], R46, gsb0"
    assert kernel(product, "LDS.128 R44, [R2]", "EXIT").hazards()
    assert not kernel(product, "LDS.64 R44, [R2]", "EXIT").hazards()


@pytest.mark.parametrize("under_way", [0, 1, 2, 3])
def test_a_loop_with_two_sets_of_registers(under_way):
    wait = WAIT + hex(under_way)
    hazards = kernel(
        ".L_x_0:",
        "LDS.128 R28, [R2]",
        "WARPGROUP.ARRIVE",
        "HGMMA.64x8x16.F32.BF16 R24, R28, gdesc[UR4], R24, gsb0",
        wait,
        "LDS.128 R32, [R2+0x10]",
        "WARPGROUP.ARRIVE",
        "HGMMA.64x8x16.F32.BF16 R24, R32, gdesc[UR4], R24, gsb0",
        wait,
        "@P0 BRA `(.L_x_0)",
        WAIT + "0x0",
        "STG.E.128 desc[UR4][R2.64], R24",
        "EXIT",
    ).hazards()
    assert list(hazards) == ([] if under_way <= 1 else [0x00, 0x40])


def test_a_group_is_committed_by_its_last_product():
    open_product = PRODUCT.removesuffix(", gsb0")
    assert kernel(open_product, WAIT + "0x0", "MOV R28, R2", "EXIT").hazards()
    assert not kernel(open_product, PRODUCT, WAIT + "0x0", "MOV R28, R2", "EXIT").hazards()


@pytest.mark.parametrize("jump", ["@P0 BRA `(.L_x_0)", "BRA.U.ANY UP0, `(.L_x_0)"])
def test_every_path_waits(jump):
    around_the_wait = [PRODUCT, jump, WAIT + "0x0", ".L_x_0:", "MOV R28, R2", "EXIT"]
    assert list(kernel(*around_the_wait).hazards()) == [0x30]
    other_way = [PRODUCT, jump, "EXIT", ".L_x_0:", WAIT + "0x0", "MOV R28, R2", "EXIT"]
    assert not kernel(*other_way).hazards()
    assert kernel(PRODUCT, "@P0 " + WAIT + "0x0", "MOV R28, R2", "EXIT").hazards()


def test_a_loop_that_never_waits():
    assert kernel(".L_x_0:", "MOV R28, R2", PRODUCT, "BRA `(.L_x_0)").hazards()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["EXIT", PRODUCT], "No path was found to the wgmma at 0010"),
        ([PRODUCT, "BRX R2 -0x1e0"], "not known where BRX R2 -0x1e0 jumps"),
        (["BSSY B0, `(.L_x_0)", "BSYNC B0", PRODUCT, ".L_x_0:"], "not known where BSYNC B0 goes"),
        ([PRODUCT, "?", "EXIT"], "before 0020 is not understood"),
        (["HGMMA.SP.64x8x32.F32 R24, R28, gdesc[UR4], R24, R2, 0x0, gsb0"], "shape of HGMMA.SP"),
    ],
)
def test_untraceable_code_is_an_error(lines, message):
    with pytest.raises(ValueError, match=message):
        kernel(*lines).hazards()


def test_a_table_of_jumps_is_followed():
    jump = 'BRX R2 -0x1e0                  (*"BRANCH_TARGETS .L_x_0,.L_x_1"*)'
    code = [PRODUCT, jump, ".L_x_0:", "MOV R28, R2", "EXIT", ".L_x_1:", "MOV R24, R2", "EXIT"]
    assert list(kernel(*code).hazards()) == [0x20, 0x40]


SOURCE = """
__global__ void Multiply(const uint4* lhs, float4* out, unsigned long long rhs, int k) {
  float d[4] = {};
#pragma unroll 1
  for (int i = 0; i < k; i += 256) {
#pragma unroll
    for (int set = 0; set < 2; ++set) {
      const uint4 a = lhs[i + set * 128 + threadIdx.x];
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
          "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(rhs));
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(UNDER_WAY) : "memory");
    }
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  out[threadIdx.x] = make_float4(d[0], d[1], d[2], d[3]);
}
"""


@pytest.mark.parametrize(("under_way", "status"), [(1, 0), (2, 1)])
def test_a_compiled_kernel(under_way, status, tmp_path, capsys):
    """The compiler accepts a wait for one group too few without a warning."""
    tools = {name: wgmma_hazards.find_tool(name) for name in ("nvcc", "cuobjdump", "nvdisasm")}
    if missing := [name for name, path in tools.items() if path is None]:
        pytest.skip(f"needs {' and '.join(missing)}, on PATH or from NVIDIA's wheels")
    source, cubin = tmp_path / "multiply.cu", tmp_path / "multiply.cubin"
    source.write_text(SOURCE)
    options = ["-arch=sm_90a", "-cubin", f"-DUNDER_WAY={under_way}", "-o", str(cubin), str(source)]
    compiled = subprocess.run([str(tools["nvcc"]), *options], capture_output=True, text=True)
    assert (compiled.returncode, compiled.stderr) == (0, "")

    with pytest.raises(SystemExit) as exited:
        wgmma_hazards.main([str(cubin)])
    printed = capsys.readouterr().out
    assert exited.value.code == status, printed
    assert "1 kernels for sm_90a, 1 with wgmma: 2 products, 2 with operand A from" in printed
    assert ("writes R" in printed) == bool(status)


def test_a_module_without_wgmma_fails(monkeypatch, capsys):
    monkeypatch.setattr(
        wgmma_hazards, "kernels", lambda module: iter([("Other", "/*0000*/ EXIT ;")])
    )
    with pytest.raises(SystemExit) as exited:
        wgmma_hazards.main(["module.so"])
    assert exited.value.code == 1
    assert "1 kernels for sm_90a, 0 with wgmma" in capsys.readouterr().out
