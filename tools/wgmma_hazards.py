"""Finds accesses to operands of wgmma while the tensor cores may still use them.

    python tools/wgmma_hazards.py build/wheel/jaxlowbit/_ffi.abi3.so

A wgmma reads its operand A from registers, and adds to its accumulators, from its issue until a
`wgmma.wait_group` that covers it. Other accesses to those registers meanwhile are races, which no
compiler and no sanitizer reports. Causes are a wait for one group too few, or ptxas before CUDA
13.3, which may reuse registers of operand A too early. This tool follows every path through the
machine code of every kernel for sm_90a, and tracks the products that are still running.

Takes compiled modules, programs or cubins. Needs cuobjdump and nvdisasm, on PATH or from
NVIDIA's pip wheels. The exit status is 1 if there is a hazard, or no wgmma at all.
"""

import argparse
import functools
import itertools
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

NO_REGISTERS = range(0)
# More groups than a wait can leave running; a loop without a wait would add groups forever.
MOST_GROUPS = 16
WGMMA = 0xDF0, 0xDF1, 0xDF3  # the lowest 12 bits of its instruction: of 16 bits, int8, float8
EXECUTABLE = 4  # a flag of ELF sections
SHOWN = 20  # hazards

LINE = re.compile(
    r"^(?P<label>\.L_x_\d+):"
    r"|/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<guard>@!?U?P\w+\s+)?"
    r"(?P<opcode>[A-Z]\w*)(?P<modifiers>[.\w]*)\s*(?P<operands>[^;\n]*?)\s*;",
    re.MULTILINE,
)
REGISTER = re.compile(r"\bR(\d+)")  # not UR4
PREDICATE = re.compile(r"!?U?P[0-9T]")
JUMP = re.compile(r"BRA|BRX|JMP|JMX|WARPSYNC")
# Instructions whose first register is a source. For any other instruction, it is the result.
WITHOUT_RESULT = re.compile(r"[DFI]SETP|HSETP2|FCHK|BAR|BRX|JMX|NANOSLEEP|RET|WARPSYNC")


class Instruction(NamedTuple):
    address: int
    guard: str  # such as @!P0
    opcode: str  # such as HGMMA
    modifiers: str  # such as .64x128x16.F32.BF16
    operands: str
    targets: list[int]  # indices of possible jump targets

    def __str__(self) -> str:
        return f"{self.guard}{self.opcode}{self.modifiers} {self.operands}".strip()


class Registers(NamedTuple):
    written: range  # by a wgmma: its accumulators
    read: tuple[range, ...]


class UnderWay(NamedTuple):
    """Products that may still be running, as indices of their instructions."""

    groups: tuple[frozenset[int], ...] = ()  # committed, the oldest first
    uncommitted: frozenset[int] = frozenset()

    def issue(self, product: int, commits: bool) -> "UnderWay":
        group = self.uncommitted | {product}
        if not commits:
            return UnderWay(self.groups, group)
        groups = (*self.groups, group)
        if len(groups) > MOST_GROUPS:
            groups = (groups[0] | groups[1], *groups[2:])
        return UnderWay(groups)

    def wait(self, allowed: int) -> "UnderWay":
        return UnderWay(self.groups[-allowed:] if allowed else (), self.uncommitted)

    def products(self) -> frozenset[int]:
        return self.uncommitted.union(*self.groups)


