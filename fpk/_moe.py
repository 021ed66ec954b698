"""A mixture-of-experts layer from ops: route, sort, permute, product, activation, product, unpermute.

Nothing here computes and nothing waits for the device: every number comes from an op, and the number of rows of an
expert stays on the device, so that a captured graph serves every routing.
"""

from typing import Any

import torch
from torch import Tensor

import fpk.kernels  # noqa: F401  declares every op
from fpk._moe_checks import (
    Experts,
    Static,
    Weight,
    activation_scheme,
    codes_of,
    expect_weights,
    expect_zero_points,
    result_dtype,
    scheme_of_weight,
)
from fpk._moe_shortcuts import down, fits_few, fits_token, through, up
from fpk._pairs import packed_arguments, reads_packed
from fpk._shuffled import Shuffled
from fpk.api import Quantized, quantize
from fpk.check import expect_dtype, expect_rank, expect_shape, fp8_dtype
from fpk.formats import FP8, INT8, Scheme, scheme_of
from fpk.kernels.moe._expert_streams import reads_like, streams_run
from fpk.op import FIXED_BATCH, OPS, batch_must_not_matter

__all__ = ["moe", "moe_experts"]

# quantizers that an activation has a fused form of
_FUSED = {
    "quantize_fp8_token": "act_and_mul_quantize_fp8_token",
    "quantize_fp8_group": "act_and_mul_quantize_fp8_group",
    "quantize_int8_token": "act_and_mul_quantize_int8_token",
}


