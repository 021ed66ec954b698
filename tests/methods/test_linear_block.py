"""Block scales, serialized and online: any shape, any cut, every form that checkpoints store them in."""

import pytest
import torch
from linear_kit import Ranks, default_device, group_rounded, loaded, random_weight, random_x

from fpk.check import assert_close, bits, rel_error
from fpk.device import pretend
from fpk.formats import E4M3FN, decode, encode
from fpk.kernels.quant.quantize_fp8_block import quantize_fp8_block
from fpk.methods import (
    Fp8Config,
    Fp8PerBlockOnlineLinearMethod,
    Fp8PerTensorOnlineLinearMethod,
    Linear,
    pre_processed_weights,
)

F8 = torch.float8_e4m3fn


def make(k, n, block=(128, 128), e8m0=False, **kwargs) -> Linear:
    config = Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=list(block))
    config.is_scale_e8m0 = e8m0
    return Linear(k, n, quant_config=config, prefix="model.layers.0.kv_a_proj", **kwargs)


def stored(n: int, k: int, block, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A shard as a checkpoint holds it."""
    generator = torch.Generator().manual_seed(seed)
    codes = encode(torch.randn(n, k, generator=generator, device="cpu") * 100, E4M3FN).view(F8)
    scale = torch.rand(-(-n // block[0]), -(-k // block[1]), generator=generator, device="cpu") + 0.25
    return codes.to(default_device()), scale.to(default_device())


def values(codes: torch.Tensor, scale: torch.Tensor, block) -> torch.Tensor:
    n, k = codes.shape
    full = scale.float().repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
    return decode(codes, E4M3FN) * full


def put(layer, codes, scale, shard=None) -> None:
    layer.weight.weight_loader(layer.weight, codes, shard)
    layer.weight_scale_inv.weight_loader(layer.weight_scale_inv, scale, shard)


def process(layer: Linear) -> Linear:
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def check_product(layer: Linear, group: int, m: int = 5) -> None:
    x = random_x(m, layer.input_size_per_partition)
    bias = None if layer.bias is None else layer.bias.float()
    expected = torch.nn.functional.linear(group_rounded(x, group), layer.dequantize(), bias)
    assert_close(layer(x), expected.bfloat16(), 4e-3)


def test_scales_of_activations_lie_as_products_read_them_fastest(monkeypatch):
    """By groups, each from a multiple of 16 bytes on: what kernels load by TMA, and what tables are measured with."""
    from fpk.methods import products

    seen, product = [], products.scaled_mm_group

    def noted(a, b, scale_a, scale_b, **rest):
        seen.append(scale_a.stride())
        return product(a, b, scale_a, scale_b, **rest)

    monkeypatch.setattr(products, "scaled_mm_group", noted)
    layer = make(256, 256)
    put(layer, *stored(256, 256, (128, 128)))
    check_product(process(layer), 128)
    assert seen == [(1, 8)]


@pytest.mark.parametrize("block", ((128, 128), (64, 32), (32, 128)), ids=str)
@pytest.mark.parametrize(("n", "k"), ((256, 256), (200, 300), (96, 40)), ids=str)
def test_weights_are_codes_times_the_scale_of_their_block(n, k, block, references):
    codes, scale = stored(n, k, block)
    layer = make(k, n, block)
    assert layer.weight_scale_inv.shape == scale.shape and layer.weight_block_size == list(block)
    put(layer, codes, scale)
    process(layer)
    assert torch.equal(bits(layer.weight), bits(codes))
    assert_close(layer.weight_scale_inv.data, scale, 0.0)
    assert_close(layer.dequantize(), values(codes, scale, block), 0.0)
    assert layer.input_scale is None
    check_product(layer, block[1])


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("shape", ((3,), (2, 2), (), (0,)), ids=str)
def test_product_in_both_dtypes_and_any_rank(dtype, shape, launches):
    codes, scale = stored(96, 160, (64, 64))
    layer = make(160, 96, (64, 64), bias=True, params_dtype=dtype)
    put(layer, codes, scale / 100)
    layer.bias.weight_loader(layer.bias, random_x(96, dtype=dtype))
    process(layer)
    x = random_x(*shape, 160, dtype=dtype)
    out = layer(x)
    assert out.dtype == dtype
    expected = group_rounded(x, 64) @ layer.dequantize().T + layer.bias.float()
    assert_close(out, expected.to(dtype), 4e-3)
    assert launches() > 0


@pytest.mark.parametrize("form", ("bf16", "fp16", "4d", "uint8", "e8m0", "e8m0 parameter"))
def test_takes_every_form_of_scales(form, references):
    codes, scale = stored(200, 300, (128, 128))
    layer = make(300, 200, e8m0=form == "e8m0 parameter")
    exponents = torch.randint(100, 140, scale.shape, dtype=torch.uint8)
    given = {
        "bf16": scale.bfloat16(), "fp16": scale.half(), "4d": scale[:, None, :, None], "uint8": exponents,
    }.get(form, exponents.view(torch.float8_e8m0fnu))  # fmt: skip
    put(layer, codes, given)
    process(layer)
    expected = torch.exp2(exponents.float() - 127) if given.element_size() == 1 else given.float().view(scale.shape)
    assert layer.weight_scale_inv.dtype is torch.float32
    assert_close(layer.weight_scale_inv.data, expected, 0.0)


SHAPES = (
    (384, (256, 128, 128)),
    (192, (192, 64)),  # the second shard begins inside a block of the fused grid
    (160, (72, 24, 0, 40)),
)


@pytest.mark.parametrize(("k", "widths"), SHAPES, ids=str)
def test_every_shard_keeps_its_own_grid(k, widths, references):
    parts = [stored(n, k, (128, 128), seed=i) for i, n in enumerate(widths)]
    layer = make(k, widths)
    for i, part in enumerate(parts):
        put(layer, *part, i)
    process(layer)
    assert_close(layer.dequantize(), torch.cat([values(*part, (128, 128)) for part in parts]), 0.0)
    check_product(layer, 128)


@pytest.mark.parametrize(("k", "widths"), SHAPES, ids=str)
def test_a_module_fused_on_disk_has_one_grid(k, widths, references):
    codes, scale = stored(sum(widths), k, (128, 128))
    layer = make(k, widths)
    put(layer, codes, scale)
    assert_close(process(layer).dequantize(), values(codes, scale, (128, 128)), 0.0)


def test_a_tensor_may_hold_several_shards(references):
    first, rest = stored(192, 160, (128, 128), 0), stored(104, 160, (128, 128), 1)
    layer = make(160, (192, 64, 40))
    put(layer, *rest, (1, 2))
    put(layer, *first, 0)
    expected = torch.cat([values(*first, (128, 128)), values(*rest, (128, 128))])
    assert_close(process(layer).dequantize(), expected, 0.0)


@pytest.mark.parametrize("count", (2, 4, 8))
@pytest.mark.parametrize("split", ("column", "row"))
@pytest.mark.parametrize(
    ("k", "widths"), ((576, (576,)), (256, (256, 384)), (1024, (2048, 1024)), (320, (192, 64))), ids=str
)
def test_ranks_may_cut_inside_blocks(count, split, k, widths, references):
    parts = [stored(n, k, (128, 128), seed=i) for i, n in enumerate(widths)]
    whole = [values(*part, (128, 128)) for part in parts]
    for rank in range(count):
        layer = make(k, widths, split=split, tp_size=count, tp_rank=rank)
        for i, part in enumerate(parts):
            put(layer, *part, i)
        process(layer)
        if split == "column":
            expected = torch.cat([w.chunk(count)[rank] for w in whole])
        else:
            expected = torch.cat(whole).chunk(count, dim=1)[rank].contiguous()
        assert_close(layer.dequantize(), expected, 0.0)
        check_product(layer, 128)


def test_missing_scales_are_counted(references):
    layer = make(300, (192, 64))
    put(layer, *stored(192, 300, (128, 128)), 0)
    with pytest.raises(ValueError, match=r"0\.kv_a_proj\.weight: .* shards \[1\] were never loaded"):
        process(layer)
    layer.weight.weight_loader(layer.weight, stored(64, 300, (128, 128))[0], 1)
    # 64-row pieces: four rows of three, the last row of which has not come
    with pytest.raises(ValueError, match=r"0\.kv_a_proj\.weight_scale_inv: 3 of 12 block scales are missing"):
        process(layer)
    put(layer, *stored(64, 300, (128, 128)), 1)
    process(layer)
    none = make(300, 256, e8m0=True)
    none.weight.weight_loader(none.weight, stored(256, 300, (128, 128))[0])
    with pytest.raises(ValueError, match=r"weight_scale_inv: expected finite positive scales, got nan"):
        process(none)


@pytest.mark.parametrize("value", (0.0, -1.0, float("nan"), float("inf")))
def test_scales_must_be_finite_and_positive(value, references):
    codes, scale = stored(200, 300, (128, 128))
    scale[1, 2] = value
    layer = make(300, 200)
    put(layer, codes, scale)
    with pytest.raises(ValueError, match=r"0\.kv_a_proj\.weight_scale_inv: expected finite positive scales, got"):
        process(layer)


def test_refuses_grids_that_do_not_fit():
    layer = make(300, (192, 64))
    for shape, shard, expected in (((2, 2), 0, r"\(2, 3\)"), ((2, 3), 1, r"\(1, 3\)"), ((4, 3), None, r"\(2, 3\)")):
        with pytest.raises(ValueError, match=rf"weight_scale_inv.*: expected {expected}, got"):
            layer.weight_scale_inv.weight_loader(layer.weight_scale_inv, torch.ones(shape), shard)
    with pytest.raises(ValueError, match="weight_scale_inv: expected float8_e8m0fnu or uint8 or float32 or"):
        layer.weight_scale_inv.weight_loader(layer.weight_scale_inv, torch.ones(2, 3, dtype=torch.int32))
    exponents = make(300, 256, e8m0=True)
    with pytest.raises(ValueError, match="weight_scale_inv: expected float8_e8m0fnu or uint8, got float32"):
        exponents.weight_scale_inv.weight_loader(exponents.weight_scale_inv, torch.ones(2, 3))


def test_online_weights_are_what_the_op_makes_of_each_shard(references):
    parts = [random_weight(n, 300, seed=n) for n in (192, 64, 40)]
    layer = loaded(Linear(300, (192, 64, 40), quant_method=Fp8PerBlockOnlineLinearMethod()), parts)
    expected = [quantize_fp8_block(p) for p in parts]
    assert torch.equal(bits(layer.weight), torch.cat([bits(codes) for codes, _ in expected]))
    assert_close(layer.dequantize(), torch.cat([values(*e, (128, 128)) for e in expected]), 0.0)
    assert layer.weight_block_size == [128, 128]
    check_product(layer, 128)
    aligned = torch.cat([random_weight(128, 300), random_weight(256, 300, seed=1)])
    layer = loaded(Linear(300, (128, 256), quant_method=Fp8PerBlockOnlineLinearMethod()), aligned)
    codes, scale = quantize_fp8_block(aligned)
    assert torch.equal(bits(layer.weight), bits(codes))
    assert_close(layer.weight_scale_inv.data, scale, 0.0)


def test_ranks_of_an_online_layer_add_up(references):
    weight, x = random_weight(96, 576), random_x(4, 576)

    def build(rank):
        layer = Linear(576, 96, quant_method=Fp8PerBlockOnlineLinearMethod(), split="row", tp_size=4, tp_rank=rank)
        return loaded(layer, weight)

    layers = Ranks(4).run(build)
    for layer in layers:
        check_product(layer, 128)
    total = sum(layer(part.contiguous()).float() for layer, part in zip(layers, x.chunk(4, dim=1), strict=True))
    assert_close(total, x.float() @ weight.float().T, 0.05)


def test_pre_processed_weights_are_left_alone(references):
    source = make(300, (192, 64))
    for i, n in enumerate((192, 64)):
        put(source, *stored(n, 300, (128, 128), i), i)
    process(source)
    layer = make(300, (192, 64))
    with pre_processed_weights():
        layer.weight, layer.weight_scale_inv = source.weight, source.weight_scale_inv
        process(layer)
    assert layer.weight is source.weight and layer.input_scale is None
    assert_close(layer(random_x(3, 300)), source(random_x(3, 300)), 0.0)


def test_gfx942_keeps_the_values_in_its_own_format(references, on_cpu):
    codes, scale = stored(200, 300, (128, 128))
    with pretend("gfx942"):
        layer = make(300, 200)
        put(layer, codes, scale)
        process(layer)
        assert layer.weight.dtype is torch.float8_e4m3fnuz
        assert_close(layer.weight_scale_inv.data, scale * 2, 0.0)
        assert_close(layer.dequantize(), values(codes, scale, (128, 128)) + 0.0, 0.0)
        assert_close(layer(random_x(4, 300)).float(), random_x(4, 300).float() @ layer.dequantize().T, 0.05)


@pytest.mark.parametrize("split", (None, "column", "row"))
def test_gpus_without_fp8_units_leave_activations_alone(split, references):
    with pretend("sm80"):
        codes, scale = stored(576, 576, (128, 128))
        block = make(576, 576, split=split, tp_size=8 if split else 1, tp_rank=3 if split else 0)
        put(block, codes, scale)
        tensor = Linear(576, 64, bias=True, quant_method=Fp8PerTensorOnlineLinearMethod())
        tensor.bias.weight_loader(tensor.bias, random_x(64))
        for layer in (process(block), loaded(tensor, random_weight(64, 576))):
            assert layer.quant_method.scheme(layer).endswith(":none")
            x = random_x(4, layer.input_size_per_partition)
            bias = None if layer.bias is None else layer.bias.float()
            expected = torch.nn.functional.linear(x.float(), layer.dequantize(), bias)
            assert_close(layer(x), expected.bfloat16(), 4e-3)
            assert_close(layer(x.T.contiguous().T), layer(x), 0.0)


def test_static_scales_are_not_used_without_fp8_units(references):
    with pretend("sm80"):
        layer = Linear(48, 32, quant_config=Fp8Config(True, activation_scheme="static"), prefix="p")
        layer.weight.weight_loader(layer.weight, encode(random_weight(32, 48).float(), E4M3FN).view(F8))
        layer.weight_scale.weight_loader(layer.weight_scale, torch.tensor(0.5))
        layer.input_scale.weight_loader(layer.input_scale, torch.tensor(1e-4))
        x = random_x(4, 48)
        assert_close(process(layer)(x), (x.float() @ layer.dequantize().T).bfloat16(), 4e-3)


def test_compiles_to_one_graph(references):
    torch._dynamo.reset()
    layer = loaded(Linear(300, (192, 64), quant_method=Fp8PerBlockOnlineLinearMethod()), random_weight(256, 300))
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for m in (1, 4):
        assert_close(compiled(random_x(m, 300)), layer(random_x(m, 300)), 0.0)


def test_repr_shows_scheme_and_shapes(references):
    assert "fp8_block128:fp8_group128" in repr(make(300, 256))
    assert "fp8_block64x32:fp8_group32" in repr(make(300, 256, (64, 32)))


def test_activations_by_powers_of_two(references):
    """`scale_fmt: ue8m0`: the products of weights with blocks and groups whose scales are rounded up."""
    import fpk

    config = Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=[128, 128])
    config.scale_fmt = "ue8m0"
    layer = Linear(256, 128, quant_config=config, prefix="p")
    w = random_weight(128, 256)
    codes = fpk.quantize(w, "fp8_block128")
    layer.weight.weight_loader(layer.weight, codes.codes)
    layer.weight_scale_inv.weight_loader(layer.weight_scale_inv, codes.scale)
    layer.quant_method.process_weights_after_loading(layer)
    x = random_x(5, 256)
    rows = fpk.quantize(x, "fp8_group128_e8m0")
    assert rows.scale.dtype is torch.uint8
    assert rel_error(layer(x), rows.dequantize() @ layer.dequantize().T) < 0.004
