"""From a case to fpk: every case of `cases_open` has an adapter here, or a row that says what it waits for.

An adapter takes the case's inputs and returns what the case's op text asks for; an error that fpk raises counts as its
answer. Needs are written "op:<name>" (in fpk.OPS), "scheme:<name>" (in fpk.list_schemes()), "mutating:" (any op that
writes in place) or "<module>:<attribute>".
"""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from casekit import TORCH8
from torch import Tensor

import fpk
from fpk import formats
from fpk.check import rel_error
from fpk.db import MemorySource, Tables
from fpk.device import Device, of, pretend
from fpk.kernels.moe._grouped import expert_tile


def exists(need: str) -> bool:
    """Has fpk what a case needs?"""
    kind, _, name = need.partition(":")
    if kind == "op":
        return name in fpk.OPS
    if kind == "scheme":
        return name in fpk.list_schemes()
    if kind == "mutating":
        return any(op.mutates for op in fpk.OPS.values())
    try:
        return hasattr(importlib.import_module(kind), name)
    except ImportError:
        return False


# Rows leave this table when what they wait for lands: the test asserts that it is really missing.
WAITING: dict[str, str] = {}


ADAPTERS: dict[str, Callable[[dict[str, Any]], Any]] = {}


def adapter(*ids: str):
    """Register the decorated function for these cases."""

    def register(fn):
        for id in ids:
            assert id not in ADAPTERS and id not in WAITING, f"{id} has two rows"
            ADAPTERS[id] = fn
        return fn

    return register


