"""Tensor parallelism: every rank's quantized weight is its slice of the single device's, bit for bit."""

import pytest
import torch
from linear_kit import Ranks, loaded, random_weight, random_x

from fpk.check import assert_close, bits
from fpk.methods import (
    Fp8PerBlockOnlineLinearMethod,
    Fp8PerTensorOnlineLinearMethod,
    Fp8PtpcOnlineLinearMethod,
    Int8PtpcOnlineLinearMethod,
    Linear,
)
from fpk.methods.parallel import reduce_max, shard_range

pytestmark = pytest.mark.usefixtures("references")

TENSOR, PTPC, INT8 = Fp8PerTensorOnlineLinearMethod, Fp8PtpcOnlineLinearMethod, Int8PtpcOnlineLinearMethod
BLOCK = Fp8PerBlockOnlineLinearMethod
every_method = pytest.mark.parametrize("method", (TENSOR, PTPC, INT8), ids=lambda m: m.__name__)
every_count = pytest.mark.parametrize("count", (2, 4, 8))

WIDTHS = (64, 32, 32)
K = 96


def shards() -> list[torch.Tensor]:
    """Weights with an outlier that only the last rank sees, whichever way they are cut."""
    return [random_weight(n, K, seed=n + i) for i, n in enumerate(WIDTHS)]


def rows_of(rank: int, count: int, widths: tuple[int, ...] = WIDTHS) -> list[int]:
    """Rows of the fused weight that a rank holds if the output is cut."""
    rows, offset = [], 0
    for width in widths:
        part = width // count
        rows += range(offset + rank * part, offset + (rank + 1) * part)
        offset += width
    return rows


def on_ranks(method, count, split):
    ranks = Ranks(count)

    def build(rank):
        layer = Linear(K, WIDTHS, quant_method=method(), split=split, tp_size=count, tp_rank=rank, prefix="p")
        return loaded(layer, shards())

    return ranks.run(build), ranks


@every_method
@every_count
def test_column_parallel_is_a_slice(method, count):
    whole = loaded(Linear(K, WIDTHS, quant_method=method()), shards())
    layers, ranks = on_ranks(method, count, "column")
    for rank, layer in enumerate(layers):
        rows = rows_of(rank, count)
        assert torch.equal(bits(layer.weight), bits(whole.weight)[rows])
        scale = whole.weight_scale if method is TENSOR else whole.weight_scale[rows]
        assert_close(layer.weight_scale.data, scale.data, 0.0)
    assert ranks.reductions == [1 if method is TENSOR else 0] * count


@every_method
@every_count
def test_row_parallel_is_a_slice(method, count):
    whole = loaded(Linear(K, WIDTHS, quant_method=method()), shards())
    layers, ranks = on_ranks(method, count, "row")
    for rank, layer in enumerate(layers):
        part = K // count
        assert torch.equal(bits(layer.weight), bits(whole.weight)[:, rank * part : (rank + 1) * part])
        assert_close(layer.weight_scale.data, whole.weight_scale.data, 0.0)
    assert ranks.reductions == [1] * count


@every_method
def test_sum_of_row_parallel_outputs_is_the_product(method):
    layers, _ = on_ranks(method, 4, "row")
    x = random_x(5, K)
    total = sum(layer(part.contiguous()).float() for layer, part in zip(layers, x.chunk(4, dim=-1), strict=True))
    assert_close(total, x.float() @ torch.cat(shards()).float().T, 0.05)


