"""PTX that decodes the words of shuffled weights (`pack._shuffle`): no value moves to another thread."""

import functools
from collections.abc import Iterable

from fpk.kernels.pack._shuffle import PLANE2, PLANE4


def _take(source: str, to: str, parts: Iterable[tuple[int, int]], first: bool) -> list[str]:
    """PTX lines: to (|)= rotate_left(source, n) & mask for each part."""
    lines = []
    for n, mask in parts:
        both, bits, t = f"0x{mask:04X}{mask:04X}", [b - n for b in range(16) if mask >> b & 1], "t"
        if n == 0:
            t = source
        elif all(0 <= b < 16 for b in bits):
            lines.append(f"{'shl' if n > 0 else 'shr'}.b32 t, {source}, {abs(n)};")
        else:
            lines.append(f"shf.l.wrap.b32 t, {source}, {source}, {n % 32};")
        lines.append(f"and.b32 {to}, {t}, {both};" if first else f"lop3.b32 {to}, {t}, {both}, {to}, 0xEA;")
        first = False
    return lines


def _words_to_bf16(element: str) -> tuple[str, str, int]:
    """Words to bf16 pairs, times scale pairs."""
    mask, turns = PLANE2.get(element, (0, ()))
    words = 2 if turns else 1
    out, pack = 4 * words, 4 * words
    second = out + words
    low = second + (pack if turns else 0)
    lines = ["{", ".reg .b32 t, " + ", ".join(f"p{i}" for i in range(out)) + ";"]
    for w in range(words):
        for j in range(4):
            lines += _take(f"${out + w}", f"p{w * 4 + j}", PLANE4[j], True)
            if turns:
                lines += _take(f"${second}", f"p{w * 4 + j}", [(turns[w * 4 + j], mask)], False)
    for w in range(words):
        for j in range(4):
            register = (j // 2) * 2 * words + w * 2 + j % 2
            scale = (low + pack if j >= 2 else low) + 4 * w + 2 * (j % 2)
            lines.append(f"mul.rn.bf16x2 ${register}, p{w * 4 + j}, ${scale};")
    lines.append("}")
    return "\n".join(lines), ",".join(["=&r"] * out + ["r"] * (low + 2 * pack - out)), pack


def _words_to_fp8() -> tuple[str, str, int]:
    """A word of eight codes to four e4m3 values of each half, by tables of four magnitudes in a register."""
    lines = """{
    .reg .b32 s, t, p;
    and.b32 s, $2, 0x77777777;
    prmt.b32 p, $3, $7, s;
    lop3.b32 $0, $2, 0x80808080, p, 0xEA;
    shr.u32 s, s, 16;
    prmt.b32 p, $11, $15, s;
    shl.b32 t, $2, 4;
    lop3.b32 $1, t, 0x80808080, p, 0xEA;
    }"""
    return lines, "=&r,=&r," + ",".join(["r"] * 17), 4


@functools.cache
def assembly(element: str, fp8: bool) -> dict[str, str | int]:
    """constexpr arguments: the PTX that decodes words, its constraints, and the elements that it takes at once."""
    return dict(zip(("ASM", "CONSTRAINTS", "PACK"), _words_to_fp8() if fp8 else _words_to_bf16(element), strict=True))
