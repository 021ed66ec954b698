# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Mixture of experts
# Where do time and error of an expert layer go, and what does skewed routing do to it? The last figure compares even
# and skewed routing. On a CPU sizes are cut and times are those of references: read only the structure.

# %%
import pandas as pd
import torch

import fpk
from fpk.study.charts import figure, legend, logarithmic, style, tidy
from fpk.study.moe_layer import expert_load, layer_errors, plot_layer_errors, plot_stages, time_stages

device = "cuda" if torch.cuda.is_available() else "cpu"
small = device == "cpu"
model, shrink = "qwen3_30b_a3b", 32 if small else 1
torch.manual_seed(0)

# %% [markdown]
# ## Where the time goes
# A layer is eight ops. Each is timed by itself; their sum is what a layer would take without overlaps.

# %%
quick = dict(about_ms=1, rounds=1) if small else dict(about_ms=15)
stages = time_stages(model, (1, 8) if small else (1, 16, 128, 1024), shrink, **quick)
stages.pivot_table(index="stage", columns="tokens", values="us", sort=False).round(1)

# %%
plot_stages(stages)

# %% [markdown]
# ## Where the error goes
# The layer's output against the same layer in fp32, with weights alone quantized and with activations too.

# %%
T, H, I, E, top_k = (32, 128, 128, 8, 2) if small else (256, 2048, 768, 32, 8)
x = torch.randn(T, H, device=device).bfloat16()
logits = torch.randn(T, E, device=device)
w13 = (torch.randn(E, 2 * I, H, device=device) / H**0.5).bfloat16()
w2 = (torch.randn(E, H, I, device=device) / I**0.5).bfloat16()
schemes = ["fp8_channel:fp8_token", "fp8_block128:fp8_group128", "int8_channel:int8_token", "fp8_tensor:fp8_tensor"]
errors = layer_errors(schemes, x, logits, w13, w2, top_k)
errors.round(4)

# %%
plot_layer_errors(errors)

# %% [markdown]
# ## Skew
# Real routers prefer some experts. A bias on the logits makes a skewed load; the product's time depends on how rows
# share tiles: an expert with one row costs a whole tile.

# %%
bias = torch.linspace(2, -2, E, device=device)
loads = pd.DataFrame({"even": expert_load(logits, top_k), "skewed": expert_load(logits + bias, top_k)})
print(f"rows of the busiest expert: even {loads['even'].max()}, skewed {loads['skewed'].max()}, of {T * top_k}")

# %%
experts, per_token, hidden, inner, _ = fpk.shapes.MOE_LAYERS[model]
size = dict(N=2 * inner // shrink, K=hidden // shrink, E=experts)
counts = (2, 8) if small else (16, 64, 256, 1024)
cases = {f"{s}/T={t}": dict(M=t * per_token, spread=s, **size) for s in ("even", "skewed", "one") for t in counts}
skew = fpk.sweep("grouped_scaled_mm", cases, ["fpk"], **quick)
skew = skew.assign(spread=skew["case"].str.partition("/")[0], tokens=skew["M"] // per_token)
skew.pivot_table(index="spread", columns="tokens", values="us", sort=False).round(1)

# %%
made, (left, right) = figure(3.0, 1, 2)
for number, (name, load) in enumerate(loads.items()):
    left.step(range(E), sorted(load, reverse=True), where="mid", label=name, **(style(number) | dict(marker="")))
tidy(left, "experts, busiest first", "rows")
legend(left)
for number, (name, part) in enumerate(skew.groupby("spread", sort=False)):
    right.plot(part["tokens"], part["us"], label=name, **style(number))
logarithmic(right)
tidy(right, "tokens", "first product, µs")
legend(right, 3)
made

# %% [markdown]
# "one": all rows at one expert, the fewest weights to read and the fullest tiles. Evenly spread rows touch every
# expert's weights, which is what few tokens pay for.
