"""Machine code that reads a uniform register which nothing has written."""

import pytest
from unwritten import of_code


def sass(*lines):
    return "\n".join(
        f"        /*{16 * i:04x}*/      {line} ;      /* 0x0000000000000000 */" for i, line in enumerate(lines)
    )


GOOD = {
    "written on one of two ways": (
        "@!P1 BRA 0x20", "UMOV UR5, 0x1", "UIADD3 UR6, UP0, UR5, 0x40, URZ", "EXIT",
    ),
    "written in the round before": (
        "UMOV UR4, URZ", "@!P0 BRA 0x30", "UIADD3 UR5, UR7, 0x1, URZ", "UMOV UR7, UR4", "@P0 BRA 0x20", "EXIT",
    ),
    "pairs and fours": (
        "ULDC.64 UR4, c[0x0][0x208]", "LDG.E R2, desc[UR4][R2.64]", "UIADD3.64 UR8, UR4, 0x2, URZ",
        "UIADD3.64 UR10, UR8, 0x2, URZ", "HGMMA.64x64x16.F32 R24, gdesc[UR8], R24, gsb0", "EXIT",
    ),
    "one descriptor beside registers": (
        "UMOV UR10, 0x1", "UMOV UR11, 0x2", "HGMMA.64x32x16.F32 R56, R24, gdesc[UR8].tnspB, R56", "EXIT",
    ),
    "words beside descriptors": (
        "UMOV UR18, 0x1", "UMOV UR6, 0x1", "UMOV UR7, 0x1", "UMOV UR39, 0x1",
        "UTCHMMA tmem[UR18], gdesc[UR6], tmem[UR18], tmem[UR18], idesc[UR39], UP0", "EXIT",
    ),
    "who was elected": ("ELECT P0, UR62, PT", "MOV R8, UR62", "ELECT P1, URZ, PT", "EXIT"),
    "what only a computed jump leads to": (
        "UMOV UR4, 0x1", "BRX R2 -0x10", "UMOV UR5, 0x2", "BRA 0x50", "UMOV UR6, UR4", "UMOV UR7, UR5", "EXIT",
    ),
}  # fmt: skip
BAD = {
    "UR30 in UIADD3 UR30, UP0, UR30, 0x40, URZ at 10": ("UMOV UR14, 0x1", "UIADD3 UR30, UP0, UR30, 0x40, URZ", "EXIT"),
    "UR5 in UMOV UR6, UR5 at 10": ("BRA 0x10", "UMOV UR6, UR5", "UMOV UR5, 0x1", "EXIT"),
    "UR9 in HGMMA.64x64x16.F32 R24, gdesc[UR8], R24 at 30": (
        "UMOV UR8, 0x1", "UMOV UR10, 0x1", "UMOV UR11, 0x1", "HGMMA.64x64x16.F32 R24, gdesc[UR8], R24", "EXIT",
    ),
    "UR5 in LDG.E R2, desc[UR4][R2.64] at 10": ("ULDC UR4, c[0x0][0x208]", "LDG.E R2, desc[UR4][R2.64]", "EXIT"),
    "UR7 in STS [R2+UR7], R3 at 0": ("STS [R2+UR7], R3", "EXIT"),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_code_that_writes_first(name):
    assert of_code(sass(*GOOD[name])) == []


@pytest.mark.parametrize("found", BAD)
def test_code_that_does_not(found):
    assert of_code(sass(*BAD[found])) == [found]
