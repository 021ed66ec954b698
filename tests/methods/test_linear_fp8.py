"""Serialized FP8 with scales per tensor: loading, one scale for fused shards, products, what is refused."""

import pytest
import torch
from linear_kit import default_device, random_weight, random_x, token_rounded

from fpk.check import assert_close, bits
from fpk.device import pretend
from fpk.formats import E4M3FN, E4M3FNUZ, decode, encode
from fpk.methods import Fp8Config, Linear, fp8, pre_processed_weights

F8 = torch.float8_e4m3fn
SHARDS = {"q": (0.02, 24), "k": (0.5, 8), "v": (0.003, 16)}  # scale and rows
K = 48


def codes_of(n: int, seed: int = 0) -> torch.Tensor:
    """Every finite magnitude of e4m3 may come."""
    raw = torch.randint(0, 256, (n, K), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8, device="cpu")
    return raw.masked_fill((raw & 0x7F) == 0x7F, 0x7E).view(F8).to(default_device())


def make(scheme="dynamic", n=(24, 8, 16), **kwargs) -> Linear:
    config = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme=scheme)
    return Linear(K, n, quant_config=config, prefix="model.layers.0.qkv_proj", **kwargs)


def put(layer: Linear, name: str, value, shard=None) -> None:
    parameter = getattr(layer, name)
    parameter.weight_loader(parameter, value if isinstance(value, torch.Tensor) else torch.tensor(value), shard)


def process(layer: Linear) -> Linear:
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def fused(scheme="dynamic", shards=SHARDS, scale_shape=(), scale_dtype=torch.float32, **kwargs) -> Linear:
    layer = make(scheme, tuple(n for _, n in shards.values()), **kwargs)
    for i, (name, (scale, n)) in enumerate(shards.items()):
        put(layer, "weight", codes_of(n, i), name)
        put(layer, "weight_scale", torch.full(scale_shape, scale, dtype=scale_dtype), name)
        if scheme == "static":
            put(layer, "input_scale", 0.01 * (i + 1), name)
    return layer


def test_parameters_before_loading():
    layer = make("static")
    assert layer.weight.shape == (48, K) and layer.weight.dtype is F8
    assert layer.weight_scale.shape == layer.input_scale.shape == (3,)
    lowest = torch.finfo(torch.float32).min
    assert (layer.weight_scale == lowest).all() and (layer.input_scale == lowest).all()
    assert (layer.weight_scale.scale_type, layer.input_scale.scale_type) == ("weight_scale", "input_scale")
    assert layer.weight_block_size is None and layer.logical_widths == [24, 8, 16]
    assert make().input_scale is None
    assert decode(layer.weight.data, E4M3FN).isnan().all()  # a weight that never comes cannot pass for one


@pytest.mark.parametrize("shape", ((), (1,)), ids=str)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_shards_are_brought_to_the_largest_scale(shape, dtype, launches):
    layer = process(fused(scale_shape=shape, scale_dtype=dtype))
    scales = [torch.tensor(s, dtype=dtype).float() for s, _ in SHARDS.values()]
    largest = max(scales)
    assert layer.weight_scale.shape == (1,) and layer.weight_scale[0] == largest and layer.input_scale is None
    row = 0
    for i, (_, n) in enumerate(SHARDS.values()):
        codes = codes_of(n, i)
        value = decode(codes, E4M3FN) * scales[i]
        expected = bits(codes) if scales[i] == largest else encode(value / largest, E4M3FN)
        assert torch.equal(bits(layer.weight)[row : row + n], expected)
        row += n
    assert launches() > 0


@pytest.mark.parametrize("scale", (3e-44, 1e-5, 1e-9, 146.5, 3e5))
def test_a_shard_of_the_largest_scale_keeps_every_code(scale, references):
    """fp16 in between would lose small values and overflow large ones."""
    layer = process(fused(shards={"q": (scale, 24), "k": (scale, 8), "v": (scale / 2, 16)}))
    assert torch.equal(bits(layer.weight)[:24], bits(codes_of(24, 0)))
    half = decode(codes_of(16, 2), E4M3FN) * torch.tensor(scale / 2)
    assert torch.equal(bits(layer.weight)[32:], encode(half / torch.tensor(scale), E4M3FN))


def test_shards_are_requantized_in_chunks(monkeypatch, references):
    whole = process(fused())
    monkeypatch.setattr(fp8, "CHUNK", 5 * K)
    assert torch.equal(bits(process(fused()).weight), bits(whole.weight))


