# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # A tour of one op
# An op is a launcher with everything beside it that is needed to check, tune and time it. You will call one, compare it
# with its reference, see what it costs in accuracy and in bytes, and in the last figure how close it comes to what the
# memory allows. On a GPU these cells run the kernels; on a CPU the references.

# %%
import torch

import fpk
from fpk.study.charts import speedups

device = "cuda" if torch.cuda.is_available() else "cpu"
op = fpk.OPS["quantize_fp8_token"]
print(op)
print(op.__doc__)

# %% [markdown]
# ## Call it, and its reference: the same bits

# %%
x = torch.randn(64, 1024, device=device).bfloat16()
x[3] = 0  # a row of zeros gets a finite scale and zero codes
x[5, 7] = float("nan")  # stays NaN, and does not touch its row's scale
codes, scale = op(x)
expected, expected_scale = op.reference(x)
print("codes equal:", torch.equal(codes.view(torch.uint8), expected.view(torch.uint8)))
print("scales equal:", torch.equal(scale, expected_scale))
print("scale of the zero row:", scale[3].item())

# %% [markdown]
# ## What it costs in accuracy
# One scale per row, 3 bits of mantissa: a relative error of some 2.6 %, whatever the row's magnitude.

# %%
clean = torch.randn(64, 1024, device=device) * torch.logspace(-3, 3, 64, device=device)[:, None]
codes, scale = op(clean)
error = (codes.float() * scale - clean).norm(dim=1) / clean.norm(dim=1)
print(f"rows from 1e-3 to 1e3: relative error {error.min():.4f} to {error.max():.4f}")

# %% [markdown]
# ## What it refuses
# Granularity, shapes and dtypes are checked from metadata, before anything runs.

# %%
try:
    op(clean, scale_ub=torch.ones(2, device=device))
except ValueError as problem:
    print(problem)

# %% [markdown]
# ## What may be tuned, and what it must move
# A config is a plain dictionary of what the launch takes. Calling an op looks one up and never measures.

# %%
bound = op.bind(x)
configs = list(op.configs(**bound))
cost = op.cost(**bound)
print(len(configs), "candidates, for example", configs[0])
print("a call here would use", op.config_for(x))
print(f"{cost.bytes / 1e3:.0f} kB must cross the memory bus")

# %% [markdown]
# ## How close it comes to the memory's limit
# `fpk.sweep` times an op beside what else does the same; for a quantizer that is a copy which moves as many bytes. On a
# CPU it times the reference, on small cases, which says nothing about kernels.

# %%
result = fpk.sweep(op, about_ms=20 if device == "cuda" else 2)
result[["case", "impl", "us", "noise_percent", "gb_per_s", "error"]]

# %%
speedups(result, over="copy")

# %% [markdown]
# A bar that ends at 1 is a quantizer as fast as the copy: nothing is left to win.
