"""Memory traffic of a compiled program: the bytes that its kernels read and write.

The text of an optimized HLO module names every kernel with the shapes that go in and out. On a GPU elementwise kernels
take the time of that traffic; what a compiler fuses, and what it does not, is all in here, on a machine without a GPU.
For a TPU it also says how many cycles the compiler expects of each kernel, and which arrays stay in the memory on the
chip, whose traffic does not count.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4}
_BYTES |= {"s64": 8, "u64": 8, "f64": 8, "c64": 8}
_BYTES |= {"f8e4m3fn": 1, "f8e5m2": 1, "f8e8m0fnu": 1}
_SHAPE = re.compile(rf"\b({'|'.join(_BYTES)})\[([0-9,]*)\]({{[^}}]*}})?")
_ON_CHIP = "S(1)"  # Memory space of a layout: the vector memory of a TPU.
_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
_NO_KERNEL = {"after-all", "bitcast", "constant", "get-tuple-element", "iota", "opt-barrier", "parameter", "tuple"}
_VIEWS = {"bitcast", "reshape"}


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    rest: str
    root: bool

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.rest.split("), ")[0])

    def attribute(self, pattern: str) -> str | None:
        """What an attribute says."""
        found = re.search(pattern, self.rest)
        return found and found.group(1)


class Kernel(NamedTuple):
    """A kernel: how often it runs in a step, and the bytes that it moves each time."""

    instruction: Instruction
    times: int
    bytes: int

    @property
    def cycles(self) -> int:
        """Cycles that XLA:TPU expects it to take each time; 0 where the text says nothing of it."""
        return int(self.instruction.attribute(r'"estimated_cycles":"(\d+)"') or 0)


def kernels(text: str) -> list[Kernel]:
    """Returns the kernels of an optimized module.

    Loops count as often as they are known to go round, of branches the one that moves most. A kernel that slices an
    operand, or updates a slice of it, moves the slice.

    Args:
        text: `compiled.as_text()`.

    Returns:
        The kernels, in no particular order.
    """
    computations, entry = _parse(text)
    return list(_kernels(computations, entry, 1))


def traffic(text: str) -> int:
    """Returns the bytes that all kernels of a module read and write."""
    return sum(kernel.times * kernel.bytes for kernel in kernels(text))


def cycles(text: str) -> int:
    """Returns the cycles that XLA:TPU expects all kernels of a module to take, one after the other."""
    return sum(kernel.times * kernel.cycles for kernel in kernels(text))


def _parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = computations.setdefault(match.group(2), [])
            entry = match.group(2) if match.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (match := _INSTRUCTION.match(line)):
            root, *fields = match.groups()
            current.append(Instruction(*fields, root=bool(root)))
    return {name: _synchronous(lines) for name, lines in computations.items()}, entry


def _synchronous(lines: list[Instruction]) -> list[Instruction]:
    """The instructions with each that runs beside others, a start and a done, as one."""
    done = {line.operands[0]: line.shape for line in lines if line.opcode.endswith("-done")}
    found = []
    for line in lines:
        if line.name in done and line.opcode.endswith("-start"):
            # The shape of a start holds its operands, and room for its own needs.
            line = line._replace(opcode=line.opcode.removesuffix("-start"), shape=done[line.name])
        found.append(line)
    return found


def _kernels(computations: dict[str, list[Instruction]], name: str, times: int) -> Iterator[Kernel]:
    shapes = {line.name: line.shape for line in computations[name]}
    for line in computations[name]:
        if line.opcode == "while":
            count = line.attribute(r'"known_trip_count":\{"n":"(\d+)"')
            yield from _kernels(computations, line.attribute(r"body=%([\w.\-]+)") or "", times * int(count or 1))
        elif line.opcode == "conditional":
            branches = re.findall(r"%([\w.\-]+)", line.attribute(r"branch_computations=\{([^}]*)\}") or "")
            branches = branches or re.findall(r"(?:true|false)_computation=%([\w.\-]+)", line.rest)
            yield from max((list(_kernels(computations, branch, times)) for branch in branches), key=_total)
        elif line.opcode in ("call", "async"):
            yield from _kernels(computations, line.attribute(r"(?:to_apply|calls)=%([\w.\-]+)") or "", times)
        elif line.opcode not in _NO_KERNEL and not line.opcode.endswith("-done"):
            yield Kernel(line, times, _moved(computations, shapes, line))


def _total(found: list[Kernel]) -> int:
    return sum(kernel.times * kernel.bytes for kernel in found)


def _moved(computations: dict[str, list[Instruction]], shapes: dict[str, str], line: Instruction) -> int:
    operands = list(dict.fromkeys(line.operands))
    if line.opcode in ("dynamic-slice", "slice"):
        return _size(line.shape) + (0 if _is_on_chip(shapes.get(operands[0], "")) else _size(line.shape, anywhere=True))
    if line.opcode == "dynamic-update-slice":
        return 2 * _size(shapes[line.operands[1]])
    if line.opcode != "fusion":
        return _size(line.shape) + sum(_size(shapes.get(operand, "")) for operand in operands)
    reads, written = _inside(computations[line.attribute(r"calls=%([\w.\-]+)") or ""], line.shape)
    return written + sum(reads[line.operands.index(operand)] for operand in operands)


def _inside(lines: list[Instruction], result: str) -> tuple[dict[int, int], int]:
    """What a fusion reads of each parameter, and all that it writes, where its result has a shape.

    Elementwise code runs where its result is wanted: of what is sliced after it, a slice is read.
    """
    by_name = {line.name: line for line in lines}
    (root,) = (line for line in lines if line.root)
    results = [by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    wanted: dict[str, int] = defaultdict(int, {line.name: _elements(line) for line in results})
    reads = {}
    for line in reversed(lines):  # Readers come after what they read.
        wants = min(wanted[line.name], _elements(line))
        if line.opcode == "parameter":
            reads[int(line.rest.split(")")[0])] = wants * _size(line.shape) // max(_elements(line), 1)
        elif line.opcode != "tuple":
            for position, operand in enumerate(line.operands):
                wanted[operand] += _wanted(line, position, wants, by_name[operand])
    kept = [array[0] for array in _SHAPE.finditer(result)]
    shapes = kept if len(kept) == len(results) else [line.shape for line in results]
    return reads, sum(_written(by_name, line, shape) for line, shape in zip(results, shapes, strict=True))


def _wanted(user: Instruction, position: int, wants: int, operand: Instruction) -> int:
    """How many elements of an operand an instruction reads, to make `wants` elements of its result."""
    if user.opcode == "dynamic-update-slice" and position == 0:
        return 0  # Updated in place.
    slices = user.opcode in ("dynamic-slice", "gather", "slice") and position == 0
    if slices or _elements(user) == _elements(operand):
        return wants
    return _elements(operand) if wants else 0


def _elements(line: Instruction) -> int:
    return sum(count for _, count, _ in _arrays(line.shape))


def _written(by_name: dict[str, Instruction], line: Instruction, shape: str) -> int:
    source = line
    while source.opcode in _VIEWS:
        source = by_name[source.operands[0]]
    if source.opcode != "dynamic-update-slice":
        return _size(shape)
    return 0 if _is_on_chip(shape) else _size(by_name[source.operands[1]].shape, anywhere=True)


def _is_on_chip(shape: str) -> bool:
    return _ON_CHIP in shape


def _size(shape: str, anywhere: bool = False) -> int:
    """Bytes of a shape's arrays, without those on the chip unless they are asked for."""
    return sum(_BYTES[dtype] * count for dtype, count, on_chip in _arrays(shape) if anywhere or not on_chip)


def _arrays(shape: str) -> Iterator[tuple[str, int, bool]]:
    """Dtype and number of elements of each array in a shape, and whether it stays on the chip."""
    for dtype, sizes, layout in _SHAPE.findall(shape):
        yield dtype, math.prod(int(size) for size in sizes.split(",") if size), _is_on_chip(layout)


def product_dtypes(text: str) -> Counter[str]:
    """Counts the matrix products of an optimized module by the dtypes of their operands, such as `"f8e4m3fn,bf16"`.

    A product in a loop counts once.

    Args:
        text: `compiled.as_text()`.
    """
    computations, _ = _parse(text)
    found: Counter[str] = Counter()
    for instructions in computations.values():
        shapes = {instruction.name: instruction.shape for instruction in instructions}
        for instruction in instructions:
            library = instruction.opcode == "custom-call" and "$matmul" in instruction.rest
            if instruction.opcode == "dot" or library:
                found[",".join(shapes[name].partition("[")[0] for name in instruction.operands[:2])] += 1
    return found
