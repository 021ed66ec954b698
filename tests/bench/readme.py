"""Rewrites the generated parts of README.md and docs/*.md: the op table from OPS, the H200 tables from results/*.csv.

python tests/bench/readme.py            # rewrite
python tests/bench/readme.py --check    # exit 1 if a page is not what this would write
"""

import csv
import math
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results" / "nv-h200-sm90-132"
READ_GB_PER_S, PEAK_TFLOPS = 4250, 1561  # copy rate and FP8/INT8 ceiling of the H200 (twice the bf16 rate it reaches)


PRODUCT_OPS = ("scaled_mm", "scaled_mm_group", "mm_weight_only")


# stage of an expert layer in moe.csv: its op; {} is "_group" for scales along K and "" for others
STAGES = {
    "route": "route", "sort": "sort_by_expert", "permute": "moe_permute", "unpermute": "moe_unpermute",
    "w13": "grouped_scaled_mm{}", "w2": "grouped_scaled_mm{}", "activation": "act_and_mul_quantize_fp8{}",
}  # fmt: skip


def rows_of(name: str) -> list[dict[str, str]]:
    with open(RESULTS / f"{name}.csv", newline="") as f:
        return list(csv.DictReader(f))


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def ops() -> str:
    import fpk.kernels  # noqa: F401  declares every op
    from fpk.op import OPS

    shown = {name: "timed" for name in PRODUCT_OPS} | {r["op"]: "timed" for r in rows_of("quantizers")}
    shown |= {r["op"]: "timed" for name in ("packed", "attention") for r in rows_of(name)}
    for r in rows_of("moe"):
        grouped = "_group" if "block" in r["scheme"] else ""
        name = STAGES.get(r["stage"], "").format(grouped)
        shown["act_and_mul_quantize_fp8_token" if name == "act_and_mul_quantize_fp8" else name] = "timed"
    for r in rows_of("exactness"):
        if r["differences"] == "0":
            shown[r["op"]] = f"{float(r['values']):.1e} values bit-equal"
    rows = []
    for name, op in sorted(OPS.items(), key=lambda item: (item[1].launcher.__module__, item[0])):
        family = op.launcher.__module__.split(".")[-2]
        what = (op.__doc__ or "").splitlines()[0].replace("|", "/")
        rows.append([f"`{name}`", family, what, ", ".join(op.kernels), shown.get(name, "no row yet")])
    return table(["op", "family", "what", "kernels", "on the H200"], rows)


def quantizers() -> str:
    rows = [
        [
            f"`{r['op']}`" + (f" ({r['variant']})" if r["variant"] else ""), f"{r['M']} x {r['K']}", r["us"],
            r["copy_us"], f"{float(r['share_of_copy']):.2f}",
        ]
        for r in rows_of("quantizers")
    ]  # fmt: skip
    return table(["op", "bf16 input", "µs", "µs of a device copy", "share of the copy's rate"], rows)


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


TITLES = {
    "fp8_token": "FP8 token x channel", "fp8_tensor": "FP8 tensor x tensor", "int8_token": "INT8 token x channel",
    "fp8_block": "FP8 1 x 128 by 128 x 128", "fp8_weight_only": "bf16 x FP8 channel",
    "int8_weight_only": "bf16 x INT8 channel",
}  # fmt: skip
PEERS = {"cutlass": "vLLM's CUTLASS", "deepgemm": "DeepGEMM", "deep_gemm": "DeepGEMM", "torch_bf16": "bf16 product",
         "torch plain": "bf16 product"}  # fmt: skip
ACCUMULATION = {"1": "fast", "0": "full"}


def accumulation(row: dict[str, str]) -> str:
    """How an FP8 product was summed; "" where there is no choice."""
    return ACCUMULATION[row["fast_accum"]] if row["product"] in ("fp8_token", "fp8_tensor") else ""


def mean_of(found: list[dict[str, str]], above: str, below: str) -> str:
    """Geometric mean of a quotient of two columns over the rows that have both."""
    values = [float(r[above]) / float(r[below]) for r in found if r[above] and r[below]]
    return f"{geomean(values):.2f}" if values else "-"