@pytest.mark.parametrize("shard", (None, (0, 1, 2)))
def test_a_module_fused_on_disk_has_one_scale(shard, references):
    layer = make()
    put(layer, "weight", codes_of(48), shard)
    put(layer, "weight_scale", 0.25, shard)
    process(layer)
    assert torch.equal(bits(layer.weight), bits(codes_of(48)))
    assert layer.weight_scale.tolist() == [0.25]


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("shape", ((5,), (2, 3), (), (0,)), ids=str)
def test_dynamic_product_is_per_token(shape, dtype, launches):
    layer = process(fused(bias=True, params_dtype=dtype))
    put(layer, "bias", random_x(48, dtype=dtype))
    x = random_x(*shape, K, dtype=dtype)
    expected = token_rounded(x) @ layer.dequantize().T + layer.bias.float()
    assert_close(layer(x), expected.to(dtype), 4e-3)
    assert launches() > 0


def test_static_product_uses_the_largest_input_scale(launches):
    layer = process(fused("static"))
    assert_close(layer.input_scale.data, torch.tensor([0.03]), 0.0)
    x = random_x(5, K)
    rounded = (x.float() / torch.tensor(0.03)).clamp(-448, 448).to(F8).float() * torch.tensor(0.03)
    assert_close(layer(x), (rounded @ layer.dequantize().T).bfloat16(), 4e-3)
    saturated = x * 1000
    expected = (saturated.float() / torch.tensor(0.03)).clamp(-448, 448).to(F8).float() * torch.tensor(0.03)
    assert_close(layer(saturated), (expected @ layer.dequantize().T).bfloat16(), 4e-3)
    assert launches() > 0


def test_a_bound_on_the_dynamic_amax_is_obeyed():
    layer = process(fused())
    x = random_x(5, K)
    free = layer(x)
    layer.input_scale_ub = torch.tensor([0.5])
    scale = torch.tensor(0.5) / 448
    rounded = (x.float() / scale).clamp(-448, 448).to(F8).float() * scale
    bounded = layer(x)
    assert_close(bounded, (rounded @ layer.dequantize().T).bfloat16(), 4e-3)
    assert not torch.equal(bounded, free)


@pytest.mark.parametrize("name", ("weight_scale", "input_scale"))
def test_missing_scales_are_named(name, references):
    other = {"weight_scale": "input_scale", "input_scale": "weight_scale"}[name]
    layer = make("static")
    put(layer, "weight", codes_of(48))
    put(layer, other, 0.5)
    with pytest.raises(ValueError, match=rf"0\.qkv_proj\.{name}: missing from the checkpoint"):
        process(layer)
    for shard, missing in (("k", r"\[0, 2\]"), ("q", r"\[2\]")):  # the last one too
        put(layer, name, 0.5, shard)
        with pytest.raises(ValueError, match=rf"{name}: expected one for each of 3 shards, shards {missing} have none"):
            process(layer)
    put(layer, name, 0.5, "v")
    process(layer)
    assert torch.equal(bits(layer.weight), bits(codes_of(48)))


def test_missing_weights_are_named(references):
    layer = make()
    put(layer, "weight_scale", 0.5)
    for shard, n, missing in (("k", 8, r"\[0, 2\]"), ("q", 24, r"\[2\]")):
        put(layer, "weight", codes_of(n), shard)
        message = rf"0\.qkv_proj\.weight: expected one for each of 3 shards, shards {missing} were never loaded"
        with pytest.raises(ValueError, match=message):
            process(layer)
    put(layer, "weight", codes_of(16), "v")
    process(layer)


@pytest.mark.parametrize("name", ("weight_scale", "input_scale"))
@pytest.mark.parametrize("value", (0.0, -0.5, float("nan"), float("inf")))
def test_scales_must_be_finite_and_positive(name, value, references):
    layer = fused("static")
    put(layer, name, value, "k")
    with pytest.raises(ValueError, match=rf"0\.qkv_proj\.{name}: expected finite positive scales, got"):
        process(layer)
    put(layer, name, 0.75, "k")  # a refused layer is as it was
    right = fused("static")
    put(right, name, 0.75, "k")
    assert torch.equal(bits(process(layer).weight), bits(process(right).weight))


def test_a_shard_without_rows_needs_no_scale(references):
    layer = make(n=(24, 8, 0))
    for i, n in enumerate((24, 8)):
        put(layer, "weight", codes_of(n, i), i)
        put(layer, "weight_scale", 0.5 + i, i)
    process(layer)
    assert layer.weight_scale.tolist() == [1.5]
    expected = encode(decode(codes_of(24, 0), E4M3FN) * 0.5 / 1.5, E4M3FN)
    assert torch.equal(bits(layer.weight)[:24], expected)


def test_refuses_tensors_that_do_not_fit():
    layer = make("static")
    with pytest.raises(ValueError, match=r"qkv_proj\.weight: expected float8_e4m3fn, got bfloat16"):
        put(layer, "weight", random_weight(48, K))
    with pytest.raises(ValueError, match=r"weight \(shard 'v'\): expected \(16, 48\), got \(8, 48\)"):
        put(layer, "weight", codes_of(8), "v")
    with pytest.raises(ValueError, match=r"weight_scale \(shard 0\): expected \(\) or \(1,\), got \(2,\)"):
        put(layer, "weight_scale", [1.0, 1.0], 0)
    with pytest.raises(ValueError, match=r"input_scale: expected a shard id out of 0\.\.2, q, k, v .* got 'z'"):
        put(layer, "input_scale", 1.0, "z")
    with pytest.raises(ValueError, match="weight_scale: expected float32 or bfloat16 or float16, got int64"):
        put(layer, "weight_scale", 1)
    process(fused())
    with pytest.raises(ValueError, match="expected bfloat16 or float16, got float32"):
        process(fused())(torch.ones(2, K))


