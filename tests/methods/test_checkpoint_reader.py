"""The safetensors reader: good files bit for bit, bad ones refused by name and without allocating what they claim."""

import json
import random
import resource

import pytest
import torch
from checkpoint_kit import FIXTURES, entry, header_file, write_checkpoint
from safetensors.torch import load_file, save_file

from fpk.check import bits
from fpk.methods.checkpoint import DTYPES, Checkpoint, read_header


def test_reads_what_the_library_reads():
    for fixture in ("lc_FP8_DYNAMIC", "q_int8"):
        checkpoint = Checkpoint(FIXTURES / fixture)
        theirs = load_file(FIXTURES / fixture / "model.safetensors")
        assert set(checkpoint.tensors) == set(theirs)
        for name, tensor in theirs.items():
            ours = checkpoint.read(name)
            assert ours.dtype == tensor.dtype and ours.shape == tensor.shape
            assert torch.equal(bits(ours), bits(tensor)), name
        assert checkpoint.nbytes == sum(t.nbytes for t in theirs.values())


def test_every_dtype_and_alignment(tmp_path, on_cpu):
    """Behind an odd number of bytes nothing is aligned."""
    tensors = {}
    for i, (name, dtype) in enumerate(sorted(DTYPES.items())):
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
        tensors[f"{i:02d}{name}"] = raw.view(dtype).reshape(2, 3)
    header, data = {}, b"\0"
    header["_pad"] = entry("U8", [1], 0, 1)
    for name, tensor in tensors.items():
        raw = bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
        header[name] = entry(name[2:], [2, 3], len(data), len(data) + len(raw))
        data += raw
    header |= {"empty": entry("F32", [0, 5], len(data), len(data)), "scalar": entry("U8", [], len(data), len(data) + 1)}
    checkpoint = Checkpoint(header_file(tmp_path / "a.safetensors", header, data + b"\7"))
    for name, tensor in tensors.items():
        assert torch.equal(bits(checkpoint.read(name)), bits(tensor)), name
    assert checkpoint.read("empty").shape == (0, 5) and checkpoint.read("scalar").item() == 7


def test_packed_dtypes_are_listed_but_not_read(tmp_path):
    header = {"a": entry("F4", [2, 4], 0, 4), "b": entry("F6_E2M3", [4], 4, 7)}
    checkpoint = Checkpoint(header_file(tmp_path / "a.safetensors", header, bytes(7)))
    assert checkpoint.tensors["a"].shape == (2, 4)
    with pytest.raises(NotImplementedError, match=r"a\.safetensors: b: .*F6_E2M3"):
        checkpoint.read("b")


