"""A mixture-of-experts layer from ops: route, sort, permute, product, activation, product, unpermute.

Nothing here computes and nothing waits for the device: every number comes from an op, and the number of rows of an
expert stays on the device, so that a captured graph serves every routing.
"""

from typing import Any

import torch
from torch import Tensor

import fpk.kernels  # noqa: F401  declares every op
from fpk._pairs import no_product, packed_arguments, reads_packed
from fpk.api import Quantized, quantize
from fpk.check import FLOAT_INPUTS, expect_dtype, expect_rank, expect_shape, fp8_dtype
from fpk.formats import FP8, INT8, Scheme, scheme_of
from fpk.op import OPS

__all__ = ["moe", "moe_experts"]

# quantizers that an activation has a fused form of
_FUSED = {
    "quantize_fp8_token": "act_and_mul_quantize_fp8_token",
    "quantize_fp8_group": "act_and_mul_quantize_fp8_group",
    "quantize_int8_token": "act_and_mul_quantize_int8_token",
}

Weight = Tensor | Quantized


def moe(
    x: Tensor,
    router_logits: Tensor,
    w13: Weight,
    w2: Weight,
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
    **options: Any,
) -> Tensor:
    """A whole layer, from tokens and router logits to tokens.

    Args:
        x: (T, H) tokens, bf16, fp16 or fp32.
        router_logits: (T, E), fp32, bf16 or fp16, over the experts of all ranks.
        w13, w2, activation, act, bias13, bias2, expert_map, options: as in `moe_experts`.
        top_k, routing, renormalize, correction_bias, num_expert_group, topk_group, routed_scaling_factor: as in the op
            `route`, whose `scoring` is `routing` here.

    Returns:
        (T, H) of x's dtype.

    Raises:
        ValueError: a shape, dtype, name or combination does not fit.
        NotImplementedError: products that this device cannot do.
    """
    expect_rank("moe.x", x, 2)
    expect_rank("moe.router_logits", router_logits, 2)
    experts = _codes(w13).shape[0] if expert_map is None else expert_map.shape[0]
    expect_shape("moe.router_logits", router_logits, (x.shape[0], experts))
    weights, ids = OPS["route"](
        router_logits, top_k, scoring=routing, renormalize=renormalize, correction_bias=correction_bias,
        num_expert_group=num_expert_group, topk_group=topk_group, routed_scaling_factor=routed_scaling_factor,
    )  # fmt: skip
    return moe_experts(
        x, weights, ids, w13, w2, activation=activation, act=act, bias13=bias13, bias2=bias2, expert_map=expert_map,
        **options,
    )  # fmt: skip


