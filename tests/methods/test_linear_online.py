"""Online linear methods on one device: what they compute, and what they refuse."""

import pytest
import torch
from linear_kit import loaded, random_weight, random_x, token_rounded
from torch import nn

from fpk.check import assert_close, bits
from fpk.device import pretend
from fpk.kernels.quant.quantize_fp8_tensor import quantize_fp8_tensor
from fpk.kernels.quant.quantize_fp8_token import quantize_fp8_token
from fpk.kernels.quant.quantize_int8_token import quantize_int8_token
from fpk.methods import (
    Fp8PerBlockOnlineLinearMethod,
    Fp8PerTensorOnlineLinearMethod,
    Fp8PtpcOnlineLinearMethod,
    Int8PtpcOnlineLinearMethod,
    Linear,
    UnquantizedLinearMethod,
    pre_processed_weights,
    products,
)

TENSOR, PTPC, INT8 = Fp8PerTensorOnlineLinearMethod, Fp8PtpcOnlineLinearMethod, Int8PtpcOnlineLinearMethod
QUANTIZERS = {
    TENSOR: lambda w: quantize_fp8_tensor(w),
    PTPC: lambda w: quantize_fp8_token(w),
    INT8: lambda w: quantize_int8_token(w, qmin=-127),
}
METHODS = tuple(QUANTIZERS)
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda m: m.__name__)


def make(method, k=48, n=(24, 8, 8), **kwargs) -> Linear:
    return Linear(k, n, quant_method=method(), prefix="model.layers.0.qkv_proj", **kwargs)


@every_method
def test_quantizes_the_whole_fused_weight_as_its_op_does(method, launches):
    weights = [random_weight(n, 48, seed=n) for n in (24, 8, 9)]
    layer = loaded(make(method, n=(24, 8, 9)), weights)
    codes, scale = QUANTIZERS[method](torch.cat(weights))
    assert launches() > 0
    assert_close(layer.weight.data, codes, 0.0)
    assert_close(layer.weight_scale.data.view(scale.shape), scale, 0.0)
    assert layer.weight_scale.shape == ((1,) if method is TENSOR else (41, 1))
    assert layer.input_scale is None
    assert layer.weight.shape == (41, 48) and layer.weight.is_contiguous()


@every_method
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("shape", ((5,), (2, 3), (1,), ()), ids=str)
def test_product_is_that_of_the_rounded_operands(method, dtype, shape, launches):
    layer = loaded(make(method, bias=True, params_dtype=dtype), random_weight(40, 48, dtype=dtype))
    layer.bias.weight_loader(layer.bias, random_x(40, dtype=dtype))
    x = random_x(*shape, 48, dtype=dtype)
    out = layer(x)
    expected = token_rounded(x, layer.weight.dtype) @ layer.dequantize().T + layer.bias.float()
    assert out.shape == (*shape, 40) and out.dtype == dtype
    assert_close(out, expected.to(dtype), 4e-3)
    assert launches() > 1
    # and without the bias
    assert_close(layer.quant_method.apply(layer, x), (expected - layer.bias.float()).to(dtype), 4e-3)


@every_method
def test_dequantized_weight_is_near_the_weight(method, references):
    weight = random_weight(40, 48, dtype=torch.float32)
    layer = loaded(make(method, params_dtype=torch.float32), weight)
    assert_close(layer.dequantize(), weight, 0.012 if method is INT8 else 0.04)
    assert layer.dequantize(torch.bfloat16).dtype is torch.bfloat16


@every_method
def test_takes_any_strides_and_no_rows(method):
    layer = loaded(make(method), random_weight(40, 48))
    x = random_x(6, 2, 96)
    strided = x[::2, :, 13:61]
    assert_close(layer(strided), layer(strided.contiguous()), 0.0)
    assert_close(layer(x.transpose(0, 1)[:, :, :48]), layer(x.transpose(0, 1)[:, :, :48].contiguous()), 0.0)
    for shape in ((0, 48), (0, 3, 48), (3, 0, 48)):
        assert layer(x.new_empty(shape)).shape == (*shape[:-1], 40)