# ---- helpers ---------------------------------------------------------------
def as_uint8(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


def nan_as_0x7f(codes: Tensor) -> Tensor:
    """fpk writes +0x7F for NaN and the cases allow both signs."""
    return torch.where((codes & 0x7F) == 0x7F, 0x7F, codes)


def static(x: Tensor, scale: Tensor | float, **options: Any) -> Tensor:
    """Codes of a vector under one given scale, as uint8."""
    return as_uint8(fpk.quantize(x[None], "fp8_tensor", scale=scale, **options).codes)[0]


def parts(q: fpk.Quantized) -> dict[str, Tensor]:
    return dict(q=as_uint8(q.codes), scale=q.scale)


def fp8(codes: Tensor, fmt: str = "e4m3fn") -> Tensor:
    return codes.view(TORCH8[fmt])


def decoded(codes: Tensor, fmt: str) -> Tensor:
    """A vector of codes through the dequantize op, scale 1."""
    one = torch.ones(1, 1, device=codes.device)
    return fpk.OPS["dequantize"](fp8(codes[None], fmt), one)[0]


# ---- cast ------------------------------------------------------------------
@adapter("B01")
def quant_static(i):
    return nan_as_0x7f(static(i["x"], i["scale"]))


@adapter("B22")
def quant_static_divides(i):
    return static(i["x"], i["scale"])


@adapter("B03")
def cast(i):
    return static(i["x"], 1.0)


@adapter("B05", "B06")
def decode_every_code(i):
    return [decoded(i["codes"], fmt) for fmt in i["fmts"]]


@adapter("B09")
def decode_subnormals(i):
    return decoded(i["codes"], "e4m3fn")


@adapter("B07")
def quant_fnuz(i):
    return static(i["x"], i["scale"], dtype=torch.float8_e4m3fnuz)


# ---- scale -----------------------------------------------------------------
@adapter("B12", "B14", "B16", "B23")
def quant_token(i):
    return parts(fpk.quantize(i["x"], "fp8_token"))


@adapter("B20")
def quant_static_two_scales(i):
    return parts(fpk.quantize(i["x"], "fp8_tensor", scale=i["scale"]))


@adapter("B18")
def quant_no_rows(i):
    q, scale = fpk.OPS["quantize_fp8_group"](i["x"], group=i["group"])
    return dict(q=as_uint8(q), scale=scale)


# ---- mx --------------------------------------------------------------------
@adapter("B31")
def decode_e8m0(i):
    ones = torch.ones(len(i["b"]), 1, device=i["b"].device).to(torch.float8_e4m3fn)
    return fpk.OPS["dequantize"](ones, i["b"][:, None], rows=1, cols=-1)[:, 0]


@adapter("B39")
def encode_elements(i):
    return {name: formats.encode(x, formats.FORMATS["e2m1" if name == "tiny" else name]) for name, x in i.items()}


MX_NAMES = {"e4m3fn": "mxfp8_e4m3", "e5m2": "mxfp8_e5m2", "e2m3": "mxfp6_e2m3", "e2m1": "mxfp4"}


def mx_bytes(amax: list[float], fmt: str, rule: str) -> Tensor:
    """Scale bytes of blocks with these maxima."""
    x = torch.tensor(amax)[:, None].expand(-1, 4)
    return fpk.OPS["quantize_mx"](x, format=MX_NAMES[fmt], rule=rule)[1][:, 0]


@adapter("B25")
def mx_scales(i):
    return {pair: mx_bytes(i["amax"], *pair) for pair in i["pairs"]}


@adapter("B27")
def mx_scale_even(i):
    return mx_bytes(i["amax"], "e2m3", "even")


@adapter("B37")
def mx_scales_of_powers(i):
    floor = mx_bytes([2.0**k for k in i["ks"]], "e4m3fn", "floor")
    return dict(floor=floor, rceil=mx_bytes([448 * 2.0**k for k in i["ks"]], "e4m3fn", "rceil"))


@adapter("B29")
def mx_quant_by_two_rules(i):
    quantized = {rule: fpk.quantize(i["x"], "mxfp8_e5m2", rule=rule) for rule in ("floor", "rceil")}
    return {rule: dict(scale=q.scale, deq=q.dequantize()) for rule, q in quantized.items()}


@adapter("B33")
def mx_quant_short_block(i):
    return dict(scale=fpk.quantize(i["x"], "mxfp8_e4m3", rule="floor").scale)


@adapter("B40")
def mx_product_of_one_row(i):
    a, b = (fpk.Quantized(fpk.OPS["pack_fp4"](i[n]), i[f"s{n}"], "mxfp4") for n in ("a", "b"))
    return fpk.mm(a, b, out_dtype=torch.float32)


@adapter("B35")
def swizzle(i):
    return fpk.OPS["swizzle_scales"](i["s"]).flatten()


# ---- nvfp4, pack -----------------------------------------------------------
@adapter("B42", "B43")
def nvfp4_dequant(i):
    over = i["global_scale"].reshape(-1, 1)  # one for all rows, or each row its shard's
    out_dtype = torch.bfloat16 if len(over) == 1 else torch.float32
    return fpk.OPS["dequantize_nvfp4"](i["codes"], i["block_scale"], over, packed=False, out_dtype=out_dtype)


@adapter("B45")
def nvfp4_quant(i):
    codes, scale, over = fpk.OPS["quantize_nvfp4"](i["x"], packed=False)
    return dict(codes=codes, block_scale=as_uint8(scale), global_scale=over)


@adapter("B49")
def pack(i):
    packed = fpk.OPS["pack_fp4"](i["codes"])
    return dict(packed=packed, unpacked=fpk.OPS["unpack_fp4"](packed))


# ---- int8 ------------------------------------------------------------------
@adapter("B53")
def quant_int8(i):
    return fpk.OPS["quantize_int8_static"](i["x"][None], i["scale"].reshape(1, 1))[0]


# ---- scaled_mm -------------------------------------------------------------
def operand(codes: Tensor, scale: Tensor | None = None) -> fpk.Quantized:
    """FP8 codes with one scale, or one for each row."""
    scale = torch.ones(1, 1, device=codes.device) if scale is None else scale
    if scale.numel() == 1:
        return fpk.Quantized(fp8(codes), scale.reshape(1, 1), "fp8_tensor")
    return fpk.Quantized(fp8(codes), scale, "fp8_token")


@adapter("B62", "B68", "B70")
def mm(i):
    return fpk.mm(operand(i["a"], i.get("sa")), operand(i["b"], i.get("sb")), out_dtype=torch.float32)


@adapter("B63")
def mm_empty(i):
    return {name: fpk.mm(operand(a), operand(b), out_dtype=torch.float32) for name, (a, b) in i.items()}


@adapter("B64", "B66")
def mm_cast_last(i):
    out_dtype = getattr(torch, i["out_dtype"])
    return fpk.mm(operand(i["a"], i["sa"]), operand(i["b"], i["sb"]), bias=i.get("bias"), out_dtype=out_dtype)


def grouped(i, **wanted: int) -> Tensor:
    """scaled_mm_group with scales (rows, groups) on both sides, by a config that has the `wanted` fields if any may."""
    op = fpk.OPS["scaled_mm_group"]
    args = dict(
        a=fp8(i["a"]), b=fp8(i["b"]), scale_a=i["sa"], scale_b=i["sb"], group=i["group"], block_rows=1,
        block_cols=i["group"], out_dtype=torch.float32,
    )  # fmt: skip
    bound, device = op.bind(**args), of(i["a"].device)
    for config in op.configs(**bound):
        if wanted.items() <= config.items() and op.is_legal(config, bound, device):
            return op.launch(**args, config=config)
    return op.launch(**args, config=op.config_for(**args) | wanted)  # raises


@adapter("B60")
def mm_group(i):
    return grouped(i)


@adapter("B56")
def mm_group_with_a_longer_tile(i):
    return grouped(i, BLOCK_K=i["config"]["BLOCK_SIZE_K"])


@adapter("B58")
def mm_group_with_split_k(i):
    parts = [grouped(i, SPLIT_K=split) for split in (i["split_k"], 4, 8)]
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


# ---- block -----------------------------------------------------------------
@adapter("B74")
def dequant_rows_of_fused(i):
    rows, cols = i["block"]
    start, stop = i["rows"]
    return fpk.OPS["dequantize"](fp8(i["q"]), i["scale"], rows=rows, cols=cols)[start:stop]


@adapter("B72")
def quant_block(i):
    rows, cols = i["block"]
    codes, scale = fpk.OPS["quantize_fp8_block"](i["w"], block_rows=rows, block_cols=cols)
    return dict(q=as_uint8(codes), scale=scale)


@adapter("B77")
def online_per_tensor_on_two_ranks(i):
    """Each rank is asked twice: for its own scale, then with the maximum of both."""
    from fpk.methods import use_reduce_max

    local: list[Tensor] = []

    def own(scale: Tensor, group: Any) -> Tensor:
        local.append(scale)
        return scale

    def shared(scale: Tensor, group: Any) -> Tensor:
        return torch.maximum(*local)

    with use_reduce_max(own):
        for rank in range(i["tp"]):
            online("Fp8PerTensorOnlineLinearMethod", i["w"], split="row", tp_size=i["tp"], tp_rank=rank)
    with use_reduce_max(shared):
        layers = [
            online("Fp8PerTensorOnlineLinearMethod", i["w"], split="row", tp_size=i["tp"], tp_rank=rank)
            for rank in range(i["tp"])
        ]
    return [dict(q=as_uint8(layer.weight.data), scale=layer.weight_scale.data) for layer in layers]


@adapter("B78")
def online_fused(i):
    """By a scale a row, "per part" at its finest.

    Fp8PerTensorOnlineLinearMethod cannot pass, by its definition: it keeps one scale (1,) for all shards and ranks.
    """
    return online("Fp8PtpcOnlineLinearMethod", i["w"], widths=i["widths"]).dequantize()


def online(method: str, weight: Tensor, widths: list[int] | None = None, **parallel: Any) -> Any:
    """A layer that has taken `weight` (N, K), whole, through an online method."""
    from fpk import methods

    rows, cols = weight.shape
    with torch.device(weight.device), torch.no_grad():
        layer = methods.Linear(
            cols, widths or rows, quant_method=getattr(methods, method)(), params_dtype=weight.dtype, **parallel
        )
        start = 0
        for shard, width in enumerate(widths or [rows]):
            part = weight[start : start + width]
            layer.weight.weight_loader(layer.weight, part, *([shard] if widths else []))
            start += width
        layer.quant_method.process_weights_after_loading(layer)
    return layer


@adapter("B51")
def shard_ranges(i):
    from fpk.methods.parallel import shard_range

    return [shard_range(i["n"], i["group"], i["tp"], rank) for rank in range(i["tp"])]


# ---- serialized layers -----------------------------------------------------
def serialized(k: int, widths: list[int], activation_scheme: str = "dynamic") -> Any:
    """An FP8 layer of a checkpoint, before anything is loaded."""
    from fpk.methods import Fp8Config, Linear

    config = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme=activation_scheme)
    return Linear(k, widths, quant_config=config)