def products() -> str:
    """One line per product and number of tokens: geometric means over the layers that were timed."""
    groups: dict[tuple[str, str, int], list[dict[str, str]]] = {}
    for r in rows_of("products"):
        groups.setdefault((r["product"], accumulation(r), int(r["M"])), []).append(r)
    rows = []
    for (product, accumulated, tokens), found in groups.items():
        shares = [max(float(r["tflops"]) / PEAK_TFLOPS, float(r["gb_per_s"]) / READ_GB_PER_S) for r in found]
        peers = ", ".join(sorted({PEERS.get(r["peer"], r["peer"]) for r in found}))
        rows.append(
            [
                TITLES[product], accumulated, str(tokens), str(len(found)), peers, mean_of(found, "peer_us", "us"),
                f"{min(float(r['ratio']) for r in found if r['ratio']):.2f}",
                mean_of(found, "peer_us", "default_us"), mean_of(found, "floor_us", "us"), f"{geomean(shares):.2f}",
                max((r["error"] for r in found if r["error"]), key=float, default=""),
            ]
        )  # fmt: skip
    header = [
        "product", "accumulation", "tokens", "layers", "fastest peer", "peer / fpk", "lowest", "peer / default",
        "floor / fpk", "share of roofline", "error",
    ]  # fmt: skip
    return table(header, rows)


Timed = tuple[str, int, str, float]  # work, tokens, the other side, its time by fpk's


def matrix(found: list[Timed]) -> str:
    """A line for each work, a column for each number of tokens: geometric mean, beside it the lowest ratio."""
    tokens = sorted({t for _, t, _, _ in found})
    rows = []
    for work in dict.fromkeys(w for w, _, _, _ in found):
        others = ", ".join(sorted({other for w, _, other, _ in found if w == work}))
        cells = []
        for t in tokens:
            ratios = [ratio for w, at, _, ratio in found if (w, at) == (work, t)]
            lowest = f" ({min(ratios):.2f})" if len(ratios) > 1 else ""
            cells.append(f"{geomean(ratios):.2f}{lowest}" if ratios else "")
        rows.append([work, others, *cells])
    return table(["", "peers", *map(str, tokens)], rows)


def speed_products() -> str:
    return matrix(
        [
            (", ".join(filter(None, [TITLES[r["product"]], accumulation(r)])), int(r["M"]),
             PEERS.get(r["peer"], r["peer"]), float(r["ratio"]))
            for r in rows_of("products") if r["ratio"]
        ]
    )  # fmt: skip


def speed_packed() -> str:
    """Rows of expert products are those of gpt-oss: each of its tokens goes to four experts."""
    peers = {"marlin_us": "Marlin", "triton_kernels_us": "triton_kernels", "cublas_bf16_us": "cuBLAS bf16"}
    found = []
    for r in rows_of("packed"):
        times = {name: float(r[c]) for c, name in peers.items() if r[c]}
        packed_peers = {name: t for name, t in times.items() if name != "cuBLAS bf16"} or times
        if r["ratio"]:
            tokens = int(r["M"]) // 4 if "experts" in r["product"] else int(r["M"])
            found.append((r["product"], tokens, min(packed_peers, key=packed_peers.__getitem__), float(r["ratio"])))
    return matrix(found)


def expert_rows() -> list[dict[str, str]]:
    wanted = ("layer", "w13", "w2")
    found = [r for r in rows_of("moe") if r["ratio"] and r["routing"] == "balanced" and r["stage"] in wanted]
    return sorted(found, key=lambda r: (r["scheme"], r["stage"], int(r["T"])))


def speed_experts() -> str:
    return matrix(
        [
            (f"{r['stage']}, `{r['scheme']}`", int(r["T"]), r["other"].split(" (")[0], float(r["ratio"]))
            for r in expert_rows()
        ]
    )


def experts() -> str:
    """One line per stage, scheme and number of tokens: geometric means over the models that were timed."""
    groups: dict[tuple[str, str, int], list[dict[str, str]]] = {}
    for r in expert_rows():
        groups.setdefault((r["scheme"], r["stage"], int(r["T"])), []).append(r)
    rows = []
    for (scheme, stage, tokens), found in groups.items():
        ratios, shares = [float(r["ratio"]) for r in found], [float(r["share"]) for r in found]
        others = ", ".join(sorted({r["other"].split(" (")[0] for r in found}))
        rows.append([f"`{scheme}`", stage, str(tokens), str(len(found)), others, f"{geomean(ratios):.2f}",
                     f"{min(ratios):.2f}", f"{geomean(shares):.2f}"])  # fmt: skip
    header = ["weights:activations", "stage", "tokens", "models", "other", "other / fpk", "lowest", "share of roofline"]
    return table(header, rows)


