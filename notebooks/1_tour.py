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
# An op is a launcher with everything beside it that is needed to check, tune and time it. On a GPU these cells run the
# kernels; on a CPU the references.

# %%
import torch

import fpk

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
# The relative error of every scheme on the same rows, without the NaN.

# %%
clean = torch.randn(64, 1024, device=device)
for name in fpk.list_schemes():
    q = fpk.quantize(clean, name)
    error = (q.dequantize(torch.float32) - clean).norm() / clean.norm()
    print(f"{name:24s} {8 * q.nbytes / clean.numel():5.2f} bits an element   error {error.item():.4f}")

# %% [markdown]
# ## What may be tuned, and what it must move

# %%
bound = op.bind(x)
configs = list(op.configs(**bound))
cost = op.cost(**bound)
print(len(configs), "candidates, for example", configs[0])
print("a call here would use", op.config_for(x))
print(f"{cost.bytes / 1e3:.0f} kB must cross the memory bus")
