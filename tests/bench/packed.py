"""Tables of packed weights: which pair runs how on which GPU, from the ops' own candidates; times on an H200.

python tests/bench/packed.py            # print them
"""

import contextlib
import csv
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from readme import geomean, table

RESULTS = Path(__file__).resolve().parents[2] / "results" / "nv-h200-sm90-132"
GPUS = ("sm80", "sm89", "sm90", "sm100", "sm120", "gfx942", "gfx950")


def how(weight: str, activation: str, arch: str) -> str:
    """How `fpk.mm` multiplies a pair of schemes on a GPU family: by the default config that it would run there.

    "native": by block scales of the matrix unit, or on codes as they are. "FP8", "INT8", "bf16": decoded in registers
    to that type, which holds every code exactly. Else why there is no product.
    """
    import fpk.kernels  # noqa: F401  declares every op
    from fpk._pairs import no_product, packed_arguments, reads_packed
    from fpk.api import Quantized
    from fpk.device import pretend
    from fpk.formats import FP8, scheme_of
    from fpk.op import OPS

    w, a = scheme_of(weight), None if activation == "none" else scheme_of(activation)
    if reason := no_product(w, a):
        return reason

    def codes(scheme, rows):
        shape = (rows, 256 * scheme.format.bits // 8 if scheme.packed else 256)
        scale = torch.ones(scheme.granularity.scale_shape((rows, 256)), dtype=torch.float32)
        kinds = {"e8m0": torch.uint8, "e4m3fn": torch.float8_e4m3fn}
        scale = scale.to(kinds[scheme.scale_format]) if scheme.scale_format in kinds else scale
        extra = {"global_scale": torch.ones(1, 1)} if "global_scale" in scheme.outputs else {}
        if "zero_point" in scheme.outputs:
            extra["zero_point"] = torch.zeros(scale.shape, dtype=torch.int32)
        made = torch.zeros(shape, dtype=torch.uint8).view(scheme.format.dtype)
        return Quantized(made, scale, scheme.name, check=False, **extra)

    qw, qx = codes(w, 64), torch.zeros(512, 256, dtype=torch.bfloat16) if a is None else codes(a, 512)
    with pretend(arch):
        if not reads_packed(qx, qw):
            return "native"
        op = OPS["mm_packed"]
        arguments = packed_arguments(qx, qw)
        with contextlib.suppress(NotImplementedError):
            config = op.config_for(**arguments)
            raw = all(t.dtype in FP8 or t.dtype is torch.int8 for t in (arguments["a"], arguments["b"]))
            if config["kernel"] == "native" or (raw and config["COMPUTE"] != "half"):
                return "native"
            return {"fp8": "FP8", "int8": "INT8", "half": "bf16"}[config["COMPUTE"]]
    return "no kernel"


def support() -> str:
    """Weights with packed or block-scaled codes x activations, by GPU family."""
    from fpk.formats import SCHEMES

    activations = [
        "none",
        *(s.name for s in SCHEMES.values() if s.granularity.rows <= 1 and "zero_point" not in s.outputs),
    ]
    rows = []
    for weight in (s.name for s in SCHEMES.values() if s.product):
        found: dict[tuple[str, ...], list[str]] = {}
        for activation in activations:
            cells = tuple(how(weight, activation, arch) for arch in GPUS)
            if len(set(cells)) > 1 or len(cells[0]) <= 9:  # a sentence says that there is no product
                found.setdefault(cells, []).append(activation)
        rows += [[f"`{weight}`", " ".join(f"`{n}`" for n in names), *cells] for cells, names in found.items()]
    return table(["weights", "activations", *GPUS], rows)


def products() -> str:
    with open(RESULTS / "packed.csv", newline="") as f:
        found = list(csv.DictReader(f))
    rows = [
        [
            r["product"], f"{r['M']} x {r['N']} x {r['K']}", r["us"], r["tb_per_s"], r["tflops"],
            r["marlin_us"] or "-", r["triton_kernels_us"] or "-", r["cublas_bf16_us"] or "-", r["ratio"] or "-",
        ]
        for r in found
    ]  # fmt: skip
    header = [
        "product",
        "M x N x K",
        "µs",
        "TB/s",
        "TFLOP/s",
        "Marlin µs",
        "triton_kernels µs",
        "cuBLAS bf16 µs",
        "best peer / fpk",
    ]
    return table(header, rows)


def rates() -> str:
    """One line per product and number of tokens: bytes of the packed weight a second, operations a second, from-to."""
    with open(RESULTS / "packed.csv", newline="") as f:
        found = list(csv.DictReader(f))
    groups: dict[tuple[str, int], list[dict[str, str]]] = {}
    for r in found:
        groups.setdefault((r["product"], int(r["M"])), []).append(r)
    rows = []
    for (product, tokens), of in groups.items():
        ends = [[form.format(end(float(r[c]) for r in of)) for end in (min, max)]
                for c, form in (("tb_per_s", "{:.1f}"), ("tflops", "{:.0f}"))]  # fmt: skip
        ratios = [float(r["ratio"]) for r in of if r["ratio"]]
        ratio = f"{geomean(ratios):.2f}" if ratios else ""
        rows.append([product, str(tokens), str(len(of)), ratio, *(" to ".join(dict.fromkeys(e)) for e in ends)])
    return table(["product", "rows", "layers", "peer / fpk", "TB/s", "TFLOP/s"], rows)


PARTS = {"packed_support": support, "packed": products, "packed_rates": rates}

if __name__ == "__main__":
    for name, make in PARTS.items():
        print(f"<!-- {name}: generated -->\n{make()}\n<!-- end -->\n")