def methods() -> str:
    found = rows_of("methods")
    marks = [n for n in found[0] if n not in ("method", "scheme")]
    titles = {"matches": "matches reference", "graph": "graph capture", "fullgraph": "fullgraph compile",
              "reload": "reload in place"}  # fmt: skip
    groups: dict[tuple[str, ...], list[str]] = {}
    for r in found:
        groups.setdefault((r["method"], *(r[n] for n in marks)), []).append(f"`{r['scheme']}`")
    rows = [[f"`{name}`", " ".join(schemes), *cells] for (name, *cells), schemes in groups.items()]
    return table(["method", "weights:activations", *(titles.get(n, n) for n in marks)], rows)


def packed(part: str) -> str:
    sys.path.insert(0, str(Path(__file__).parent))
    from packed import PARTS

    return PARTS[part]()


def steps(part: str) -> str:
    sys.path.insert(0, str(Path(__file__).parent))
    from steps import PARTS

    return PARTS[part]()


def study() -> str:
    with open(ROOT / "results" / "study-smollm2-135m.csv", newline="") as f:
        found = list(csv.DictReader(f))
    rows = [
        [
            f"`{r['scheme']}`", f"{int(r['bytes']) / 1e6:.0f}", f"{float(r['perplexity[sotu]']):.2f}",
            f"{float(r['delta_pct[sotu]']):+.1f} %", f"{float(r['delta_pct[pydoc]']):+.1f} %",
            f"{100 * float(r['rel_err']):.1f} %",
        ]
        for r in found
    ]  # fmt: skip
    header = ["weights:activations", "MB", "perplexity, speech", "speech", "documentation", "median output error"]
    return table(header, rows)


def provenance() -> str:
    """GPU, versions and dates of all tables of times."""
    found = [r for n in ("products", "packed", "moe", "quantizers", "attention", "dispatch") for r in rows_of(n)]
    said = {n: sorted({r[n] for r in found if r.get(n)}) for n in ("gpu", "torch", "triton", "date")}
    dates = " to ".join(dict.fromkeys((said["date"][0], said["date"][-1])))
    torch, triton = ", ".join(said["torch"]), ", ".join(said["triton"])
    return f"Measured on one NVIDIA H200 (`{', '.join(said['gpu'])}`), torch {torch}, triton {triton}, {dates}."


def caches() -> str:
    with open(ROOT / "results" / "study-caches-smollm2-135m.csv", newline="") as f:
        found = {(r["cache"], r["text"]): r for r in csv.DictReader(f)}
    kinds = dict.fromkeys(cache for cache, _ in found)
    rows = [
        [f"`{kind}`" if kind != "none" else "bf16 or fp32"]
        + [f"{float(found[kind, text][c]):{form}}{unit}" for text in ("sotu", "pydoc")
           for c, form, unit in (("perplexity", ".2f", ""), ("delta_pct", "+.2f", " %"))]
        for kind in kinds
    ]  # fmt: skip
    return table(["KV cache", "perplexity, speech", "speech", "perplexity, documentation", "documentation"], rows)


def parallel(folder: str = "") -> str:
    """A row for each method; equal bits, or the largest relative difference."""
    with open(ROOT / "results" / folder / "parallel.csv", newline="") as f:
        found = list(csv.DictReader(f))
    columns = list(dict.fromkeys(r["column"] for r in found))
    rows = []
    for method, scheme in dict.fromkeys((r["method"], r["scheme"]) for r in found):
        cells = []
        for column in columns:
            here = [r for r in found if (r["method"], r["scheme"], r["column"]) == (method, scheme, column)]
            if not here or here[0]["equal"] == "n/a":
                cells.append(here[0]["equal"] if here else "-")
                continue
            worst = max(float(r["difference"]) for r in here)
            over = [r for r in here if r["bound"] and float(r["difference"]) > float(r["bound"])]
            text = "equal" if all(r["equal"] == "1" for r in here) else f"{worst:.0e}"
            text += "".join(f", {r['moved']} operands" for r in here if r["moved"] and r["moved"][0] != "0")
            cells.append(f"**{text}, bound {float(over[0]['bound']):.0e}**" if over else text)
        rows.append([f"`{method}`", f"`{scheme}`", *cells])
    return table(["layer", "weights:activations", *columns], rows)


