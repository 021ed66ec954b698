"""Uniform registers that machine code reads where no way from its beginning has written them.

An assembler that forgets an instruction leaves a kernel that compiles, fits, spills nothing and reads from anywhere.
That happened: CUDA 12.8's on sm90, where two operands of the matrix unit lie at one address in different swizzles.
What is looked at are the registers that descriptors and addresses are made of. `of_code` takes what `cuobjdump -sass`
prints of a kernel.
"""

import re

LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", re.M)
REGISTER = re.compile(r"(?:\b(gdesc|desc)\[)?\b(UR\d+)\b")
PREDICATE = re.compile(r"^@!?U?P\w+\s+")
TARGET = re.compile(r"(?<![\w\[])(?:`\(.*?\)|0x[0-9a-f]+)\s*$")
MATRIX = ("HGMMA", "IGMMA", "QGMMA", "BGMMA")
JUMPS = ("BRA", "JMP", "BRX", "BRXU", "CALL", "BSSY", "BREAK", "WARPSYNC", "JMX")
# what begins with a uniform register and only reads it
READERS = ("UTMA", "UBLK", "UTC", "UCGABAR", "USETMAXREG", "BAR", "DEPBAR", "ERRBAR", "UCP", "ACQ", "WARPGROUP")


def of_code(text: str) -> list[str]:
    """The readings in the order of the code: "UR30 in UIADD3 UR30, UP0, UR30, 0x40, URZ at 1560"."""
    code = [(int(at, 16), line.strip()) for at, line in LINE.findall(text)]
    effects = [_effects(line) for _, line in code]
    ways, computed = _ways(code, {at: i for i, (at, _) in enumerate(code)})
    written: list[frozenset[str] | None] = [None] * len(code)
    if code:
        written[0] = frozenset()
        _follow([0], written, effects, ways)
    while computed and None in written:  # what nobody else leads to is where a computed jump goes
        beginning = written.index(None)
        sets = [w | effects[i][0] for i in computed if (w := written[i]) is not None]
        written[beginning] = frozenset().union(*sets)
        for i in computed:
            ways[i].append(beginning)
        _follow([beginning], written, effects, ways)
    return [
        f"{register} in {line} at {at:x}"
        for (at, line), (_, reads), known in zip(code, effects, written, strict=True)
        if known is not None
        for register in reads
        if register not in known
    ]


def _follow(
    waiting: list[int], written: list[frozenset[str] | None], effects: list[tuple[frozenset[str], list[str]]],
    ways: list[list[int]],
) -> None:  # fmt: skip
    """Registers that may be written when each instruction begins, from these instructions on."""
    while waiting:
        i = waiting.pop()
        after = (written[i] or frozenset()) | effects[i][0]
        for j in ways[i]:
            old = written[j]
            new = after if old is None else old | after
            if new != old:
                written[j] = new
                waiting.append(j)


def _effects(line: str) -> tuple[frozenset[str], list[str]]:
    """(registers that an instruction may write, those that it reads)."""
    name, _, rest = PREDICATE.sub("", line).partition(" ")
    operands = [o.strip() for o in rest.split(",")]
    writes: list[str] = []
    reads: list[str] = []
    # whether all threads agree, or this one was chosen, comes first
    result = 1 if name in ("R2UR", "ELECT") and re.fullmatch(r"U?P\w", operands[0]) else 0
    for place, operand in enumerate(operands):
        for kind, register in REGISTER.findall(operand):
            number = int(register[2:])
            if place == result and operand == register and not name.startswith(READERS):
                width = next((w for mark, w in ((".256", 8), (".128", 4), (".64", 2), (".WIDE", 2)) if mark in name), 1)
                writes += [f"UR{number + i}" for i in range(width)]
            elif kind == "gdesc" and name.startswith(MATRIX):
                # two descriptors, of which the first is not read where the left operand is in registers
                first = 2 if re.match(r"R\d", operands[1]) and place == 2 else 0
                reads += [f"UR{number + i}" for i in range(first, 4)]
            elif kind:
                reads += [register, f"UR{number + 1}"]
            else:
                reads.append(register)
    return frozenset(writes), reads


def _ways(code: list[tuple[int, str]], index: dict[int, int]) -> tuple[list[list[int]], list[int]]:
    """Where each instruction may go on, and the computed jumps, which may go anywhere that somebody jumps to."""
    targets: set[int] = set()
    returns = [i + 1 for i, (_, line) in enumerate(code) if "CALL" in line and i + 1 < len(code)]
    found: list[list[int]] = []
    computed = []
    for i, (_, line) in enumerate(code):
        bare = PREDICATE.sub("", line)
        name = bare.split()[0].split(".")[0]
        always = bare == line and not re.match(r"\S+\s+!?U?P\d", bare)
        ways = []
        if name in JUMPS and (match := TARGET.search(bare)) and match[0].startswith("0x"):
            target = index.get(int(match[0], 16))
            if target is not None:
                ways.append(target)
                targets.add(target)
        if name in ("BRX", "BRXU", "JMX"):
            computed.append(i)
        if name == "RET":
            ways += returns
        ends = name in ("EXIT", "RET", "KILL", "BRX", "BRXU", "JMX") or (name in ("BRA", "JMP"))
        if not (ends and always) and i + 1 < len(code):
            ways.append(i + 1)
        found.append(ways)
    for i in computed:
        found[i] = sorted({*found[i], *targets, *(j + 1 for j in computed if j + 1 < len(code))})
    return found, computed
