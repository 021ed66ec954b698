# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # A model, and a scheme for every layer
# Measure a language model under several schemes, see which layers suffer, then let a budget of bytes pick a scheme for
# every layer. The last figure compares mixed schemes with uniform ones. The model is SmolLM2-135M from a PyPI package;
# small sizes take two of its thirty blocks.

# %%
import os

import pandas as pd
import torch

from fpk.study.charts import figure, legend, style, tidy
from fpk.study.measure import perplexity, run_study
from fpk.study.mixed import pick_schemes, quantized_by
from fpk.study.model import StudyError, load_model
from fpk.study.plots import plot_cost_and_gain, plot_layer_sqnr
from fpk.study.text import load_text

full = torch.cuda.is_available() or os.environ.get("FPK_NOTEBOOKS") == "full"
try:
    subject = load_model(layers=None if full else 2)
except StudyError as problem:
    subject = None
    print(problem)

# %% [markdown]
# ## Schemes one by one
# Perplexity on real text; errors of layer outputs on the activations that each layer sees.

# %%
schemes = ["int8_channel:int8_token", "fp8_channel:fp8_token", "mxfp6_e2m3:none", "nvfp4:none", "mxfp4:none"]
schemes = schemes if full else schemes[::2]
if subject:
    sequences, length = (3, 512) if torch.cuda.is_available() else (1, 256) if full else (1, 32)
    text = load_text(subject, "sotu", sequences, length)
    study = run_study(subject, [text], schemes)
study.summary()[["scheme", "bytes", "sqnr_db", "rel_err", "perplexity[sotu]"]].round(3) if subject else None

# %%
plot_cost_and_gain(study) if subject else None

# %%
plot_layer_sqnr(study) if subject else None

# %% [markdown]
# ## Which layers suffer
# The kinds of layers differ more than the blocks.

# %%
if subject:
    layers = study.layers[study.layers["scheme"] != "none"]
    kinds = layers.pivot_table(index="kind", columns="scheme", values="rel_err", aggfunc="median")
(100 * kinds).round(2) if subject else None

# %% [markdown]
# ## A budget
# Every layer may have any of the schemes, or stay as it is. `pick_schemes` spends bytes where they lower the sum of
# squared relative errors most.


# %%
def measure(choice):
    """Perplexity of the model under a choice of schemes."""
    with quantized_by(subject.model, choice):
        return perplexity(subject.model, text.tokens)


mixed = []
if subject:
    sums = study.layers.groupby("scheme", sort=False)["bytes"].sum()
    for share in (0.30, 0.36, 0.42, 0.50) if full else (0.30, 0.50):
        choice = pick_schemes(study.layers, int(share * sums["none"]))
        counts = dict(choice["scheme"].value_counts())
        mixed.append(dict(budget=share, bytes=choice["bytes"].sum(), perplexity=measure(choice), schemes=counts))
pd.DataFrame(mixed)

# %% [markdown]
# ## Mixed against uniform

# %%
made, (ax,) = figure(3.4)
if subject:
    table = study.summary()
    uniform = table[table["scheme"] != "none"]
    ax.plot(
        uniform["bytes"] / 1e6, uniform["perplexity[sotu]"], label="one scheme", **(style(1) | dict(linestyle="none"))
    )
    for row in uniform.to_dict("records"):
        ax.annotate(row["scheme"], (row["bytes"] / 1e6, row["perplexity[sotu]"]), xytext=(6, 4), fontsize=7,
                    textcoords="offset points")  # fmt: skip
    picked = pd.DataFrame(mixed)
    ax.plot(picked["bytes"] / 1e6, picked["perplexity"], label="a scheme per layer", **style(0))
    ax.axhline(table["perplexity[sotu]"].iloc[0], color="black", linewidth=0.8, linestyle=":")
    ax.margins(x=0.2, y=0.15)
    ax.ticklabel_format(style="plain", axis="y")
tidy(ax, "bytes of the quantized layers, MB", "perplexity (dotted: unquantized)")
legend(ax)
made

# %% [markdown]
# Lower left is better. Between the sizes of the uniform schemes, a mixed one gets much of the larger scheme's accuracy
# for part of its bytes. With so few tokens, differences of a percent or two are noise.