def load(layer: Any, name: str, tensor: Tensor, *shard: int) -> None:
    parameter = getattr(layer, name)
    parameter.weight_loader(parameter, tensor, *shard)


@adapter("B55")
def input_scale_of_fused(i):
    shards = i["input_scale_shards"]
    layer = serialized(16, [16] * len(shards), "static")
    for number, input_scale in enumerate(shards):
        load(layer, "weight", torch.ones(16, 16).to(torch.float8_e4m3fn), number)
        load(layer, "weight_scale", torch.tensor(0.5), number)
        load(layer, "input_scale", input_scale, number)
    layer.quant_method.process_weights_after_loading(layer)
    return layer.input_scale.data


@adapter("B80")
def one_scale_for_all_slots(i):
    layer = serialized(16, [16] * i["slots"])
    load(layer, "weight_scale", i["loaded"])
    return layer.weight_scale.data


@adapter("B90")
def process_twice(i):
    """On a GPU with fnuz types, where processing doubles the scale; codes there mean half as much."""
    with pretend("gfx942"):
        layer = serialized(i["weight"].shape[1], [i["weight"].shape[0]])
        load(layer, "weight", i["weight"].to(torch.float8_e4m3fn))
        load(layer, "weight_scale", i["scale"])
        for _ in range(2):
            layer.quant_method.process_weights_after_loading(layer)
        values = layer.dequantize() / i["scale"]
    return dict(weight=values.T, scale=layer.weight_scale.data)  # fpk keeps (N, K), the case transposes