GOOD = {"a": entry("F32", [2, 2], 0, 16), "b": entry("U8", [4], 16, 20)}
BAD = {
    "empty": (b"", None, b"", "JSON"),
    "not JSON": (b"{'a': 1}", None, b"", "JSON"),
    "not UTF-8": (b"\xff\xfe{}", None, b"", "JSON"),
    "nested too deep": (b"[" * 200_000, None, b"", "JSON"),
    "a list": (b"[]", None, b"", "object"),
    "longer header than file": ({}, 1 << 40, b"", "header of 1099511627776"),
    "negative as unsigned": ({}, (1 << 64) - 1, b"", "header"),
    "length 1 too long": ({}, 3, b"", "header of 3"),
    "metadata no strings": ({"__metadata__": {"a": 1}}, None, b"", "__metadata__"),
    "metadata a list": ({"__metadata__": ["a"]}, None, b"", "__metadata__"),
    "name twice": (b'{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "a": {}}', None, b"", "twice"),
    "entry no object": ({"a": 1}, None, b"", "a: expected dtype"),
    "a key missing": ({"a": {"dtype": "U8", "shape": [1]}}, None, b"\0", "a: expected dtype"),
    "a key too many": ({"a": entry("U8", [1], 0, 1) | {"x": 1}}, None, b"\0", "a: expected dtype"),
    "unknown dtype": ({"a": entry("F7", [1], 0, 1)}, None, b"\0", "a: .*dtypes .*F7"),
    "dtype a list": ({"a": entry(["U8"], [1], 0, 1)}, None, b"\0", "a: .*dtypes"),
    "negative size": ({"a": entry("U8", [-1], 0, 1)}, None, b"\0", "a: .*shape"),
    "two negative sizes": ({"a": entry("U8", [-1, -1], 0, 1)}, None, b"\0", "a: .*shape"),
    "fraction": ({"a": entry("U8", [1.0], 0, 1)}, None, b"\0", "a: .*shape"),
    "true": ({"a": entry("U8", [True], 0, 1)}, None, b"\0", "a: .*shape"),
    "size of 2^63": ({"a": entry("U8", [1 << 63, 0], 0, 0)}, None, b"", "a: .*shape"),
    "too many dimensions": ({"a": entry("U8", [1] * 17, 0, 1)}, None, b"\0", "a: .*shape"),
    "shape no list": ({"a": entry("U8", "11", 0, 1)}, None, b"\0", "a: .*shape"),
    "huge": ({"a": entry("F64", [1 << 40, 1 << 40], 0, 8)}, None, bytes(8), "a: expected 96714"),
    "product that wraps to 0": ({"a": entry("U8", [1 << 32, 1 << 32], 0, 0)}, None, b"", "a: expected 184467440737"),
    "outside the file": ({"a": entry("U8", [8], 0, 8)}, None, bytes(4), "a: expected data_offsets within 0..4"),
    "begins outside": ({"a": entry("U8", [0], 9, 9)}, None, bytes(4), "a: expected data_offsets"),
    "backwards": ({"a": entry("U8", [4], 4, 0)}, None, bytes(4), "a: expected data_offsets"),
    "negative offset": ({"a": entry("U8", [4], -4, 0)}, None, bytes(4), "a: expected data_offsets"),
    "three offsets": ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 1]}}, None, b"\0", "a: expected data"),
    "too few bytes": ({"a": entry("BF16", [3], 0, 4)}, None, bytes(4), "a: expected 6 bytes"),
    "half a byte": ({"a": entry("F4", [3], 0, 1)}, None, bytes(1), "a: expected 2 bytes"),
    "overlap": (GOOD | {"b": entry("U8", [4], 12, 16)}, None, bytes(16), "b: .*overlaps"),
    "the same bytes": (GOOD | {"b": entry("F32", [4], 0, 16)}, None, bytes(16), "(a|b): .*overlaps"),
    "hole": (GOOD | {"b": entry("U8", [4], 20, 24)}, None, bytes(24), "b: .*hole"),
    "cut": (GOOD, None, bytes(19), "b: expected data_offsets"),
    "something behind": (GOOD, None, bytes(21), "expected .* bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_by_name(case, tmp_path):
    header, length, data, words = BAD[case]
    path = header_file(tmp_path / "bad.safetensors", header, data, length)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=rf"bad\.safetensors: {'' if words[0] in 'ab(' else '.*'}{words}"):
        read_header(path)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # kB
    assert grown < 64 << 10


def test_files_of_a_few_bytes(tmp_path):
    for count in range(8):
        (tmp_path / "a.safetensors").write_bytes(bytes(count))
        with pytest.raises(ValueError, match=f"no header in a file of {count} bytes"):
            read_header(tmp_path / "a.safetensors")


def test_changed_bytes_never_crash(tmp_path):
    """Whatever happens to a header, the file is refused or read within its bounds."""
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(2, 2), "b": torch.ones(4, dtype=torch.uint8)}, path)
    good = path.read_bytes()
    length = int.from_bytes(good[:8], "little")
    rng, refused = random.Random(0), 0
    for _ in range(600):
        raw = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            raw[rng.randrange(8 + length)] = rng.randrange(256)
        path.write_bytes(raw[: rng.choice([len(raw), len(raw), rng.randrange(len(raw))])])
        try:
            checkpoint = Checkpoint(path)
        except ValueError as error:
            assert "a.safetensors" in str(error)
            refused += 1
            continue
        for tensor in checkpoint:
            assert tensor.start + tensor.nbytes <= len(raw)
            if tensor.dtype in DTYPES:
                assert checkpoint.read(tensor.name).nbytes == tensor.nbytes
    assert 300 < refused < 600