def moe_experts(
    x: Weight,
    weights: Tensor,
    ids: Tensor,
    w13: Weight,
    w2: Weight,
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
    fast_accum: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The layer behind its router: out[t] = sum_j weights[t, j] * expert_{ids[t, j]}(x[t]).

    Args:
        x: (T, H) tokens, bf16, fp16 or fp32; or already Quantized by the scheme `act`, as they come from other ranks.
        weights: (T, top_k) fp32.
        ids: (T, top_k) int32 or int64; an id out of range is skipped, as is one that expert_map gives -1.
        w13: (E, 2I, H) gate and up of the experts of this rank, halves or `interleaved` rows; (E, I, H) if not gated.
            Quantized by a scheme, or plain in x's dtype.
        w2: (E, H, I), likewise.
        activation, gated, interleaved, alpha, beta, limit: as in the op `act_and_mul`.
        act: "none", or the scheme of the activations of both products: "fp8_token", "fp8_tensor", "fp8_group128",
            "int8_token", "mxfp8_e4m3", "nvfp4" (a global scale per token), ...; needs quantized weights that it has a
            product with.
        bias13, bias2: (E, 2I) or (E, I), and (E, H), fp32, bf16 or fp16, or None; inside the router weight.
        expert_map: (experts of all ranks,) int32 or int64, the number of an expert on this rank or -1; None: all here.
        apply_router_weight_on_input: multiply the tokens by their weight instead of the outputs; top_k 1 only.
        input_scale13, input_scale2: (1, 1) fp32 static scales of the activations, with act "fp8_tensor" or
            "int8_tensor", or their global scales with "nvfp4"; both or neither. Their values are not checked: that
            would wait for the device.
        fast_accum: let FP8 products stay in the tensor core's own accumulator over all of K.
        out_dtype: bf16 or fp16 for Quantized x, whose own dtype is not known; bf16 if None.

    Returns:
        (T, H) of x's dtype, or of out_dtype; the hidden rows are rounded to it after each product and after the
        activation.

    Raises:
        ValueError: a shape, dtype, name or combination does not fit.
        NotImplementedError: products that this device cannot do.
    """
    expect_rank("moe.x", _codes(x), 2)
    dtype = _out_dtype(x, act, apply_router_weight_on_input, out_dtype)
    expect_rank("moe.ids", ids, 2)
    T, top_k = ids.shape
    expect_shape("moe.ids", ids, (_codes(x).shape[0], top_k))
    expect_shape("moe.weights", weights, (T, top_k))
    expect_dtype("moe.weights", weights, torch.float32)
    E = _expect_weights(x, dtype, w13, w2, gated)
    if apply_router_weight_on_input and top_k != 1:
        raise ValueError(f"moe.apply_router_weight_on_input: expected False with top_k > 1, got top_k = {top_k}")
    scheme = _activation_scheme(act, {"w13": w13, "w2": w2}, {"13": input_scale13, "2": input_scale2})

    index, position, offs = OPS["sort_by_expert"](ids, E, expert_map)
    on_input = weights if apply_router_weight_on_input else None
    rows = _permuted(x, index, top_k, offs, scheme, w13, on_input, input_scale13)
    hidden = _product(rows, w13, offs, bias13, dtype, fast_accum)
    parameters = dict(activation=activation, gated=gated, interleaved=interleaved, alpha=alpha, beta=beta, limit=limit)
    rows = _activated(hidden, parameters, offs, scheme, w2, input_scale2)
    out = _product(rows, w2, offs, bias2, dtype, fast_accum)
    return OPS["moe_unpermute"](out, position, None if apply_router_weight_on_input else weights)


def _codes(weight: Weight) -> Tensor:
    return weight.codes if isinstance(weight, Quantized) else weight


def _scheme(weight: Weight) -> Scheme:
    assert isinstance(weight, Quantized)
    return scheme_of(weight.scheme)


def _out_dtype(x: Weight, act: str, on_input: bool, wanted: torch.dtype | None) -> torch.dtype:
    """What the layer computes in between and gives back; ValueError for tokens that do not fit the other arguments."""
    if not isinstance(x, Quantized):
        expect_dtype("moe.x", x, *FLOAT_INPUTS)
        if wanted not in (None, x.dtype):
            raise ValueError(f"moe.out_dtype: expected None or x's {x.dtype}, got {wanted}")
        return x.dtype
    if x.scheme != act:
        raise ValueError(f"moe.x: expected tokens quantized by act {act!r}, got {x.scheme}")
    if on_input:
        raise ValueError("moe.apply_router_weight_on_input: expected False with Quantized x, got True")
    dtype = wanted or torch.bfloat16
    if dtype not in FLOAT_INPUTS:
        raise ValueError(f"moe.out_dtype: expected one of {', '.join(map(str, FLOAT_INPUTS))}, got {dtype}")
    return dtype


def _expect_weights(x: Weight, dtype: torch.dtype, w13: Weight, w2: Weight, gated: bool) -> int:
    """Raise ValueError unless both weights fit x and each other; the number of experts."""
    for name, weight in (("w13", w13), ("w2", w2)):
        expect_rank(f"moe.{name}", _codes(weight), 3)
        if isinstance(weight, Quantized):
            if weight.zero_point is not None and not _scheme(weight).product:
                raise ValueError(f"moe.{name}: expected weights without zero points, got {weight!r}")
        else:
            expect_dtype(f"moe.{name}", weight, dtype)
    E, H, I = tuple(w2.shape or ())
    wanted = (E, 2 * I if gated else I, H)
    if tuple(w13.shape or ()) != wanted:
        raise ValueError(f"moe.w13: expected {wanted}, got {tuple(w13.shape or ())}")
    wide = tuple(x.shape or ())
    if wide != (_codes(x).shape[0], H):
        raise ValueError(f"moe.x: expected ({_codes(x).shape[0]}, {H}), got {wide}")
    return E


def _activation_scheme(act: str, weights: dict[str, Weight], static: dict[str, Tensor | None]) -> Scheme | None:
    """The scheme of the activations, None for "none"; ValueError where it has no product with the weights."""
    given = [name for name, scale in static.items() if scale is not None]
    if act == "none":
        if given:
            raise ValueError(f"moe.input_scale{given[0]}: expected None with act 'none', got a tensor")
        return None
    scheme = scheme_of(act)
    if scheme.granularity.rows > 1 or "zero_point" in scheme.outputs:
        raise ValueError(f"moe.act: expected symmetric codes with a scale per tensor, token or group, got {act!r}")
    for name, weight in weights.items():
        if not isinstance(weight, Quantized):
            raise ValueError(f"moe.{name}: expected Quantized weights with act {act!r}, got a plain tensor")
        if reason := no_product(_scheme(weight), scheme):
            raise ValueError(f"moe.act: {reason} ({name})")
    if given:
        if scheme.granularity.rows > 0 and "global_scale" not in scheme.outputs:
            raise ValueError(f"moe.input_scale{given[0]}: expected None with act {act!r}, whose scales are dynamic")
        for name, scale in static.items():
            if scale is None:
                raise ValueError(f"moe.input_scale{name}: expected a tensor, as the other input scale, got None")
            expect_shape(f"moe.input_scale{name}", scale, (1, 1))
            expect_dtype(f"moe.input_scale{name}", scale, torch.float32)
    return scheme


def _permuted(
    x: Weight, index: Tensor, top_k: int, offs: Tensor, scheme: Scheme | None, weight: Weight,
    on_input: Tensor | None, static: Tensor | None,
) -> Weight:  # fmt: skip
    """Rows for the first product; quantized before they are moved where that gives the same."""
    permute = OPS["moe_permute"]
    if not isinstance(x, Quantized):
        if scheme is None:
            return permute(x, index, top_k, weights=on_input)[0]
        if on_input is not None or (scheme.granularity.rows < 0 and static is None):
            return _quantized(permute(x, index, top_k, weights=on_input)[0], offs, scheme, weight, static)
        x = _quantized(x, None, scheme, weight, static)
    over = x.global_scale
    if over is not None and over.shape[0] > 1:  # one for each token
        over = permute(over, index, top_k)[0]
    if x.granularity.rows < 0 and x.scale.shape == (1, 1):  # one scale for all tokens
        return Quantized(permute(x.codes, index, top_k)[0], x.scale, x.scheme, check=False)
    stored = x.scale if x.scale.dtype is torch.float32 else x.scale.view(torch.uint8)
    codes, scale = permute(x.codes, index, top_k, stored)
    return Quantized(codes, scale.view(x.scale.dtype), x.scheme, global_scale=over, check=False)


def _activated(
    hidden: Tensor, parameters: dict[str, Any], offs: Tensor, scheme: Scheme | None, weight: Weight,
    static: Tensor | None,
) -> Weight:  # fmt: skip
    """Rows for the second product."""
    if scheme is None:
        return OPS["act_and_mul"](hidden, **parameters)
    dtype = _fp8_dtype(scheme, weight)
    if static is not None and dtype and not scheme.product:
        codes = OPS["act_and_mul_quantize_fp8_static"](hidden, static, **parameters, dtype=dtype)
        return Quantized(codes, static, scheme.name, check=False)
    fused = _FUSED.get(scheme.quantizer)
    if fused is None or scheme.options:
        return _quantized(OPS["act_and_mul"](hidden, **parameters), offs, scheme, weight, static)
    if dtype:
        parameters = parameters | dict(dtype=dtype)
    if scheme.granularity.cols > 0:
        parameters = parameters | dict(group=scheme.granularity.cols, scale_format=scheme.scale_format)
    return Quantized(*OPS[fused](hidden, **parameters), scheme.name, check=False)


def _fp8_dtype(scheme: Scheme, weight: Weight) -> torch.dtype | None:
    """The FP8 type of the activations: that of FP8 weights, which a product of FP8 has on both sides; else None for
    other formats."""
    if scheme.product or scheme.format is INT8:
        return None
    codes = _codes(weight)
    return codes.dtype if codes.dtype in FP8 and not _scheme(weight).product else fp8_dtype(codes.device)


def _quantized(x: Tensor, offs: Tensor | None, scheme: Scheme, weight: Weight, static: Tensor | None) -> Quantized:
    """Rows in low precision; those of no expert, which lie behind all others, do not count for a common scale."""
    dtype = _fp8_dtype(scheme, weight)
    options: dict[str, Any] = dict(dtype=dtype) if dtype else {}
    if "global_scale" in scheme.outputs:  # one for each token, so that no token changes another's codes
        return quantize(x, scheme, **(dict(per_token=True) if static is None else dict(global_scale=static)))
    if static is not None:
        name = "quantize_fp8_static" if options else "quantize_int8_static"
        return Quantized(OPS[name](x, static, **options), static, scheme.name, check=False)
    if scheme.granularity.rows < 0 and offs is not None:
        options["num_valid_tokens"] = offs[-1:]
    return quantize(x, scheme, **options)


def _product(
    rows: Weight, weight: Weight, offs: Tensor, bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    """Rows times their expert's weights; the op follows from the two schemes, as in `fpk.mm`."""
    if not isinstance(weight, Quantized):
        return OPS["grouped_mm"](rows, weight, offs, bias, out_dtype)
    if reads_packed(rows, weight):
        arguments = packed_arguments(rows, weight)
        return OPS["grouped_mm_packed"](**arguments, offs=offs, bias=bias, out_dtype=out_dtype)
    block_rows, cols = weight.granularity.rows, weight.granularity.cols
    if not isinstance(rows, Quantized):
        return OPS["grouped_mm_weight_only"](
            rows, weight.codes, weight.scale, offs, rows=block_rows, cols=cols, bias=bias, out_dtype=out_dtype
        )
    common = dict(bias=bias, out_dtype=out_dtype, fast_accum=fast_accum)
    group, scale = rows.granularity.cols, rows.scale
    if group < 0 and cols < 0:
        return OPS["grouped_scaled_mm"](rows.codes, weight.codes, scale, weight.scale, offs, **common)
    if group < 0:  # a scale of all of K stands in every group, without being copied
        group = cols
        scale = scale.expand(rows.codes.shape[0], -(-rows.codes.shape[1] // group))
    return OPS["grouped_scaled_mm_group"](
        rows.codes, weight.codes, scale, weight.scale, offs, group=group, block_rows=block_rows, block_cols=cols,
        **common,
    )  # fmt: skip