def test_processing_twice_changes_nothing(references):
    layer = process(fused("static"))
    before = {n: bits(p).clone() for n, p in layer.named_parameters()}
    process(layer)
    assert before.keys() == dict(layer.named_parameters()).keys()
    for name, parameter in layer.named_parameters():
        assert torch.equal(bits(parameter), before[name])


@pytest.mark.parametrize("scheme", ("dynamic", "static"))
def test_gfx942_keeps_the_values_in_its_own_format(scheme, references, on_cpu):
    plain = process(fused(scheme))
    raw = torch.arange(256, dtype=torch.uint8).repeat(1, 1)
    with pretend("gfx942"):
        layer = process(fused(scheme))
        assert layer.weight.dtype is torch.float8_e4m3fnuz
        assert_close(layer.weight_scale.data, plain.weight_scale.data * 2, 0.0)
        # the shard of the largest scale is the same numbers
        assert_close(layer.dequantize()[24:32], plain.dequantize()[24:32] + 0.0, 0.0)  # -0 becomes 0
        row = 32
        value = decode(codes_of(16, 2), E4M3FN) * torch.tensor(0.003)
        assert torch.equal(bits(layer.weight)[row:], encode(value / torch.tensor(1.0), E4M3FNUZ))
        x = random_x(5, K)
        assert_close(layer(x).float(), x.float() @ layer.dequantize().T, 0.05)
        if scheme == "static":
            assert_close(layer.input_scale.data, torch.tensor([0.06]), 0.0)
        # all codes: -0 becomes 0, both NaN become the one that fnuz has
        single = Linear(256, 1, quant_config=Fp8Config(True), prefix="p")
        put(single, "weight", raw.view(F8))
        put(single, "weight_scale", 1.0)
        process(single)
        values = decode(raw, E4M3FN)
        got = decode(single.weight.data, E4M3FNUZ) * 2
        assert torch.equal(got.isnan(), values.isnan())
        assert torch.equal(got.nan_to_num(), values.nan_to_num())


@pytest.mark.parametrize("scheme", ("dynamic", "static"))
def test_pre_processed_weights_are_left_alone(scheme, references):
    source = process(fused(scheme))
    layer = make(scheme)
    with pre_processed_weights():
        for name, parameter in source.named_parameters():
            setattr(layer, name, parameter)
        process(layer)
    assert layer.weight is source.weight
    assert (layer.input_scale is None) == (scheme == "dynamic")
    x = random_x(3, K)
    assert_close(layer(x), source(x), 0.0)


@pytest.mark.parametrize("scheme", ("dynamic", "static"))
def test_compiles_to_one_graph(scheme, references):
    torch._dynamo.reset()
    layer = process(fused(scheme, bias=True))
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for m in (1, 4):
        assert_close(compiled(random_x(m, K)), layer(random_x(m, K)), 0.0)


def test_an_engine_s_loader_fills_the_parameters(references):
    def loader(param, loaded_weight, index):
        if hasattr(param, "scale_type"):
            param.data[index].copy_(loaded_weight)
        else:
            param.data.narrow(param.output_dim, *((0, 24), (24, 8), (32, 16))[index]).copy_(loaded_weight)

    layer = make(weight_loader=loader)
    for i, (scale, n) in enumerate(SHARDS.values()):
        layer.weight.weight_loader(layer.weight, codes_of(n, i), i)
        layer.weight_scale.weight_loader(layer.weight_scale, torch.tensor(scale), i)
    assert torch.equal(bits(process(layer).weight), bits(process(fused()).weight))


@pytest.mark.parametrize("split", ("column", "row"))
def test_a_rank_holds_its_slice(split, references):
    whole = process(fused()).dequantize()
    for rank in range(4):
        layer = process(fused(split=split, tp_size=4, tp_rank=rank))
        if split == "column":
            rows = [*range(rank * 6, rank * 6 + 6), *range(24 + rank * 2, 26 + rank * 2)]
            assert_close(layer.dequantize()[:8], whole[rows], 0.0)
        else:
            assert_close(layer.dequantize(), whole[:, rank * 12 : rank * 12 + 12].contiguous(), 0.0)


def test_repr_shows_scheme_and_shapes(references):
    assert "fp8_tensor:fp8_token, weight=float8_e4m3fn[48, 48], weight_scale=float32[1]" in repr(process(fused()))
    assert "fp8_tensor:fp8_tensor_static" in repr(process(fused("static")))