@every_count
@pytest.mark.parametrize("split", ("column", "row"))
@pytest.mark.parametrize(
    ("k", "widths"),
    (
        (2048, (2048, 1024, 1024)),  # cuts at blocks, whatever the number of ranks
        (1152, (576, 192, 192)),  # cuts inside blocks
        (320, (384,)),
        (320, (192, 64, 0)),
    ),
    ids=str,
)
def test_block_scales_are_those_of_a_single_device(count, split, k, widths):
    def weights():
        return [random_weight(n, k, seed=n + i) for i, n in enumerate(widths)]

    def build(rank, count=count, split=split):
        layer = Linear(k, widths, quant_method=BLOCK(), split=split, tp_size=count, tp_rank=rank, prefix="p")
        return loaded(layer, weights())

    whole = build(0, 1, None)
    ranks = Ranks(count)
    aligned = k // count % 128 == 0 if split == "row" else all(w // count % 128 == 0 for w in widths)
    for rank, layer in enumerate(ranks.run(build)):
        if split == "column":
            rows = rows_of(rank, count, widths)
            assert torch.equal(bits(layer.weight), bits(whole.weight)[rows])
            assert_close(layer.dequantize(), whole.dequantize()[rows], 0.0)
        else:
            columns = slice(rank * k // count, (rank + 1) * k // count)
            assert torch.equal(bits(layer.weight), bits(whole.weight)[:, columns])
            assert_close(layer.dequantize(), whole.dequantize()[:, columns].contiguous(), 0.0)
    assert ranks.reductions == [0 if aligned else sum(w > 0 for w in widths)] * count


def test_a_replicated_layer_reduces_nothing():
    layer = Linear(K, WIDTHS, quant_method=TENSOR(), tp_size=2, tp_rank=1)
    assert_close(
        loaded(layer, shards()).weight_scale.data,
        loaded(Linear(K, WIDTHS, quant_method=TENSOR()), shards()).weight_scale.data, 0.0,
    )  # fmt: skip


@every_method
def test_ranks_may_share_key_and_value_heads(method):
    """8 ranks, 64 query rows each alone, key and value rows by twos."""
    whole = loaded(Linear(K, WIDTHS, quant_method=method()), shards())

    def build(rank):
        layer = Linear(
            K, WIDTHS, quant_method=method(), split="column", tp_size=8, tp_rank=rank, num_kv_head_replicas=2
        )
        return loaded(layer, shards())

    for rank, layer in enumerate(Ranks(8).run(build)):
        assert layer.output_partition_sizes == [8, 8, 8]
        pair = rank // 2
        rows = [
            *range(rank * 8, rank * 8 + 8),
            *range(64 + pair * 8, 72 + pair * 8),
            *range(96 + pair * 8, 104 + pair * 8),
        ]
        assert torch.equal(bits(layer.weight), bits(whole.weight)[rows])


def test_only_the_first_rank_adds_the_bias_of_a_shared_input():
    bias = random_x(16)

    def build(rank):
        layer = Linear(K, 16, bias=True, quant_method=PTPC(), split="row", tp_size=2, tp_rank=rank)
        layer.bias.weight_loader(layer.bias, bias)
        return loaded(layer, torch.zeros(16, K, dtype=torch.bfloat16))

    first, second = Ranks(2).run(build)
    x = random_x(3, K // 2)
    assert_close(first(x), bias.expand(3, 16).contiguous(), 0.0)
    assert not second(x).any()


def test_the_bias_of_a_cut_output_is_cut_by_shards():
    bias = random_x(sum(WIDTHS))
    layer = Linear(K, WIDTHS, bias=True, quant_method=PTPC(), split="column", tp_size=4, tp_rank=1)
    layer.bias.weight_loader(layer.bias, bias)
    assert_close(layer.bias.data, bias[rows_of(1, 4)], 0.0)


def test_refuses_to_guess_the_maximum_of_other_ranks():
    layer = Linear(K, 16, quant_method=TENSOR(), split="row", tp_size=2, tp_rank=0, prefix="p.o_proj")
    with pytest.raises(ValueError, match=r"p\.o_proj\.weight_scale: expected torch\.distributed to be initialized"):
        loaded(layer, random_weight(16, K))


def _gloo(rank, count, path, results):
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=count)
    tensor = torch.tensor([[float(rank)], [1.0 - rank]])
    results.put(reduce_max(tensor, count).tolist())
    try:
        reduce_max(tensor, count + 1, what="p.weight_scale")
    except ValueError as error:
        results.put(str(error))
    torch.distributed.destroy_process_group()


def test_torch_distributed_finds_the_maximum(tmp_path):
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_gloo, args=(r, 2, tmp_path / "store", results)) for r in range(2)]
    for process in processes:
        process.start()
    got = [results.get(timeout=300) for _ in range(4)]
    for process in processes:
        process.join(60)
    message = "p.weight_scale: expected a process group of 3 ranks (layer.tp_group), got one of 2"
    assert sorted(map(str, got)) == sorted([str([[1.0], [1.0]])] * 2 + [message] * 2)


def test_refuses_sizes_that_do_not_add_up():
    layer = torch.nn.Module()
    layer.tp_size, layer.tp_rank = 4, 0
    with pytest.raises(ValueError, match=r"output_partition_sizes: expected a sum of 100 / 4 ranks, got \[30\]"):
        TENSOR().create_weights(layer, K, [30], K, 100, torch.bfloat16)
    with pytest.raises(ValueError, match=r"input_size_per_partition: expected 96 / 4 ranks, got 30"):
        TENSOR().create_weights(layer, 30, [30], K, 30, torch.bfloat16)


def test_ranges_cut_between_groups():
    assert [shard_range(2880, 32, 4, r) for r in range(4)] == [(0, 736), (736, 1472), (1472, 2208), (2208, 2880)]
    assert [shard_range(100, 32, 8, r) for r in range(8)] == [(0, 32), (32, 64), (64, 96), (96, 100)] + [(100, 100)] * 4
    for arguments in ((64, 0, 2, 0), (64, 32, 2, 2), (64, 32, 0, 0)):
        with pytest.raises(ValueError, match="shard_range: expected"):
            shard_range(*arguments)
