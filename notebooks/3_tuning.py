# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Tuning and the roofline
# All trials of a sweep as a table: which tiles are fast, what a bad choice costs, how many candidates one has to try,
# how a look-up answers for shapes that were never measured, and in the last figure where ops stand below the ceilings
# of the machine.

# %%
from pathlib import Path

import pandas as pd
import torch

import fpk
from fpk.study.cell import tune_here
from fpk.study.charts import regret, roofline, trial_table, tuning_heat_map
from fpk.tune.explain import explain_case
from fpk.tune.export import read_trials
from fpk.tune.lint import device_of

here = Path.cwd() if (Path.cwd() / "tests").is_dir() else Path.cwd().parent
recorded = sorted((here / "tests" / "tune_data").glob("*.parquet"))

# %% [markdown]
# ## Trials
# What a sweep on an H200 left, if it is there; else a short sweep of this machine's own, whose times on a CPU would be
# those of references and are left out.


# %%
def few_trials():
    """A sweep of one shape on this machine."""
    trials, _ = tune_here(fpk.OPS["scaled_mm"], {"M=64": dict(M=64, N=4096, K=4096)}, budget=40)
    return trials


if recorded:
    table = pd.concat([trial_table(read_trials(path)) for path in recorded], ignore_index=True)
    table = table[table["op"] == "scaled_mm"] if (table["op"] == "scaled_mm").any() else table
elif torch.cuda.is_available():
    table = trial_table(few_trials())
else:
    table = None
    print("no recorded trials in tests/tune_data and no GPU: nothing to show until `fpk tune` has run on one")
if table is not None:
    print(f"{len(table)} trials of {table['key'].nunique()} shapes, verdicts {dict(table['status'].value_counts())}")

# %% [markdown]
# ## Which tiles are fast
# The best time of every tile at one shape, whatever its other fields; 1.00 is the best of all. A cross: nothing ran.


# %%
def most_tried(table):
    """The trials of the shape that has most of them, screening only."""
    tiles = table[(table["stage"] == "screen") & table["config.BLOCK_N"].notna()]
    key = tiles["key"].value_counts().index[0]
    return tiles[tiles["key"] == key]


tuning_heat_map(most_tried(table)) if table is not None else None

# %%
if table is not None:
    one = most_tried(table).sort_values("us")
    sizes = {c: one[c].iloc[0] for c in ("key.M", "key.N", "key.K")}
    print(sizes, f"best {one['us'].iloc[0]:.2f} us, median {one['us'].median():.2f} us, worst {one['us'].max():.2f} us")
one[["config", "us", "noise_percent", "registers", "shared_bytes"]].head(8) if table is not None else None

# %% [markdown]
# ## How many candidates one has to try
# With candidates in random order: what the best one so far still loses, a line per shape.

# %%
regret(table[table["key"].isin(table["key"].value_counts().index[:4])]) if table is not None else None

# %% [markdown]
# ## How a look-up answers
# Nothing is measured when an op is called. A shape that is not in the tables borrows the row of its nearest neighbour,
# if that is legal for the arguments; else the default runs.

# %%
gpu = device_of("nv-h200-sm90-132")
op = fpk.OPS["scaled_mm"]
for case in (dict(M=64, N=4096, K=7168), dict(M=50, N=4000, K=7168), dict(M=64, N=4097, K=7168)):
    found = explain_case(op, case, gpu, fpk.db.default())
    print(case, "->", found.level, found.config)
    print(*(f"    {line}" for line in found.lines[:3]), sep="\n")

# %% [markdown]
# ## Below the ceilings
# Operations per byte against what is reached. On the slope the memory rules, on the level the matrix unit does.

# %%
ops = ["scaled_mm", "scaled_mm_group", "mm_weight_only", "quantize_fp8_token"]
if torch.cuda.is_available():
    parts = [fpk.sweep(name, ["llama3_8b/gate_up/*"], ["fpk"], about_ms=15) for name in ops[:3]]
    result = pd.concat([*parts, fpk.sweep(ops[3], None, ["fpk"], about_ms=15)])
else:
    result = fpk.sweep(ops, None, ["fpk"], about_ms=1, rounds=1)
roofline(result)

# %% [markdown]
# A product of few tokens stands on the slope: its time is that of reading the weights, and fewer bits make it faster.
# One of thousands of tokens stands on the level, where only the matrix unit's rate counts.