def scaling() -> str:
    """An exchange a row: tokens a second against one GPU, and the parts of a call as shares of it."""
    rows = []
    for r in rows_of("ep"):
        if r["part"].startswith("layer") or r["exchange"] == "one GPU":
            rate = int(r["tokens"]) * (int(r["ranks"]) if r["payload"] else 1) / float(r["us"])
            how = f"`{r['exchange']}`, rows in `{r['payload']}`" if r["payload"] else r["exchange"]
            how += ", CUDA graph" if "graph" in r["part"] else ""
            rows.append([how, r["us"], f"{rate:.2f}", f"{float(r['speedup']):.2f}", "-", ""])
        else:
            rows[-1][5] += f"{', ' if rows[-1][5] else ''}{r['part']} {100 * float(r['share']):.0f} %"
            if r["part"] == "experts":
                rows[-1][4] = f"{100 * (1 - float(r['share'])):.0f} %"
    header = ["exchange", "us", "tokens/us", "x one GPU", "communication", "parts by themselves, of the call"]
    return table(header, rows)


def attention() -> str:
    """Decoding by its share of what can be read; prefill and writes beside others."""
    rows = [
        [f"`{r['op']}`", r["model"], r["cache"], r["size"], r["us"], r["tb_per_s"], r["share"] or "-",
         r["tflops"] or "-", r["other"] or "-", r["other_us"] or "-", r["ratio"] or "-"]
        for r in rows_of("attention") if r["op"] != "read"
    ]  # fmt: skip
    header = ["op", "heads of", "cache", "sequences x tokens", "us", "TB/s", "of the read ceiling", "TFLOP/s", "beside",
              "us", "ratio"]  # fmt: skip
    return table(header, rows)


def dispatch() -> str:
    """What a call costs before its kernel runs, on the GPU's host."""
    found = rows_of("dispatch")
    rows = [
        [r["what"] + (f", `{r['op']}`" if r["op"] else ""), f"{float(r['us']):.3g}", r["strides"], r["bound_us"] or "-"]
        for r in found
    ]
    host = f"Python {found[0]['python']} on {found[0]['cpu']}, torch {found[0]['torch']}, triton {found[0]['triton']}"
    return table([f"{host}, {found[0]['date']}", "µs", "in calls of `Tensor.stride()`", "wanted, µs"], rows)


def online() -> str:
    """A model through methods: perplexity on the GPU, and how far its logits move."""
    rows = [
        [r["layers"], f"`{r['method']}`", f"`{r['scheme']}`", f"{float(r['perplexity']):.2f}",
         f"{float(r['delta_pct']):+.2f} %", f"{100 * float(r['rel_err']):.1f} %", f"{float(r['bytes_pct']):.0f} %"]
        for r in rows_of("online")
    ]  # fmt: skip
    return table(["layers", "method", "weights:activations", "perplexity", "", "logits' error", "bytes"], rows)


PARTS = {
    "ops": ops, "quantizers": quantizers, "products": products, "provenance": provenance, "study": study,
    "caches": caches, "parallel": parallel, "parallel_gpu": lambda: parallel(RESULTS.name), "scaling": scaling,
    "attention": attention, "experts": experts, "methods": methods, "dispatch": dispatch, "online": online,
    "moves": lambda: steps("moves"), "skewed": lambda: steps("skewed"),
    "speed_products": speed_products, "speed_packed": speed_packed,
    "speed_experts": speed_experts,
    "packed_rates": lambda: packed("packed_rates"), "packed": lambda: packed("packed"),
    "packed_support": lambda: packed("packed_support"),
}  # fmt: skip


PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MARKED = re.compile(r"(<!-- (\w+): generated -->\n).*?(<!-- end -->)", re.S)


def written(text: str, made: dict[str, str]) -> str:
    """A page with its generated parts as they should be; `made` keeps what was made for the pages before."""

    def renew(found: re.Match[str]) -> str:
        name = found[2]
        if name not in PARTS:
            raise ValueError(f"generated part: expected one of {', '.join(PARTS)}, got {name}")
        made[name] = made[name] if name in made else PARTS[name]()
        return f"{found[1]}{made[name]}\n{found[3]}"

    return MARKED.sub(renew, text)


def main() -> int:
    made: dict[str, str] = {}
    texts = {page: page.read_text() for page in PAGES}
    new = {page: written(text, made) for page, text in texts.items()}
    if missing := PARTS.keys() - made:
        raise ValueError(f"pages: expected a place for every generated part, got none for {', '.join(sorted(missing))}")
    if "--check" in sys.argv:
        return int(new != texts)
    for page, text in new.items():
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