@every_method
def test_refuses_inputs_that_do_not_fit(method):
    layer = loaded(make(method), random_weight(40, 48))
    with pytest.raises(ValueError, match=r"qkv_proj\.x: expected bfloat16 or float16, got float32"):
        layer(torch.ones(2, 48))
    with pytest.raises(ValueError, match=r"qkv_proj\.x: expected \(\.\.\., 48\), got \(2, 40\)"):
        layer(random_x(2, 40))
    with torch.enable_grad(), pytest.raises(ValueError, match="requires_grad"):
        layer(random_x(2, 48).requires_grad_())
    assert not any(p.requires_grad for p in layer.parameters())


@every_method
@pytest.mark.parametrize("value", (float("nan"), float("inf"), float("-inf")))
def test_one_bad_element_spoils_nothing_else(method, value, references):
    weight = random_weight(40, 48)
    weight[0, 0] = 0.0
    good = loaded(make(method), weight.clone())
    weight[0, 0] = value
    layer = loaded(make(method), weight)
    assert_close(layer.weight_scale.data, good.weight_scale.data, 0.0)
    assert torch.equal(bits(layer.weight)[1:], bits(good.weight)[1:])
    first = layer.dequantize()[0, 0]
    if value != value:
        assert first == 0 if method is INT8 else first.isnan()
    else:
        assert first.abs() == good.weight_scale.flatten()[0] * (448 if method is not INT8 else 127)


@every_method
def test_refuses_a_weight_that_has_no_finite_scale(method, references):
    with pytest.raises(ValueError, match=r"qkv_proj\.weight_scale: expected finite positive scales, got inf"):
        loaded(make(method), torch.full((40, 48), float("inf"), dtype=torch.bfloat16))
    layer = loaded(make(method), random_weight(40, 48))
    with pytest.raises(ValueError, match="expected finite positive scales"):
        loaded(layer, torch.full((40, 48), float("inf"), dtype=torch.bfloat16))
    good = loaded(make(method), random_weight(40, 48))
    assert_close(layer.weight.data, good.weight.data, 0.0)  # what it had it still has
    assert_close(layer.weight_scale.data, good.weight_scale.data, 0.0)


@every_method
def test_zeros_stay_zeros(method, references):
    layer = loaded(make(method), torch.zeros(40, 48, dtype=torch.bfloat16))
    assert not bits(layer.weight).any() and (layer.weight_scale > 0).all()
    assert not layer(random_x(3, 48)).any()


@every_method
def test_shards_may_be_empty(method):
    layer = make(method, n=(16, 0, 8))
    for i, n in enumerate((16, 0, 8)):
        layer.weight.weight_loader(layer.weight, random_weight(n, 48, seed=i), i)
    layer.quant_method.process_weights_after_loading(layer)
    assert layer(random_x(3, 48)).shape == (3, 24)
    empty = make(method, n=(0,))
    empty.quant_method.process_weights_after_loading(empty)
    assert empty(random_x(3, 48)).shape == (3, 0)


@every_method
def test_says_what_is_missing(method, references):
    layer = make(method)
    process = layer.quant_method.process_weights_after_loading
    with pytest.raises(ValueError, match=r"0\.qkv_proj\.weight: expected 1920 elements to be loaded, got 0"):
        process(layer)
    layer.weight.weight_loader(layer.weight, random_weight(24, 48), "q")
    layer.weight.weight_loader(layer.weight, random_weight(24, 48), "q")  # twice is not more
    with pytest.raises(ValueError, match="expected 1920 elements to be loaded, got 1152"):
        process(layer)
    layer.weight.weight_loader(layer.weight, random_weight(8, 48), "v")
    assert layer.weight.is_meta
    layer.weight.weight_loader(layer.weight, random_weight(8, 48), "k")
    assert not layer.weight.is_meta


