# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Formats and scale rules
# Which numbers can 8, 6 and 4 bits represent, what does a scale per tensor, row, group or block add, and what does a
# bit buy? The last figure answers with the error of every scheme over the bits it takes, on data with outliers.

# %%
import pandas as pd
import torch

import fpk
from fpk.study.charts import error_against_bits, figure, legend, logarithmic, number_lines, style, tidy
from fpk.study.formats import scheme_errors, values_of

device = "cuda" if torch.cuda.is_available() else "cpu"
small = device == "cpu"
torch.manual_seed(0)

# %% [markdown]
# ## What each format represents
# Floating-point formats spend their codes evenly on every binade, integers evenly on the line. e5m2 reaches far and is
# coarse, e2m1 has seven positive values.

# %%
number_lines(["e4m3fn", "e5m2", "e3m2", "e2m3", "e2m1", "int8", "int4"])

# %%
pd.DataFrame(
    [dict(format=n, values=len(values_of(n)), largest=values_of(n).max().item(), step_at_1=2.0**-f.mantissa_bits)
     for n in ("e4m3fn", "e5m2", "e3m2", "e2m3", "e2m1") for f in [fpk.formats.FORMATS[n]]]
)  # fmt: skip

# %% [markdown]
# ## Two kinds of data
# A Gaussian, and the same with one column in a hundred thirty times as large, which is what activations look like.

# %%
rows, columns = (64, 1024) if small else (4096, 8192)
gaussian = torch.randn(rows, columns, device=device).bfloat16()
outliers = gaussian.clone()
outliers[:, ::100] *= 30
tables = {"gaussian": scheme_errors(gaussian), "outliers": scheme_errors(outliers)}
both = tables["gaussian"][["scheme", "bits", "rel_err"]].merge(
    tables["outliers"][["scheme", "rel_err"]], on="scheme", suffixes=("", ", outliers")
)
both.round(4)

# %% [markdown]
# Note what outliers do: integers with one scale lose most, as all their steps are as wide as the largest element asks
# for; floating-point formats hardly notice, because the norm of the error is ruled by the largest elements, whose
# *relative* error stays. The mean over elements tells another story:


# %%
def error_of_elements(x, scheme):
    """Median over elements of the relative error of each."""
    back = fpk.quantize(x, scheme).dequantize(torch.float32)
    return ((back - x.float()).abs() / x.float().abs().clamp(min=1e-6)).median().item()


shown = ["fp8_tensor", "fp8_group128", "int8_tensor", "int8_channel", "int8_group128", "mxfp4", "nvfp4"]
pd.DataFrame(
    [dict(scheme=s, gaussian=error_of_elements(gaussian, s), outliers=error_of_elements(outliers, s)) for s in shown]
).round(4)

# %% [markdown]
# ## How large may a group be?
# The same format with a scale for 32 to 512 elements of a row. On a Gaussian, integers gain from small groups and FP8
# does not. With outliers both gain, for a reason worth knowing: the largest element of a group sets its scale, so it is
# represented exactly, and where it dominates the norm, the error of the norm falls with it.

# %%
made, (left, right) = figure(2.8, 1, 2, sharey=True)
groups = (32, 64, 128, 256, 512)
for ax, x, name in ((left, gaussian, "gaussian"), (right, outliers, "outliers")):
    for number, kind in enumerate(("fp8", "int8")):
        quantizer = fpk.OPS[f"quantize_{kind}_group"]
        errors = []
        for group in groups:
            codes, scale = quantizer(x, group=group)
            back = (codes.float().view(rows, -1, group) * scale[..., None]).flatten(1)
            errors.append(100 * ((back - x.float()).norm() / x.float().norm()).item())
        ax.plot(groups, errors, label=kind, **style(number))
    logarithmic(ax)
    tidy(ax, f"elements of a group, {name}", "relative error, %" if ax is left else "")
legend(left)
made

# %% [markdown]
# ## What a bit buys

# %%
error_against_bits(tables["gaussian"])

# %%
error_against_bits(tables["outliers"])

# %% [markdown]
# Read along a column: at 8 bits, INT8 with a scale per group is the most accurate for these data, and loses the most
# when its scale has to cover an outlier. Read along a row: 6 bits of e2m3 with a scale for 32 elements come close to
# FP8. At 4 bits, small groups pay: NVFP4's scale for 16 elements beats MXFP4's power of two for 32.
