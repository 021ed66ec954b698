"""What compilers were seen to get wrong, looked for in what they write.

`halved` takes Triton's intermediate code (ttgir), `undone` PTX; what is lost in machine code is in `unwritten`.
"""

import re

OPERAND = re.compile(r"tensor<([\dx]+)x\w+, #ttg\.dot_op<\{opIdx = ([01]), parent = #\w+, kWidth = (\d+)\}>>")
PRODUCTS = ("tt.dot ", "tt.dot_scaled ", "warp_group_dot ")
INSTRUCTION = re.compile(r"[\s{]*(?:@\S+\s+)?([a-z]\S*)\s+(\{[^}]*\}|[^,]*)(.*)")
WORD = re.compile(r"%\w+")
NARROW = r"e4m3x2|e5m2x2|e2m1x2|e2m3x2|e3m2x2"
ENCODES = re.compile(rf"cvt\.\S*\.({NARROW})\.f32\b")
DECODES = re.compile(rf"cvt\.\S*f16x2\.({NARROW})\b")
# what only moves bits about
MOVES = re.compile(r"(mov|and|or|xor|shl|shr|prmt|lop3|bfe|bfi|selp|shfl|cvt\.[us]\d+)\b")


def halved(text: str) -> list[str]:
    """Products of fewer columns than four threads with kWidth neighbours each hold: "16 columns, kWidth 8".

    Triton 3.6 and 3.7 choose such a width by the narrowest load behind an operand, whatever the step; the threads that
    find no column of their own then repeat others', and as many columns are never read.
    """
    found = []
    for line in text.splitlines():
        if any(name in line for name in PRODUCTS):
            for sizes, side, width in OPERAND.findall(line):
                *_, rows, columns = map(int, sizes.split("x"))
                step = rows if side == "1" else columns
                if step < 4 * int(width):
                    found.append(f"{step} columns, kWidth {width}")
    return found


def undone(text: str) -> list[str]:
    """Instructions that decode narrow codes which another one has made from fp32: "cvt.rn.f16x2.e4m3x2 %r609, %rs1".

    The assembler of CUDA 12.8 (Triton 3.6) merges encodings, and then decodes registers that hold something else.
    """
    made: dict[str, list[tuple[str, list[str]]]] = {}  # by register: the instructions that write it, what they read
    decoding = []
    for line in re.split(r"[;\n]", text):
        match = INSTRUCTION.match(line)
        if match is None:
            continue
        name, results, operands = match.groups()
        for register in WORD.findall(results):
            made.setdefault(register, []).append((name, WORD.findall(operands)))
        if DECODES.match(name):
            decoding.append((match[0].strip(" {\t"), WORD.findall(operands)))
    return [line for line, sources in decoding if _encoded(sources, made)]


def _encoded(registers: list[str], made: dict[str, list[tuple[str, list[str]]]]) -> bool:
    """Are these registers what an instruction has encoded, moved about at most?"""
    waiting, seen = list(registers), set(registers)
    while waiting:
        for name, sources in made.get(waiting.pop(), ()):
            if ENCODES.match(name):
                return True
            if MOVES.match(name):
                waiting += set(sources) - seen
                seen |= set(sources)
    return False