class Kernel:
    """The machine code of one kernel, as nvdisasm prints it."""

    def __init__(self, sass: str):
        self.code = _parse(sass)
        self.registers = functools.cache(lambda index: _registers(self.code[index]))
        self.products = [i for i, instruction in enumerate(self.code) if _is_product(instruction)]
        self.products_from_registers = sum(bool(self.registers(i).read) for i in self.products)

    def hazards(self) -> dict[int, str]:
        """Returns descriptions of hazards by the address of the instruction."""
        owners = functools.cache(self._owners)
        found: dict[int, str] = {}
        pending: list[tuple[int, UnderWay]] = [(0, UnderWay())]
        seen = set(pending)
        while pending:
            index, under_way = pending.pop()
            products = under_way.products()
            if products and (hazard := self._hazard(index, *owners(products))):
                found[self.code[index].address] = f"{self.code[index]} {hazard}"
            for following in self._following(index, under_way):
                if following not in seen:
                    seen.add(following)
                    pending.append(following)
        missed = set(self.products) - {index for index, _ in seen}
        if missed:
            raise ValueError(
                f"No path was found to the wgmma at {self.code[min(missed)].address:04x}, so that "
                "nothing can be said about it: it is called, or reached by a computed jump."
            )
        return dict(sorted(found.items()))

    def _following(self, index: int, under_way: UnderWay) -> Iterator[tuple[int, UnderWay]]:
        instruction = self.code[index]
        after = under_way
        if _is_product(instruction):
            after = under_way.issue(index, commits="gsb0" in instruction.operands)
        elif (instruction.opcode, instruction.modifiers) == ("WARPGROUP", ".DEPBAR.LE"):
            after = under_way.wait(int(instruction.operands.removeprefix("gsb0,"), 16))
        for target in instruction.targets:
            yield target, after
        if index + 1 < len(self.code) and not _ends_path(instruction):
            yield index + 1, after
            if instruction.guard and after != under_way:
                yield index + 1, under_way

    def _owners(self, products: frozenset[int]) -> tuple[dict[int, int], dict[int, int]]:
        """For each register, the product with it as operand A, and the product with it as
        accumulator."""
        operands = {r: p for p in products for block in self.registers(p).read for r in block}
        accumulators = {r: p for p in products for r in self.registers(p).written}
        return operands, accumulators

    def _hazard(
        self, index: int, operands: dict[int, int], accumulators: dict[int, int]
    ) -> str | None:
        instruction, (written, read) = self.code[index], self.registers(index)
        for r in written:
            if r in operands:
                return f"writes R{r}, operand A of {self._name(operands[r])}"
            if r in accumulators:
                product = accumulators[r]
                # Products with the same accumulators run one after another.
                if not (_is_product(instruction) and self.registers(product).written == written):
                    return f"writes R{r}, an accumulator of {self._name(product)}"
        for r in itertools.chain(*read):
            if r in accumulators:
                return f"reads R{r}, an accumulator of {self._name(accumulators[r])}"
        if instruction.opcode in ("CALL", "RET"):
            return "leaves the function while products are under way"
        return None

    def _name(self, product: int) -> str:
        return f"{self.code[product]} ({self.code[product].address:04x})"


def _parse(sass: str) -> list[Instruction]:
    lines = list(LINE.finditer(sass))
    labels, count = {}, 0
    for line in lines:
        if line["label"]:
            labels[line["label"]] = count
        else:
            count += 1
    code = []
    for line in lines:
        if line["label"]:
            continue
        opcode, operands = line["opcode"], line["operands"]
        targets = []
        if JUMP.fullmatch(opcode):
            targets = [labels[label] for label in re.findall(r"\.L_x_\d+", operands)]
            if not targets and opcode != "WARPSYNC":
                raise ValueError(f"It is not known where {opcode} {operands} jumps.")
        address = int(line["address"], 16)
        if address != 16 * len(code):
            raise ValueError(f"The instruction before {address:04x} is not understood.")
        guard = line["guard"] or ""
        code.append(Instruction(address, guard, opcode, line["modifiers"], operands, targets))
    _check_joins(code, labels)
    return code


def _check_joins(code: list[Instruction], labels: dict[str, int]) -> None:
    """Checks that divergent threads, after they meet (BSYNC), continue with the next
    instruction."""
    joins = set()
    for instruction in code:
        if instruction.opcode == "BSSY":
            barrier, label = instruction.operands.split(",")
            joins.add((barrier, labels[label.strip(" `()")]))
    for index, instruction in enumerate(code):
        if instruction.opcode == "BSYNC" and (instruction.operands, index + 1) not in joins:
            raise ValueError(f"It is not known where {instruction} goes on.")


def _is_product(instruction: Instruction) -> bool:
    return instruction.opcode.endswith("GMMA")


def _ends_path(instruction: Instruction) -> bool:
    if instruction.opcode == "BRA":  # operands except the target are conditions
        return not instruction.guard and "," not in instruction.operands
    return instruction.opcode in ("EXIT", "RET", "BRX", "JMP", "JMX") and not instruction.guard


def _registers(instruction: Instruction) -> Registers:
    operands = [operand.strip() for operand in instruction.operands.split(",")]
    if _is_product(instruction):
        return _registers_of_product(instruction, operands)
    width = _width(instruction)
    written = NO_REGISTERS
    if not WITHOUT_RESULT.fullmatch(instruction.opcode):
        # Predicates may precede the result.
        first = next((i for i, o in enumerate(operands) if not PREDICATE.fullmatch(o)), 0)
        if result := REGISTER.match(operands[first]):
            written = _block(int(result[1]), width)
            del operands[first]
    read = tuple(
        _block(int(register), 2 if "[" in operand else width)
        for operand in operands
        for register in REGISTER.findall(operand)
    )
    return Registers(written, read)


