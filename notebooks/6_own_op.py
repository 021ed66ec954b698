# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Writing an op of your own
# One cell declares an op: reference, kernel, candidates, cost, inputs, launcher. The same machinery then checks, tunes
# and times it. The last figure shows what tuning was worth. Without a GPU the kernel runs in Triton's interpreter:
# right for fp32 and fp16, slow, and with times that say nothing about a GPU.

# %%
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import triton
import triton.language as tl
from torch import Tensor

import fpk
from fpk.check import assert_close, expect_dtype, expect_inner_contiguous, expect_rank
from fpk.db import Config, bucket
from fpk.op import Cost, Kernel, op
from fpk.samples import KINDS, sample
from fpk.study.cell import tune_here
from fpk.study.charts import figure, style, tidy

device = "cuda" if torch.cuda.is_available() else "cpu"

# %% [markdown]
# ## The op
# `rms_norm(x, weight, eps)`: every row divided by its root mean square, times a weight. The reference is the
# specification and comes first; the kernel computes in fp32.


# %%
def reference(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * inverse * weight.float()).to(x.dtype)


def check(x: Tensor, weight: Tensor, **_):
    expect_rank("rms_norm.x", x, 2)
    expect_dtype("rms_norm.x", x, torch.float32, torch.bfloat16, torch.float16)
    expect_inner_contiguous("rms_norm.x", x)  # the kernel takes the stride of rows only
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm.weight: expected ({x.shape[-1]},), got {tuple(weight.shape)}")


@triton.jit(do_not_specialize=["M"])
def kernel(x_ptr, weight_ptr, out_ptr, M, K, stride_xm, eps, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_K)
    mask = (rows < M)[:, None] & (cols < K)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_xm + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=1) / K + eps)
    weight = tl.load(weight_ptr + cols, mask=cols < K, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows[:, None] * K + cols[None, :], x * inverse[:, None] * weight[None, :], mask=mask)


def configs(x: Tensor, **_):
    width = triton.next_power_of_2(x.shape[-1])
    for rows in (4, 1, 2, 8, 16):
        for warps in (4, 1, 2, 8, 16):
            if rows * width <= 65536:
                yield Config(BLOCK_M=rows, BLOCK_K=width, num_warps=warps)


def inputs(*, M, K, dtype=torch.float32, kind="normal", device="cuda", seed=0):
    return dict(x=sample((M, K), dtype, kind, device, seed), weight=sample((K,), dtype, "normal", device, seed + 1))


# %% [markdown]
# ## Its parts together
# `key` says what a measurement depends on, `cost` what the op cannot avoid, `domain` what the tests draw from.


# %%
@op(
    reference=reference, check=check, inputs=inputs, tol=1e-2, kernels=dict(rows=Kernel(kernel)), configs=configs,
    domain=dict(M=(0, 1, 5, 33), K=(1, 16, 100, 257), dtype=(torch.float32, torch.float16), kind=KINDS),
    key=lambda x, **_: dict(M=bucket(x.shape[0]), K=x.shape[1], x=str(x.dtype)),
    cost=lambda x, **_: Cost(flops=4 * x.numel(), bytes=2 * x.numel() * x.element_size()),
    cases=dict(prefill=dict(M=4096, K=4096, dtype=torch.bfloat16), decode=dict(M=64, K=4096, dtype=torch.bfloat16)),
)  # fmt: skip
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, config: Config) -> Tensor:
    """Divide every row by its root mean square, and multiply by a weight."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        settings = {n: v for n, v in config.items() if n != "kernel"}
        kernel[(triton.cdiv(x.shape[0], config["BLOCK_M"]),)](x, weight, out, *x.shape, x.stride(0), eps, **settings)
    return out


print(rms_norm, fpk.OPS["rms_norm"] is rms_norm)

# %% [markdown]
# ## Its law
# Every draw of the domain, with the first candidates, against the reference.

# %%
drawn = 0
for M in rms_norm.domain["M"]:
    for K in rms_norm.domain["K"]:
        for dtype in rms_norm.domain["dtype"]:
            arguments = rms_norm.inputs(M=M, K=K, dtype=dtype, device=device, seed=drawn)
            bound = rms_norm.bind(**arguments)
            for config in list(rms_norm.configs(**bound))[:2]:
                out = rms_norm.launch(**arguments, config=config)
                assert_close(out, rms_norm.reference(**arguments), rms_norm.tolerance(bound))
                drawn += 1
print(drawn, "draws agree with the reference")

# %% [markdown]
# ## Tune it
# Every candidate is checked against the reference before it is timed. `tune_here` works in this process; ops of the
# package are tuned by `fpk tune` in processes that may crash.

# %%
cases = None if device == "cuda" else {"small": dict(M=16, K=256)}
trials, winners = tune_here(rms_norm, cases, budget=25)
trials[["case", "stage", "status", "config", "us", "noise_percent"]].head(10)

# %% [markdown]
# ## Use what was found

# %%
arguments = rms_norm.inputs(**(cases or rms_norm.cases)["prefill" if cases is None else "small"], device=device)
print("default:", next(iter(rms_norm.configs(**rms_norm.bind(**arguments)))))
with fpk.use(winners):
    print("tuned:  ", rms_norm.config_for(**arguments))

# %% [markdown]
# ## What tuning was worth

# %%
made, (ax,) = figure(3.0)
screened = trials[(trials["stage"] == "screen") & (trials["status"] == "ok")]
for number, (case, part) in enumerate(screened.groupby("case", sort=False)):
    default = part[
        part["config"] == fpk.tune.trials.canonical(next(iter(rms_norm.configs(**rms_norm.bind(**arguments)))))
    ]
    ax.plot(sorted(part["us"] / part["us"].min()), label=case, **(style(number) | dict(markersize=3)))
    if len(default):
        ax.axhline(default["us"].iloc[0] / part["us"].min(), color=style(number)["color"], linewidth=0.8, linestyle=":")
ax.legend(fontsize=8, frameon=False)
tidy(ax, "candidates, fastest first", "time over the best (dotted: default)")
made

# %% [markdown]
# To keep the op, move the cell into `fpk/kernels/<family>/rms_norm.py`: its laws, cross-compilation, tuning, benchmark
# and documentation follow from its being there.
