"""What formats and scale rules cost: bits of an element against the error of a tensor."""

from collections.abc import Iterable

import pandas as pd
import torch
from torch import Tensor

from fpk.api import quantize
from fpk.formats import FORMATS, SCHEMES, Format
from fpk.study.measure import decibels, relative_error

COLUMNS = ("scheme", "family", "format", "granularity", "scale_format", "bits", "rel_err", "sqnr_db", "worst", "note")


def scheme_errors(x: Tensor, schemes: Iterable[str] | None = None) -> pd.DataFrame:
    """Quantize a tensor by every scheme and read it back.

    Args:
        x: (M, K) or (E, M, K), fp32, bf16 or fp16.
        schemes: names, None for all of `fpk.list_schemes()` but those that name the same computation twice.

    Returns:
        DataFrame with `COLUMNS`: bits of an element with its share of the scales, relative error (Frobenius), the same
        in dB, and `worst`, the largest error of an element over the largest element of its tensor. A scheme that does
        not take x has NaN and a note.
    """
    names = list(schemes) if schemes is not None else [n for n in SCHEMES if not n.endswith("_token")]
    exact = x.float()
    largest = exact.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    rows: list[dict[str, object]] = []
    for name in names:
        scheme = SCHEMES[name]
        facts: dict[str, object] = dict(
            scheme=name, family=family(scheme.format), format=scheme.format.name, granularity=scheme.granularity.name,
            scale_format=scheme.scale_format,
        )  # fmt: skip
        try:
            q = quantize(x, name)
            back = q.dequantize(torch.float32)
        except (ValueError, NotImplementedError) as error:
            rows.append(facts | dict(note=str(error)))
            continue
        rel_err = relative_error(back, exact)
        worst = float((back - exact).abs().max() / largest)
        rows.append(
            facts
            | dict(bits=8 * q.nbytes / x.numel(), rel_err=rel_err, sqnr_db=decibels(rel_err), worst=worst, note="")
        )
    return pd.DataFrame(rows, columns=list(COLUMNS))


def family(fmt: Format) -> str:
    """int8, int4, fp8, fp6 or fp4."""
    return f"{'fp' if fmt.is_float else 'int'}{fmt.bits}"


def values_of(fmt: str | Format) -> Tensor:
    """Every finite number that a format represents, sorted, fp32; both zeros are one.

    Raises:
        ValueError: an unknown format.
    """
    if isinstance(fmt, str):
        if fmt not in FORMATS:
            raise ValueError(f"values_of.fmt: expected one of {', '.join(FORMATS)}, got {fmt!r}")
        fmt = FORMATS[fmt]
    from fpk.formats import decode

    codes = torch.arange(1 << fmt.bits, dtype=torch.int64).to(torch.uint8)
    if not fmt.is_float:
        half = 1 << (fmt.bits - 1)
        return torch.arange(-half, half, dtype=torch.float32)
    values = decode(codes, fmt)
    return torch.unique(values[values.isfinite()])