def _registers_of_product(instruction: Instruction, operands: list[str]) -> Registers:
    shape = re.match(r"\.64x(\d+)x\d+(\.F16)?", instruction.modifiers)
    if not shape:
        raise ValueError(f"The shape of {instruction} is not understood.")
    width = int(shape[1]) // (4 if shape[2] else 2)
    sums, a = (REGISTER.match(operand) for operand in operands[:2])
    written = range(int(sums[1]), int(sums[1]) + width) if sums else NO_REGISTERS
    return Registers(written, (_block(int(a[1]), 4),) if a else ())


def _width(instruction: Instruction) -> int:
    """Number of registers of an operand: 4, or 2 for operands of one or two registers.

    One and two need no distinction, because operands are aligned to their size, and wgmma use four
    registers of operand A and pairs of accumulators.
    """
    modifiers = instruction.modifiers.split(".")
    if "128" in modifiers or re.fullmatch("[DHI]MMA", instruction.opcode):
        return 4
    return 4 if instruction.opcode in ("LDSM", "STSM") and "4" in modifiers else 2


def _block(first: int, width: int) -> range:
    while first % width:
        width //= 2
    return range(first, first + width)


def kernels(module: Path) -> Iterator[tuple[str, str]]:
    """Names and machine code of a module's kernels for sm_90a, except cubins without a wgmma."""
    with tempfile.TemporaryDirectory() as folder:
        _run("cuobjdump", "-arch", "sm_90a", "-xelf", "all", str(module.resolve()), cwd=folder)
        for cubin in sorted(Path(folder).iterdir()):
            if not _may_multiply(cubin.read_bytes()):
                continue
            sass = _run("nvdisasm", "-c", str(cubin), cwd=folder)
            for section in re.split(r"^//-+ \.text\.", sass, flags=re.MULTILINE)[1:]:
                name, _, sass = section.partition(" ")
                yield name, sass


def _may_multiply(cubin: bytes) -> bool:
    """Whether the code of a cubin contains a wgmma. Disassembling a cubin takes seconds."""
    sections, size, count = (
        int.from_bytes(cubin[at : at + length], "little")
        for at, length in ((0x28, 8), (0x3A, 2), (0x3C, 2))
    )
    for at in range(sections, sections + size * count, size):
        flags, _, begin, length = np.frombuffer(cubin, "<u8", 4, at + 8)
        if flags & EXECUTABLE:
            halves = np.frombuffer(cubin, "<u8", int(length) // 8, int(begin))
            if np.isin(halves[::2] & 0xFFF, WGMMA).any():
                return True
    return False


def find_tool(name: str) -> str | None:
    """One of CUDA's programs, on PATH or from NVIDIA's pip wheels."""
    wheels = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin")
    return shutil.which(name) or shutil.which(name, path=str(wheels))


def _run(name: str, *arguments: str, cwd: str) -> str:
    tool = find_tool(name)
    if tool is None:
        sys.exit(f"{name} was not found on PATH: pip install nvidia-cuda-{name}.")
    done = subprocess.run([tool, *arguments], cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{name} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def main(arguments: list[str] | None = None) -> None:
    description, *_ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=description)
    help = "a compiled module, a program or a cubin"
    parser.add_argument("modules", metavar="module", type=Path, nargs="+", help=help)
    modules: list[Path] = parser.parse_args(arguments).modules

    total = multiplying = products = from_registers = 0
    hazards: list[str] = []
    for name, sass in itertools.chain.from_iterable(map(kernels, modules)):
        total += 1
        if "GMMA" not in sass:
            continue
        try:
            kernel = Kernel(sass)
            hazards += [f"{name} {at:04x}: {what}" for at, what in kernel.hazards().items()]
        except ValueError as error:
            sys.exit(f"{name}: {error}")
        multiplying += 1
        products += len(kernel.products)
        from_registers += kernel.products_from_registers
    for hazard in hazards[:SHOWN]:
        print(hazard)
    if len(hazards) > SHOWN:
        print(f"... and {len(hazards) - SHOWN} more")
    print(
        f"{modules[0].name}{', ...' * (len(modules) > 1)}: {total} kernels for sm_90a, "
        f"{multiplying} with wgmma: "
        f"{products} products, {from_registers} with operand A from registers, "
        f"{len(hazards)} hazards"
    )
    if not products:
        print("No wgmma was found: was this compiled for 90a?", file=sys.stderr)
    sys.exit(bool(hazards) or not products)


if __name__ == "__main__":
    main()