# ---- load ------------------------------------------------------------------
@adapter("B85", "B86")
def layers_skipped(i):
    from fpk.methods.skip import is_layer_skipped

    answers: list[Any] = []
    for layer in i["layers"]:
        try:
            answers.append(is_layer_skipped(layer, i["ignored"], i["fused"]))
        except ValueError as error:
            answers.append(error)
    return answers


# ---- route -----------------------------------------------------------------
def routed(i: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    weights, ids = fpk.OPS["route"](i["logits"], i["topk"], **options)
    return dict(ids=ids, weights=weights)


@adapter("B93")
def route_softmax(i):
    return routed(i, renormalize=False)


@adapter("B95")
def route_biased_sigmoid(i):
    return routed(i, scoring="sigmoid", correction_bias=i["bias"])


@adapter("B98")
def route_top_1(i):
    return routed(i)["ids"]


@adapter("B97")
def moe_scaled_top_1(i):
    """y = 2x from an activation: a gate of 32 by its bias (silu(32) is 32), identity for up, 2 / 32 down."""
    x = i["x"]
    one = torch.eye(2, device=x.device)
    bias = torch.tensor([[32.0, 32.0, 0.0, 0.0]], device=x.device)
    return fpk.moe(
        x, torch.zeros(1, 1, device=x.device), torch.cat([0 * one, one])[None], one[None] / 16, top_k=1, bias13=bias,
        routed_scaling_factor=i["routed_scaling_factor"],
    )  # fmt: skip


# ---- moe -------------------------------------------------------------------
@triton.jit
def blocks_kernel(offs_ptr, index_ptr, rows_ptr, expert_ptr, R, E, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr):
    expert, end, first, _ = expert_tile(offs_ptr, R, E, 1, BLOCK_E, BLOCK)
    inside = tl.arange(0, BLOCK)
    slot = tl.load(index_ptr + first + inside, mask=first + inside < tl.where(expert < E, end, 0), other=R)
    tl.store(rows_ptr + tl.program_id(0) * BLOCK + inside, slot)
    tl.store(expert_ptr + tl.program_id(0), tl.where(expert < E, expert, -1))


def blocks(ids: Tensor, num_experts: int, block: int) -> dict[str, Tensor]:
    """fpk pads nothing: what each program of a grouped product finds to do, written as others write it down."""
    index, _, offs = fpk.OPS["sort_by_expert"](ids, num_experts)
    programs = len(index)
    rows = torch.empty(programs * block, dtype=torch.int32, device=ids.device)
    experts = torch.empty(programs, dtype=torch.int32, device=ids.device)
    bins = triton.next_power_of_2(num_experts + 1)
    blocks_kernel[(programs,)](offs, index, rows, experts, len(index), num_experts, BLOCK_E=bins, BLOCK=block)
    return dict(num_post_pad=(experts >= 0).sum() * block, expert_ids=experts, sorted_ids=rows)


@adapter("B99")
def align(i):
    return blocks(i["topk_ids"], i["num_experts"], i["block"])


@adapter("B100")
def align_batches(i):
    counts, most = i["expert_num_tokens"], i["max_tokens"]
    expert = torch.arange(len(counts), device=counts.device)[:, None]
    taken = torch.arange(most, device=counts.device)[None] < counts[:, None]
    return blocks(torch.where(taken, expert, -1).reshape(-1, 1), len(counts), i["block"])


def experts(i: dict[str, Any], w13: str = "w13", **options: Any) -> Tensor:
    return fpk.moe_experts(i["x"], i["topk_weights"], i["topk_ids"], i[w13], i["w2"], **options)


@adapter("B101")
def moe_on_two_ranks(i):
    outs = []
    for rank in range(2):
        here = slice(2 * rank, 2 * rank + 2)
        expert_map = torch.full((4,), -1, device=i["x"].device)
        expert_map[here] = torch.arange(2, device=i["x"].device)
        outs.append(experts(i | dict(w13=i["w13"][here], w2=i["w2"][here]), expert_map=expert_map))
    return outs


@adapter("B103", "B109")
def moe_plain(i):
    return experts(i, apply_router_weight_on_input=i.get("apply_router_weight_on_input", False))


@adapter("B113")
def moe_interleaved(i):
    return experts(i, "w13_interleaved", interleaved=True)


@adapter("B105")
def grouped_product(i):
    offs = torch.tensor(i["sizes"], device=i["a"].device).cumsum(0).to(torch.int32)
    return fpk.OPS["grouped_mm"](i["a"], i["b"], offs)


@adapter("B107")
def moe_sum(i):
    tokens, top_k, hidden = i["x"].shape
    position = torch.arange(tokens * top_k, dtype=torch.int32, device=i["x"].device).reshape(tokens, top_k)
    return fpk.OPS["moe_unpermute"](i["x"].reshape(-1, hidden), position)


@adapter("B111")
def swiglu_of_gpt_oss(i):
    x = torch.cat([i["gate"], i["up"]])[None].float()
    return fpk.OPS["act_and_mul"](x, activation="swigluoai")[0]


# ---- kv --------------------------------------------------------------------
def cache_layer(i, heads: int, size: int) -> Any:
    """An attention layer with an FP8 cache, the case's scales loaded and processed."""
    from fpk.methods import Attention, Fp8Config, Fp8KVCacheMethod

    with torch.device(i["k"].device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no scales: what B118 is about
        layer = Attention(heads, size, kv_cache_dtype="fp8", quant_method=Fp8KVCacheMethod(Fp8Config(True)))
        layer.quant_method.create_weights(layer)
        for name in ("k_scale", "v_scale"):
            if i.get(name) is not None:
                load(layer, name, torch.as_tensor(i[name]))
        layer.quant_method.process_weights_after_loading(layer)
    return layer


@adapter("B116")
def kv_write_by_loaded_scales(i):
    layer = cache_layer(i, 1, len(i["k"]))
    cache = layer.quant_method.new_cache(layer, 1, 1)
    slots = torch.zeros(1, dtype=torch.int64, device=i["k"].device)
    layer.quant_method.write(layer, cache, i["k"][None, None], i["v"][None, None], slots)
    return dict(k=as_uint8(cache.key).flatten(), v=as_uint8(cache.value).flatten())


@adapter("B118")
def kv_write_without_scales(i):
    return kv_write_by_loaded_scales(i | dict(v=i["k"]))["k"]


def written(key: Tensor, cache: Tensor, slots: Tensor, **options: Any) -> Tensor:
    """The cache, uint8, after the op has written keys into it; values go to one of their own."""
    fpk.OPS["kv_cache_write"](key, key, fp8(cache), fp8(cache.clone()), slots, **options)
    return cache


@adapter("B120")
def kv_write_by_head(i):
    """In the plain layout of a cache, and with heads before tokens in memory."""
    tokens, heads, size = i["k"].shape
    slots = torch.arange(tokens, device=i["k"].device)
    caches = []
    for order in ((1, tokens, heads, size), (1, heads, tokens, size)):
        cache = torch.zeros(order, dtype=torch.uint8, device=i["k"].device)
        cache = cache if order[1] == tokens else cache.transpose(1, 2)
        caches.append(written(i["k"], cache, slots, k_scale=i["k_scale"], v_scale=i["k_scale"])[0])
    assert torch.equal(*caches)
    return caches[0]


@adapter("B122")
def kv_scale_names(i):
    from fpk.methods.kv_cache import map_kv_scale_name

    return [map_kv_scale_name(name) for name in i["names"]]


@adapter("B124")
def kv_write_into_a_filled_cache(i):
    shape = (1, i["block"], *i["k"].shape[1:])
    cache = torch.full(shape, i["fill"], dtype=torch.uint8, device=i["k"].device)
    return written(i["k"], cache, i["slots"])[:, :, 0]


# ---- runtime ---------------------------------------------------------------
@adapter("B135")
def bf16_dot(i):
    return fpk.mm(i["a"], fpk.quantize(i["b"].float(), "fp8_tensor", scale=1.0), out_dtype=torch.float32)


def fp32_operands(i):
    return fpk.mm(i["a"], fpk.quantize(i["b"], "fp8_tensor", scale=1.0), out_dtype=torch.float32)


# Cases about something that fpk does not do: asking for it must raise.
REFUSED = {"B138": fp32_operands}

# Cases that fpk fails, and why; the test demands that they do, so that a row goes when the fault does.
FAILING: dict[str, str] = {}


# ---- tune ------------------------------------------------------------------
def cold_lookups(name: str, m: int, n: int, k: int, calls: int = 1) -> list[tuple[Any, Any]]:
    """The configs of calls without any table, each with the op's default."""
    op = fpk.OPS["scaled_mm"]
    codes = [torch.empty(rows, k, device="meta", dtype=torch.float8_e4m3fn) for rows in (m, n)]
    scales = [torch.empty(rows, 1, device="meta") for rows in (m, n)]
    with pretend(Device("sm90", name, "nv", 132)), fpk.use(Tables(MemorySource({}))):
        default = next(iter(op.configs(**op.bind(*codes, *scales))))
        return [(op.config_for(*codes, *scales), default) for _ in range(calls)]


@adapter("B127")
def look_up_without_a_table(i):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answers = cold_lookups(i["device"], *i["key"][1:], calls=i["calls"])
    config, default = answers[0]
    assert all(answer == answers[0] for answer in answers)
    named = [w for w in caught if "scaled_mm" in str(w.message)]
    return dict(config=i["default"] if config == default else config, warnings=len(named))


@adapter("B131")
def look_up_during_capture(i):
    [(config, default)] = cold_lookups("H200", 16, 256, 256)
    return i["default"] if config == default else config


@adapter("B129")
def tune_past_a_config_that_fails(i):
    from fpk.tune.search import Search

    search = Search([dict(kernel=c) for c in i["configs"]])
    while numbers := search.ask():
        for number in numbers:
            try:
                search.tell(number, i["bench"](search.candidates[number]["kernel"]))
            except RuntimeError:
                search.tell(number, None)
    return search.candidates[search.ranking()[0]]["kernel"]


@adapter("B133")
def compare_fp8(i):
    return [rel_error(a, b) <= 1e-2 for a, b in i["pairs"]]


@adapter("B125")
def tune_what_writes_in_place(i):
    """The real executor times an op that adds 1 to the case's buffer; the fastest config then runs once."""
    from unittest import mock

    from fpk.op import Cost, Kernel, Op
    from fpk.tune.executor import OpExecutor
    from fpk.tune.timing import FakeTimer

    class Calling(FakeTimer):
        """Calls what it is to time, as often as the case does."""

        def screen(self, launch, arguments, about_ms):
            for _ in range(5):
                launch(arguments)
            return super().screen(launch, arguments, about_ms)

    def add_one_in_place(buffer: Tensor, *, config: dict[str, Any]) -> None:
        buffer.add_(1)

    def reference(buffer: Tensor) -> None:
        buffer.add_(1)

    library = torch.library.Library("fpk_case_b125", "FRAGMENT")
    with mock.patch.object(fpk.op, "LIBRARY", library), mock.patch.dict(fpk.OPS):
        op = Op(
            add_one_in_place, reference, check=lambda **_: None, inputs=lambda **_: dict(buffer=i["buffer"]), domain={},
            tol=0.0, kernels={c: Kernel(lambda: None) for c in i["configs"]}, key=lambda **_: {}, cases={},
            configs=lambda **_: [dict(kernel=c) for c in i["configs"]], cost=lambda **_: Cost(0, 0),
            mutates=("buffer",),
        )  # fmt: skip
        executor = OpExecutor("cpu", Calling(lambda config: {"A": 2.0, "B": 1.0}[config["kernel"]]))
        times = {c: executor.trial(op.name, {}, dict(kernel=c))["us"] for c in i["configs"]}
        best = min(times, key=times.get)
        op.launch(i["buffer"], config=dict(kernel=best))
    return dict(best=best, buffer=i["buffer"])
