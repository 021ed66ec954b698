"""Generated tables of the steps between an expert layer's products, and of skewed routing, for readme.py."""

from readme import geomean, rows_of, table


def moves() -> str:
    """Steps between products, beside a device copy of as many bytes, or what was faster: the mean over models."""
    copy = "device copy of as many bytes"
    groups: dict[tuple[str, str, int], list[dict[str, str]]] = {}
    for r in rows_of("moe"):
        if r["stage"] in ("quantize", "permute", "activation", "unpermute") and int(r["T"]) >= 1024 and r["other"]:
            groups.setdefault((r["stage"], r["scheme"], int(r["T"])), []).append(r)
    rows = []
    for (stage, scheme, tokens), found in sorted(groups.items()):
        ratios = [float(r["ratio"]) for r in found]
        others = ", ".join(sorted({r["other"] for r in found} - {copy}))
        mean, lowest = f"{geomean(ratios):.2f}", f"{min(ratios):.2f}"
        rows.append([stage, f"`{scheme}`", str(tokens), str(len(found)), mean, lowest, others or "-"])
    return table(
        [
            "step",
            "weights:activations",
            "tokens",
            "models",
            "copy, or that / fpk",
            "lowest",
            "faster than the copy at some model",
        ],
        rows,
    )


def skewed() -> str:
    """Layers under Zipf routing by those under balanced routing: the largest quotient over models."""
    us = {
        (r["scheme"], int(r["T"]), r["model"], r["routing"]): float(r["us"])
        for r in rows_of("moe")
        if r["stage"] == "layer"
    }
    groups: dict[tuple[str, int], list[float]] = {}
    for (scheme, tokens, model, routing), time in us.items():
        if routing == "zipf" and (scheme, tokens, model, "balanced") in us:
            groups.setdefault((scheme, tokens), []).append(time / us[scheme, tokens, model, "balanced"])
    counts = sorted({tokens for _, tokens in groups})
    rows = [
        [f"`{scheme}`", *(f"{max(groups[scheme, t]):.2f}" if (scheme, t) in groups else "-" for t in counts)]
        for scheme in sorted({scheme for scheme, _ in groups})
    ]
    return table(["weights:activations", *(f"{t} tokens" for t in counts)], rows)


PARTS = {"moves": moves, "skewed": skewed}