# ---- directories ---------------------------------------------------------------------------------------------------
def sharded(directory, weight_map, **files):
    for file, tensors in files.items():
        save_file(tensors, directory / f"{file}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def test_index_says_which_file(tmp_path, on_cpu):
    one, two = {"a": torch.ones(2), "b": torch.zeros(2)}, {"b": torch.ones(2), "c": torch.ones(3)}
    where = {"a": "one.safetensors", "b": "two.safetensors"}
    checkpoint = Checkpoint(sharded(tmp_path, where, one=one, two=two))
    assert checkpoint.read("b").tolist() == [1, 1] and set(checkpoint.tensors) == {"a", "b"}
    assert checkpoint.unlisted == ["c"]


@pytest.mark.parametrize(
    "file",
    ["../one.safetensors", "/etc/passwd", "sub/one.safetensors", "..\\one.safetensors", "", ".", "..", "one.bin", 3,
     None, ["one.safetensors"], "./one.safetensors", "one.safetensors/"],
)  # fmt: skip
def test_index_stays_in_its_directory(file, tmp_path, on_cpu):
    inner = tmp_path / "inner"
    (inner / "sub").mkdir(parents=True)
    for place in (tmp_path, inner, inner / "sub"):
        save_file({"a": torch.ones(2)}, place / "one.safetensors")
    with pytest.raises(ValueError, match=r"index\.json: a: expected the name of a safetensors file"):
        Checkpoint(sharded(inner, {"a": file}))


def test_index_that_lies(tmp_path, on_cpu):
    with pytest.raises(ValueError, match=r"a: expected the file one\.safetensors, there is none"):
        Checkpoint(sharded(tmp_path, {"a": "one.safetensors"}))
    with pytest.raises(ValueError, match=r"b: expected in one\.safetensors, it is not there"):
        Checkpoint(sharded(tmp_path, {"b": "one.safetensors"}, one={"a": torch.ones(1)}))
    for weight_map in ({}, None, ["a"]):
        with pytest.raises(ValueError, match="weight_map"):
            Checkpoint(sharded(tmp_path, weight_map))
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="one index file"):
        Checkpoint(tmp_path)


def test_directories_that_are_none(tmp_path, on_cpu):
    with pytest.raises(ValueError, match="expected a directory or a safetensors file"):
        Checkpoint(tmp_path / "missing")
    with pytest.raises(ValueError, match="there are none"):
        Checkpoint(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "two.safetensors")
    with pytest.raises(ValueError, match=r"two\.safetensors: a: stands in one\.safetensors too"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", '{"quantization_config": 3}', '{"quantization_config": [1]}'])
def test_config_that_is_none(text, tmp_path, on_cpu):
    write_checkpoint(tmp_path, {"a": torch.ones(1)}, None)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"expected (JSON|a JSON object|an object)"):
        Checkpoint(tmp_path)


def test_where_the_config_is(tmp_path, on_cpu):
    def source(**config):
        write_checkpoint(tmp_path, {"a": torch.ones(1)}, None, **config)
        return Checkpoint(tmp_path)

    assert source().quantization is None
    nested = {"text_config": {"quantization_config": {"n": 3}}}
    assert source(**nested).quantization == {"n": 3}
    assert source(**nested, compression_config={"n": 2}).quantization == {"n": 2}
    assert source(**nested, compression_config={"n": 2}, quantization_config={"n": 1}).quantization == {"n": 1}
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {}}')
    assert source().quantization_source == "hf_quant_config.json"
    assert source(quantization_config={"n": 1}).quantization == {"n": 1}


def test_a_file_that_changes_is_noticed(tmp_path, on_cpu):
    write_checkpoint(tmp_path, {"a": torch.ones(100), "b": torch.ones(100)}, None)
    checkpoint = Checkpoint(tmp_path)
    write_checkpoint(tmp_path, {"a": torch.ones(4)}, None)
    with pytest.raises(ValueError, match="another one since it was opened"):
        checkpoint.read("b")