@every_method
def test_refuses_tensors_that_do_not_fit_when_they_come(method):
    layer = make(method)
    load = layer.weight.weight_loader
    with pytest.raises(ValueError, match=r"weight \(shard 'k'\): expected \(8, 48\), got \(24, 48\)"):
        load(layer.weight, random_weight(24, 48), "k")
    with pytest.raises(ValueError, match=r"weight: expected \(40, 48\), got \(40, 47\)"):
        load(layer.weight, random_weight(40, 47))
    for shard in ("z", 3, -1, (0, 5), ()):
        with pytest.raises(ValueError, match=r"weight: expected a shard id out of 0\.\.2, q, k, v"):
            load(layer.weight, random_weight(8, 48), shard)
    with pytest.raises(ValueError, match="expected float32 or bfloat16 or float16, got float8_e4m3fn"):
        load(layer.weight, torch.zeros(40, 48).to(torch.float8_e4m3fn))
    pair = make(method, n=(8, 8))
    with pytest.raises(ValueError, match=r"expected a shard id out of 0\.\.1 "):
        pair.weight.weight_loader(pair.weight, random_weight(8, 48), "q")


def test_a_tensor_may_hold_several_shards(references):
    weight = random_weight(40, 48)
    layer = make(PTPC)
    layer.weight.weight_loader(layer.weight, weight[24:], (1, 2))
    layer.weight.weight_loader(layer.weight, weight[:24], 0)
    assert_close(layer.weight.data, loaded(make(PTPC), weight).weight.data, 0.0)


@every_method
def test_serves_an_engine_s_own_loader_and_layer(method, references):
    """A plain module, and a loader that narrows by the parameter's attributes."""
    calls = []

    def loader(param, loaded_weight, shard_id):
        calls.append(shard_id)
        start, size = {"gate": (0, 16), "up": (16, 16)}[shard_id]
        assert (param.output_dim, param.input_dim, param.tag) == (0, 1, "x")
        param.data.narrow(param.output_dim, start, size).copy_(loaded_weight)

    layer = nn.Module()
    method().create_weights(layer, 48, [16, 16], 48, 32, torch.bfloat16, weight_loader=loader, tag="x")
    weight = random_weight(32, 48)
    layer.weight.weight_loader(layer.weight, weight[16:], "up")
    layer.weight.weight_loader(layer.weight, weight[:16], shard_id="gate")
    method().process_weights_after_loading(layer)
    assert {"gate", "up"} == set(calls)
    assert_close(layer.weight.data, QUANTIZERS[method](weight)[0], 0.0)
    assert method().apply(layer, random_x(2, 48)).shape == (2, 32)
    assert layer.logical_widths == [16, 16] and layer.weight_block_size is None
    assert (layer.input_size_per_partition, layer.output_size_per_partition) == (48, 32)
    assert layer.orig_dtype is torch.bfloat16


@every_method
def test_a_weight_put_there_directly_is_quantized(method, references):
    layer = make(method)
    layer.weight = nn.Parameter(random_weight(40, 48), requires_grad=False)
    layer.quant_method.process_weights_after_loading(layer)
    assert_close(layer.weight.data, QUANTIZERS[method](random_weight(40, 48))[0], 0.0)


@every_method
def test_pre_processed_weights_are_left_alone(method, references):
    layer = loaded(make(method), random_weight(40, 48))
    other = make(method)
    with pre_processed_weights():
        with pytest.raises(RuntimeError, match=r"qkv_proj\.weight: expected quantized weights"):
            other.quant_method.process_weights_after_loading(other)
        other.weight = layer.weight
        other.weight_scale = layer.weight_scale
        other.quant_method.process_weights_after_loading(other)
    assert other.weight is layer.weight and other.input_scale is None
    x = random_x(3, 48)
    assert_close(other(x), layer(x), 0.0)