def moe(
    x: Tensor,
    router_logits: Tensor,
    w13: Experts,
    w2: Experts,
    top_k: int = 2,
    routing: str = "softmax",
    renormalize: bool = True,
    activation: str = "silu",
    act: str = "none",
    bias13: Tensor | None = None,
    bias2: Tensor | None = None,
    expert_map: Tensor | None = None,
    *,
    correction_bias: Tensor | None = None,
    num_expert_group: int = 1,
    topk_group: int = 1,
    routed_scaling_factor: float = 1.0,
    num_zero_experts: int = 0,
    expert_table: Tensor | None = None,
    expert_copies: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """A whole layer, from tokens and router logits to tokens.

    Args:
        x: (T, H) tokens, bf16, fp16 or fp32.
        router_logits: (T, E), fp32, bf16 or fp16, over the experts of all ranks.
        w13, w2, activation, act, bias13, bias2, expert_map, options: as in `moe_experts`.
        top_k, routing, renormalize, correction_bias, num_expert_group, topk_group, routed_scaling_factor: as in the op
            `route`, whose `scoring` is `routing` here.
        num_zero_experts: the last experts of the router, which pass their tokens on as they are.
        expert_table, expert_copies: (logical experts, most copies) and (logical experts,) int32 or int64, where experts
            have copies (the op `map_experts`); w13, w2 and expert_map count physical experts then.

    Returns:
        (T, H) of x's dtype.

    Raises:
        ValueError: a shape, dtype, name or combination does not fit.
        NotImplementedError: products that this device cannot do.
    """
    expect_rank("moe.x", x, 2)
    expect_rank("moe.router_logits", router_logits, 2)
    experts = codes_of(w13).shape[0] if expert_map is None else expert_map.shape[0]
    if expert_table is not None:
        experts = expert_table.shape[0]
    expect_shape("moe.router_logits", router_logits, (x.shape[0], experts + num_zero_experts))
    weights, ids = OPS["route"](
        router_logits, top_k, scoring=routing, renormalize=renormalize, correction_bias=correction_bias,
        num_expert_group=num_expert_group, topk_group=topk_group, routed_scaling_factor=routed_scaling_factor,
    )  # fmt: skip
    if num_zero_experts or expert_table is not None:
        weights, ids, passed = OPS["map_experts"](weights, ids, experts, num_zero_experts, expert_table, expert_copies)
        if num_zero_experts:
            if isinstance(x, Quantized) or "residual" in options:
                raise ValueError("moe.num_zero_experts: expected 0 with Quantized tokens or a residual")
            options |= dict(residual=x, residual_weight=passed)
    return moe_experts(
        x, weights, ids, w13, w2, activation=activation, act=act, bias13=bias13, bias2=bias2, expert_map=expert_map,
        **options,
    )  # fmt: skip


def moe_experts(
    x: Weight,
    weights: Tensor,
    ids: Tensor,
    w13: Experts,
    w2: Experts,
    activation: str = "silu",
    act: str = "none",
    bias13: Tensor | None = None,
    bias2: Tensor | None = None,
    expert_map: Tensor | None = None,
    *,
    gated: bool = True,
    interleaved: bool = False,
    alpha: float | None = None,
    beta: float | None = None,
    limit: float | None = None,
    apply_router_weight_on_input: bool = False,
    input_scale13: Tensor | None = None,
    input_scale2: Tensor | None = None,
    zero_point13: Tensor | None = None,
    zero_point2: Tensor | None = None,
    colsum13: Tensor | None = None,
    colsum2: Tensor | None = None,
    residual: Tensor | None = None,
    residual_weight: Tensor | None = None,
    fast_accum: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The layer behind its router: out[t] = sum_j weights[t, j] * expert_{ids[t, j]}(x[t]).

    Args:
        x: (T, H) tokens, bf16, fp16 or fp32; or already Quantized by the scheme `act`, as they come from other ranks.
        weights: (T, top_k) fp32.
        ids: (T, top_k) int32 or int64; an id out of range is skipped, as is one that expert_map gives -1.
        w13: (E, 2I, H) gate and up of the experts of this rank, halves or `interleaved` rows; (E, I, H) if not gated.
            Quantized by a scheme, Shuffled, or plain in x's dtype.
        w2: (E, H, I), likewise.
        activation, gated, interleaved, alpha, beta, limit: as in the op `act_and_mul`.
        act: "none", or the scheme of the activations of both products: "fp8_token", "fp8_tensor", "fp8_group128",
            "int8_token", "mxfp8_e4m3", "nvfp4" (a global scale per token), ...; needs quantized weights that it has a
            product with.
        bias13, bias2: (E, 2I) or (E, I), and (E, H), fp32, bf16 or fp16, or None; inside the router weight.
        expert_map: (experts of all ranks,) int32 or int64, the number of an expert on this rank or -1; None: all here.
        apply_router_weight_on_input: multiply the tokens by their weight instead of the outputs; top_k 1 only.
        input_scale13, input_scale2: (1, 1) fp32 static scales of the activations, or (E, 1, 1) for one an expert, with
            act "fp8_tensor" or "int8_tensor", or their global scales with "nvfp4"; both or neither. Their values are
            not checked: that would wait for the device.
        zero_point13, zero_point2: int32 or int8 of the input scales' shapes, beside static "int8_tensor" activations.
        colsum13, colsum2: (E, 2I) or (E, I), and (E, H) int32, the sums of the weights' rows, which activations with
            zero points need; None to sum here.
        residual: (T, H) added to the sum before it is rounded, such as the output of shared experts.
        residual_weight: (T, 1) fp32 or None for 1; multiplies residual.
        fast_accum: let FP8 products stay in the tensor core's own accumulator over all of K.
        out_dtype: bf16 or fp16 for Quantized x, whose own dtype is not known; bf16 if None.

    Returns:
        (T, H) of x's dtype, or of out_dtype; the hidden rows are rounded to it after each product and after the
        activation.

    Raises:
        ValueError: a shape, dtype, name or combination does not fit.
        NotImplementedError: products that this device cannot do.
    """
    expect_rank("moe.x", codes_of(x), 2)
    dtype = result_dtype(x, act, apply_router_weight_on_input, out_dtype)
    expect_rank("moe.ids", ids, 2)
    T, top_k = ids.shape
    expect_shape("moe.ids", ids, (codes_of(x).shape[0], top_k))
    expect_shape("moe.weights", weights, (T, top_k))
    expect_dtype("moe.weights", weights, torch.float32)
    E = expect_weights(x, dtype, w13, w2, gated)
    if apply_router_weight_on_input and top_k != 1:
        raise ValueError(f"moe.apply_router_weight_on_input: expected False with top_k > 1, got top_k = {top_k}")
    scheme = activation_scheme(act, {"w13": w13, "w2": w2}, {"13": input_scale13, "2": input_scale2})
    inputs = [
        Static(scale, zero if zero is None else zero.to(torch.int32))
        for scale, zero in ((input_scale13, zero_point13), (input_scale2, zero_point2))
    ]
    expect_zero_points(scheme, inputs)

    parameters = dict(activation=activation, gated=gated, interleaved=interleaved, alpha=alpha, beta=beta, limit=limit)
    if (
        not apply_router_weight_on_input
        and isinstance(x, Tensor) and isinstance(w13, Quantized) and isinstance(w2, Quantized) and scheme is not None
        and fits_token(
            x, ids, w13, w2, scheme, inputs, dtype, bias13 is not None or bias2 is not None, gated, interleaved
        )
    ):  # fmt: skip
        return through(
            x, weights, ids, w13, w2, scheme, dtype, activation=activation, alpha=alpha, beta=beta, limit=limit,
            expert_map=expert_map, residual=residual, residual_weight=residual_weight,
        )  # fmt: skip
    if not apply_router_weight_on_input and fits_few(x, ids, w13, w2, scheme, inputs, dtype):
        tokens = x if scheme is None or isinstance(x, Quantized) else _quantized(x, None, scheme, w13, inputs[0])
        rows: Weight = up(tokens, ids, w13, w2, bias13, expert_map, dtype, parameters)
        if scheme is not None:
            rows = _quantized(codes_of(rows), None, scheme, w2, inputs[1])
        return down(rows, weights, ids, w2, bias2, expert_map, residual, residual_weight, dtype)
    index, position, offs = OPS["sort_by_expert"](ids, E, expert_map)
    inputs = [static.of_rows(offs, T * top_k) for static in inputs]
    on_input = weights if apply_router_weight_on_input else None
    product = dict(offs=offs, out_dtype=dtype, fast_accum=fast_accum)
    own: dict[str, Any] = {}  # of shuffled weights whose gates and ups lie side by side, the product activates them
    if isinstance(w13, Shuffled) and gated and interleaved:
        own = dict(activation=activation, alpha=alpha, beta=beta, limit=limit)
    if on_input is None and gathers(x, scheme, w13, inputs[0], top_k, bias13 is not None):
        rows = x if scheme is None or isinstance(x, Quantized) else _quantized(x, None, scheme, w13, inputs[0])
        hidden = _product(rows, w13, bias13, colsum13, **product, gather=index, top_k=top_k)
    else:
        rows = _permuted(x, index, top_k, offs, scheme, w13, on_input, inputs[0])
        hidden = _product(rows, w13, bias13, colsum13, **product, activated=own)
    rows = hidden if own else _activated(hidden, parameters, offs, scheme, w2, inputs[1])
    out = _product(rows, w2, bias2, colsum2, **product)
    return OPS["moe_unpermute"](
        out, position, None if apply_router_weight_on_input else weights, residual=residual,
        residual_weight=residual_weight,
    )  # fmt: skip


def gathers(
    x: Weight, scheme: Scheme | None, weight: Experts, static: Static, top_k: int, bias: bool = False
) -> bool:  # fmt: skip
    """Does the first product gather its tokens itself, instead of getting them in order?

    That saves a launch and a copy, but loading scattered rows costs time in every tile of columns, more so where scales
    come with them, unless both are copied past the registers (`streams`). Measured on an H200. Configs differ with it,
    so where the batch must not matter it does not here.
    """
    rows = top_k * (FIXED_BATCH if batch_must_not_matter() else codes_of(x).shape[0])
    if isinstance(weight, Shuffled) or (isinstance(weight, Quantized) and reads_packed(x, weight)):
        return False
    if static.by_row:
        return False  # a token has a scale for each of its experts
    if scheme is not None and "zero_point" in scheme.outputs:
        return True  # zero points have no op that moves them
    if scheme is not None and not isinstance(x, Quantized):  # noqa: SIM102  two reasons
        if scheme.product or (scheme.granularity.rows < 0 and static.scale is None):
            return False
    E, N = codes_of(weight).shape[:2]
    if scheme is not None and isinstance(weight, Quantized) and weight.granularity.cols > 0:  # changing scales
        streamed = 64 * E <= rows < 512 * E and N <= 4096 and not bias and _streams(x, scheme, weight)
        return rows > 64 and (N <= 512 or streamed)
    return rows <= 8 * E or N <= 4096


def _streams(x: Weight, scheme: Scheme, weight: Quantized) -> bool:
    """Would `streams` multiply gathered rows of x?"""
    plain = scheme.granularity.cols in (-1, 128) and scheme.scale_format == "fp32"
    blocks = weight.granularity.rows == weight.granularity.cols == 128 and codes_of(x).dtype is not torch.float32
    return plain and blocks and streams_run(weight.codes.device) and reads_like(weight.codes, weight.scale)


def _permuted(
    x: Weight, index: Tensor, top_k: int, offs: Tensor, scheme: Scheme | None, weight: Experts,
    on_input: Tensor | None, static: Static,
) -> Weight:  # fmt: skip
    """Rows for the first product; quantized before they are moved where that gives the same."""
    permute = OPS["moe_permute"]
    if not isinstance(x, Quantized):
        if scheme is None:
            return permute(x, index, top_k, weights=on_input)[0]
        if on_input is not None or static.by_row or (scheme.granularity.rows < 0 and static.scale is None):
            return _quantized(permute(x, index, top_k, weights=on_input)[0], offs, scheme, weight, static)
        x = _quantized(x, None, scheme, weight, static)
    over = x.global_scale
    if over is not None and over.shape[0] > 1:  # one for each token
        over = permute(over, index, top_k)[0]
    if x.granularity.rows < 0 and x.scale.shape == (1, 1):  # one scale for all tokens
        return Quantized(permute(x.codes, index, top_k)[0], x.scale, x.scheme, x.zero_point, check=False)
    stored = x.scale if x.scale.dtype is torch.float32 else x.scale.view(torch.uint8)
    codes, scale = permute(x.codes, index, top_k, stored)
    return Quantized(codes, scale.view(x.scale.dtype), x.scheme, global_scale=over, check=False)


def _activated(
    hidden: Tensor, parameters: dict[str, Any], offs: Tensor, scheme: Scheme | None, weight: Experts,
    static: Static,
) -> Weight:  # fmt: skip
    """Rows for the second product."""
    if scheme is None:
        return OPS["act_and_mul"](hidden, **parameters)
    dtype = _fp8_dtype(scheme, weight)
    if static.scale is not None and dtype and not (scheme.product or static.by_row):
        codes = OPS["act_and_mul_quantize_fp8_static"](hidden, static.scale, **parameters, dtype=dtype)
        return Quantized(codes, static.scale, scheme.name, check=False)
    fused = None if static.by_row else _FUSED.get(scheme.quantizer)
    if fused is None or scheme.options:
        return _quantized(OPS["act_and_mul"](hidden, **parameters), offs, scheme, weight, static)
    if dtype:
        parameters = parameters | dict(dtype=dtype)
    if scheme.granularity.cols > 0:
        parameters = parameters | dict(group=scheme.granularity.cols, scale_format=scheme.scale_format)
    codes, scale = OPS[fused](hidden, **parameters)
    return Quantized(codes, scale, scheme.name, check=False)


def _fp8_dtype(scheme: Scheme, weight: Experts) -> torch.dtype | None:
    """The FP8 type of the activations: that of FP8 weights, which a product of FP8 has on both sides; else None for
    other formats."""
    if scheme.product or scheme.format is INT8:
        return None
    codes = codes_of(weight)
    return codes.dtype if codes.dtype in FP8 and not scheme_of_weight(weight).product else fp8_dtype(codes.device)


def _quantized(x: Tensor, offs: Tensor | None, scheme: Scheme, weight: Experts, static: Static) -> Quantized:
    """Rows in low precision; those of no expert, which lie behind all others, do not count for a common scale."""
    dtype = _fp8_dtype(scheme, weight)
    options: dict[str, Any] = dict(dtype=dtype) if dtype else {}
    if "global_scale" in scheme.outputs:  # one for each token, so that no token changes another's codes
        second: dict[str, Any] = dict(per_token=True) if static.scale is None or static.by_row else {}
        if static.scale is not None:
            second["global_scale"] = static.scale
        return quantize(x, scheme, **second)
    if static.scale is not None:
        name = scheme.name.replace("_tensor", "_token") if static.by_row else scheme.name
        options["rows"] = 1 if static.by_row else -1
        if dtype:
            codes = OPS["quantize_fp8_static"](x, static.scale, **options)
        else:
            codes = OPS["quantize_int8_static"](x, static.scale, static.zero_point, **options)
        return Quantized(codes, static.scale, name, static.zero_point, check=False)
    if scheme.granularity.rows < 0 and offs is not None:
        options["num_valid_tokens"] = offs[-1:]
    return quantize(x, scheme, **options)


def _product(
    rows: Weight, weight: Experts, bias: Tensor | None, colsum: Tensor | None, *, offs: Tensor, out_dtype: torch.dtype,
    fast_accum: bool, gather: Tensor | None = None, top_k: int = 1, activated: dict[str, Any] | None = None,
) -> Tensor:  # fmt: skip
    """Rows times their expert's weights; the op follows from the two schemes, as in `fpk.mm`."""
    order = dict(gather=gather, top_k=top_k)
    if isinstance(weight, Shuffled):
        format = scheme_of(weight.scheme).product
        return OPS["grouped_mm_shuffled"](
            rows, weight.packed, weight.row_scale, offs, format, bias, out_dtype, **activated or {}
        )
    if not isinstance(weight, Quantized):
        return OPS["grouped_mm"](rows, weight, offs, bias, out_dtype, **order)
    if reads_packed(rows, weight):
        arguments = packed_arguments(rows, weight)
        return OPS["grouped_mm_packed"](**arguments, offs=offs, bias=bias, out_dtype=out_dtype)
    block_rows, cols = weight.granularity.rows, weight.granularity.cols
    if not isinstance(rows, Quantized):
        if weight.zero_point is not None:
            raise ValueError(f"moe.act: expected int8 activations for weights with zero points, got none ({weight!r})")
        return OPS["grouped_mm_weight_only"](
            rows, weight.codes, weight.scale, offs, rows=block_rows, cols=cols, bias=bias, out_dtype=out_dtype, **order
        )
    common = dict(bias=bias, out_dtype=out_dtype, fast_accum=fast_accum, **order)
    group, scale = rows.granularity.cols, rows.scale
    if group < 0 and cols < 0:
        zeros: dict[str, Tensor | None] = dict(zero_point_b=weight.zero_point)
        if rows.zero_point is not None:
            sums = weight.codes.sum(2, dtype=torch.int32) if colsum is None else colsum
            zeros |= dict(zero_point_a=rows.zero_point, colsum_b=sums)
        return OPS["grouped_scaled_mm"](rows.codes, weight.codes, scale, weight.scale, offs, **common, **zeros)
    if rows.zero_point is not None or weight.zero_point is not None:
        raise ValueError(f"moe.act: {rows.scheme} and {weight.scheme} have no product with zero points")
    if group < 0:  # a scale of all of K stands in every group, without being copied
        group = cols
        scale = scale.expand(rows.codes.shape[0], -(-rows.codes.shape[1] // group))
    return OPS["grouped_scaled_mm_group"](
        rows.codes, weight.codes, scale, weight.scale, offs, group=group, block_rows=block_rows, block_cols=cols,
        **common,
    )  # fmt: skip
