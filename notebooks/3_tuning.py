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
import json
from pathlib import Path

import pandas as pd
import torch

import fpk
from fpk import db
from fpk.study.bench import read_results
from fpk.study.cell import tune_here
from fpk.study.charts import regret, roofline, trial_table, tuning_heat_map
from fpk.tune.explain import explain_case
from fpk.tune.export import read_trials
from fpk.tune.lint import device_of

here = Path.cwd() if (Path.cwd() / "notebooks").is_dir() else Path.cwd().parent
recorded = sorted((here / "tests" / "tune_data").glob("*.parquet")) or sorted(
    (here / "notebooks" / "data").glob("*.gz")
)

# %% [markdown]
# ## Trials
# What a sweep on an H200 left: every candidate that was tried, with its verdict, times and noise. Without the files, a
# short sweep on this machine's GPU.


# %%
def few_trials():
    """A sweep of one shape on this machine."""
    trials, _ = tune_here(fpk.OPS["scaled_mm"], {"M=64": dict(M=64, N=4096, K=4096)}, budget=40)
    return trials


if recorded:
    table = pd.concat([trial_table(read_trials(path)) for path in recorded], ignore_index=True)
    table = table[table["op"] == "scaled_mm"] if (table["op"] == "scaled_mm").any() else table
    print("trials of", ", ".join(path.name for path in recorded))
elif torch.cuda.is_available():
    table = trial_table(few_trials())
else:
    table = None
    print("no recorded trials and no GPU: nothing to show until `fpk tune` has run on one")
if table is not None:
    print(
        f"{len(table)} trials of {table['key'].nunique()} shapes, verdicts {table['status'].value_counts().to_dict()}"
    )

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
    sizes = " ".join(f"{n}={one[f'key.{n}'].iloc[0]}" for n in "MNK")
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
# if that is legal for the arguments; else the default runs. Here the tables hold the best trial of each shape above.


# %%
def tables_of(trials, gpu):
    """A database of the fastest screened candidate of every key, with the median candidate's time beside it."""
    rows = []
    for key, part in trials[trials["us"].notna()].groupby("key"):
        best = part.loc[part["us"].idxmin()]
        times = best["us"], float(part["us"].median())
        rows.append(db.Row(json.loads(key), 1, json.loads(best["config"]), *times, 1.0, 0, best["case"], "here"))
    return db.Tables(db.MemorySource({f"{gpu.id}/scaled_mm.csv": db.dump_table(rows)}, "trials above"))


gpu, op = device_of("nv-h200-sm90-132"), fpk.OPS["scaled_mm"]
tables = tables_of(table, gpu) if table is not None else db.default()
for case in (dict(M=64, N=4096, K=4096), dict(M=50, N=6144, K=4096), dict(M=64, N=4096, K=4096, fast_accum=True)):
    found = explain_case(op, case, gpu, tables)
    print(case, "->", found.level, *(f"\n    {line}" for line in found.lines[:2]))
    print("   ", found.config)

# %% [markdown]
# ## Below the ceilings
# Operations per byte against what is reached: measured now where there is a GPU, else the committed results of an H200.
# On the slope the memory rules, on the level the matrix unit does.


# %%
def measured_now():
    """Products and a quantizer at the sizes of one model."""
    products = [fpk.sweep(n, ["llama3_8b/gate_up/*"], ["fpk"], about_ms=15) for n in ("scaled_mm", "mm_weight_only")]
    return pd.concat([*products, fpk.sweep("quantize_fp8_token", None, ["fpk"], about_ms=15)], ignore_index=True)


committed = here / "results" / "nv-h200-sm90-132" / "products.csv"
result = measured_now() if torch.cuda.is_available() else read_results(committed)
print(f"{result['gpu'].iloc[0]}, torch {result['torch'].iloc[0]}, triton {result['triton'].iloc[0]}")
roofline(result)

# %% [markdown]
# A product of few tokens stands on the slope: its time is that of reading the weights, and fewer bits make it faster.
# One of thousands of tokens stands on the level, where only the matrix unit's rate counts.