def test_a_method_without_support_refuses_pre_processed_weights():
    class Own(Fp8PtpcOnlineLinearMethod):
        supports_pre_processed_weights = False

    layer = loaded(make(PTPC), random_weight(40, 48))
    with pre_processed_weights(), pytest.raises(RuntimeError, match="Own"):
        Own().process_weights_after_loading(layer)


def test_ptpc_refuses_gpus_without_fp8_units():
    with pretend("sm80"), pytest.raises(ValueError, match="Fp8PtpcOnlineLinearMethod quantizes activations"):
        make(PTPC)


def test_gfx942_gets_its_own_fp8(references, on_cpu):
    with pretend("gfx942"):
        for method in (TENSOR, PTPC):
            layer = loaded(make(method), random_weight(40, 48))
            assert layer.weight.dtype is torch.float8_e4m3fnuz
            x = random_x(3, 48)
            expected = token_rounded(x, torch.float8_e4m3fnuz) @ layer.dequantize().T
            assert_close(layer(x), expected.bfloat16(), 4e-3)
            assert_close(layer.dequantize(), random_weight(40, 48).float(), 0.04)


@every_method
def test_compiles_to_one_graph(method, references):
    layer = loaded(make(method, bias=True), random_weight(40, 48))
    torch._dynamo.reset()  # other methods have been compiled through the same forward
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for m in (1, 4, 0):
        x = random_x(m, 2, 48)
        assert_close(compiled(x), layer(x), 0.0)


@pytest.mark.parametrize("fast", (False, True))
def test_fast_accumulation_is_the_method_s_choice(fast, references, monkeypatch):
    seen = []

    def spy(name):
        original = getattr(products, name)
        monkeypatch.setattr(
            products,
            name,
            lambda *a, fast_accum, **k: seen.append(fast_accum) or original(*a, fast_accum=fast_accum, **k),
        )

    spy("scaled_mm")
    spy("scaled_mm_group")
    for method in (TENSOR, PTPC, Fp8PerBlockOnlineLinearMethod):
        layer = loaded(make(method), random_weight(40, 48))
        if fast:
            layer.quant_method.fast_accum = True
        layer(random_x(2, 48))
    assert seen == [fast] * 3


def test_unquantized_is_a_plain_product():
    layer = Linear(48, [24, 8], bias=True, quant_method=UnquantizedLinearMethod())
    weight, bias, x = random_weight(32, 48), random_x(32), random_x(3, 48)
    loaded(layer, [weight[:24], weight[24:]])
    for i, part in enumerate((bias[:24], bias[24:])):
        layer.bias.weight_loader(layer.bias, part, i)
    assert_close(layer(x), nn.functional.linear(x, weight, bias), 0.0)
    assert_close(layer.dequantize(), weight.float(), 0.0)


def test_linear_refuses_sizes_that_ranks_do_not_divide():
    with pytest.raises(ValueError, match=r"p\.output_size: expected a multiple of 4 ranks, got 30"):
        Linear(48, 30, split="column", tp_size=4, prefix="p")
    with pytest.raises(ValueError, match=r"p\.input_size: expected a multiple of 5 ranks, got 48"):
        Linear(48, 30, split="row", tp_size=5, prefix="p")
    with pytest.raises(ValueError, match=r"split: expected one of None, 'column', 'row', got 'both'"):
        Linear(48, 30, split="both")
    with pytest.raises(ValueError, match=r"tp_rank: expected 0\.\.1, got 2"):
        Linear(48, 30, tp_size=2, tp_rank=2)
    with pytest.raises(ValueError, match="params_dtype: expected one of float32, bfloat16, float16, got int8"):
        Linear(48, 30, params_dtype=torch.int8)
    with pytest.raises(ValueError, match="input_size_per_partition: expected at least 1, got 0"):
        Linear(0, 30)


@every_method
def test_repr_shows_scheme_and_shapes(method, references):
    text = repr(loaded(make(method), random_weight(40, 48)))
    assert "K=48, N=40" in text and ":" in text and "[40, 48]" in text and "weight_scale=float32[" in text
