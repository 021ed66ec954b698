"""Reading checkpoints: safetensors files, their index and config, none of which is trusted.

A header is checked against its file before anything is read by it; tensors are views of the mapped file, so nothing is
allocated that the file does not hold. Format: huggingface/safetensors, README "Format".
"""

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

MAX_HEADER = 100_000_000
MAX_JSON = 64 << 20
MAX_DIMENSIONS = 16

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
_PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}  # shapes count elements, not bytes
_BITS = {name: 8 * dtype.itemsize for name, dtype in DTYPES.items()} | _PACKED_BITS
FLOATS = ("F32", "BF16", "F16")
CODES = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "F4", "F6_E2M3", "F6_E3M2")
"""Dtypes of tensors that mean nothing without a scale."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file: `start` is the offset of its first byte from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    nbytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.path.name}: {self.name}"


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of a safetensors file and its metadata, without reading any data.

    Raises:
        ValueError: the file is no regular file or no safetensors file, or a tensor's dtype, shape and place do not fit
            each other or the file; names the file and the tensor.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: expected a regular file")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(MAX_HEADER, size - 8):
            told = f"a header of {length} bytes" if size >= 8 else "no header"
            raise ValueError(f"{path}: expected a safetensors file, got {told} in a file of {size} bytes")
        header = _parse(path, file.read(length))
    data = 8 + length
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{path}: __metadata__: expected strings by name")
    tensors = {name: _tensor(path, name, entry, data, size) for name, entry in header.items()}
    end = data
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.nbytes)):
        if tensor.start != end:
            how = "overlaps the tensor before it" if tensor.start < end else "leaves a hole before it"
            raise ValueError(f"{path}: {tensor.name}: expected to begin at byte {end - data}, {how}")
        end += tensor.nbytes
    if end != size:
        raise ValueError(f"{path}: expected {end} bytes, got {size}: the file is cut or has something behind it")
    return tensors, metadata


def _tensor(path: Path, name: str, entry: Any, data: int, size: int) -> StoredTensor:
    def refuse(what: str) -> NoReturn:
        raise ValueError(f"{path}: {name}: {what}")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        refuse("expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        refuse(f"expected one of the dtypes {', '.join(_BITS)}, got {dtype!r:.80}")
    if not _is_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        refuse(f"expected a shape of at most {MAX_DIMENSIONS} sizes, got {shape!r:.80}")
    if not _is_sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size - data:
        refuse(f"expected data_offsets within 0..{size - data}, got {offsets!r:.80}")
    bits, nbytes = math.prod(shape) * _BITS[dtype], offsets[1] - offsets[0]
    if bits != 8 * nbytes:
        refuse(f"expected {-(-bits // 8)} bytes for {dtype} {shape}, got {nbytes}"[:300])
    return StoredTensor(name, dtype, tuple(shape), path, data + offsets[0], nbytes)


def _is_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in values)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    """A JSON object; no name may stand in an object twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
            raise ValueError(f"{name!r:.80} stands there twice")
        return made

    try:
        parsed = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(parsed).__name__}")
    return parsed


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        ValueError: it does not, is no regular file, or is larger than 64 MiB.
    """
    if not path.is_file() or path.stat().st_size > MAX_JSON:
        raise ValueError(f"{path}: expected a regular file of at most {MAX_JSON >> 20} MiB")
    return _parse(path, path.read_bytes())


class Checkpoint:
    """The tensors of a directory (or of one file) by name, and its config.

    With an index file, the files it lists are read, and each tensor from the file it names; without one, all
    `*.safetensors`.

    Attributes:
        path: the directory, or the file.
        tensors: name to `StoredTensor`.
        unlisted: tensors that stand in a file of the index but not in the index.
        config: config.json, or {}.
        quantization: what says how the weights are quantized, or None.
        quantization_source: the file and key it came from.

    Raises:
        ValueError: nothing to read, or a file, an index or a config that is not as it should be.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.unlisted: list[str] = []
        self.config: dict[str, Any] = {}
        self.quantization: dict[str, Any] | None = None
        self.quantization_source = ""
        self._maps: dict[Path, Tensor] = {}
        if self.path.is_file():
            self.tensors, _ = read_header(self.path)
            return
        if not self.path.is_dir():
            raise ValueError(f"{self.path}: expected a directory or a safetensors file")
        self.tensors = self._read_index() or self._read_all()
        if (self.path / "config.json").is_file():
            self.config = read_json(self.path / "config.json")
        self._find_quantization()

    def _read_index(self) -> dict[str, StoredTensor]:
        indices = sorted(self.path.glob("*.safetensors.index.json"))
        if not indices:
            return {}
        if len(indices) > 1:
            names = ", ".join(p.name for p in indices)
            raise ValueError(f"{self.path}: expected one index file, got {names}")
        listed = read_json(indices[0]).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise ValueError(f"{indices[0]}: weight_map: expected file names by tensor")
        headers = {}
        for name, file in listed.items():
            if (
                not isinstance(file, str)
                or file != Path(file).name
                or "\\" in file
                or not file.endswith(".safetensors")
            ):
                raise ValueError(
                    f"{indices[0]}: {name}: expected the name of a safetensors file here, got {file!r:.80}"
                )
            if file not in headers:
                if not (self.path / file).is_file():
                    raise ValueError(f"{indices[0]}: {name}: expected the file {file}, there is none")
                headers[file] = read_header(self.path / file)[0]
            if name not in headers[file]:
                raise ValueError(f"{indices[0]}: {name}: expected in {file}, it is not there")
        self.unlisted = sorted({n for header in headers.values() for n in header} - set(listed))
        return {name: headers[file][name] for name, file in listed.items()}

    def _read_all(self) -> dict[str, StoredTensor]:
        found: dict[str, StoredTensor] = {}
        for path in sorted(self.path.glob("*.safetensors")):
            for name, tensor in read_header(path)[0].items():
                if name in found:
                    raise ValueError(f"{path}: {name}: stands in {found[name].path.name} too")
                found[name] = tensor
        if not found:
            raise ValueError(f"{self.path}: expected safetensors files, there are none")
        return found

    def _find_quantization(self) -> None:
        """In config.json at the top, under an older key, or under text_config; else in hf_quant_config.json."""
        nested = self.config.get("text_config")
        places = [
            ("config.json: quantization_config", self.config.get("quantization_config")),
            ("config.json: compression_config", self.config.get("compression_config")),
            (
                "config.json: text_config.quantization_config",
                nested.get("quantization_config") if isinstance(nested, dict) else None,
            ),
        ]
        other = self.path / "hf_quant_config.json"
        if other.is_file():
            places.append(("hf_quant_config.json", read_json(other)))
        for source, found in places:
            if found is None:
                continue
            if not isinstance(found, dict):
                raise ValueError(f"{self.path}: {source}: expected an object, got {type(found).__name__}")
            self.quantization, self.quantization_source = found, source
            return

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[StoredTensor]:
        return iter(self.tensors.values())

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self)

    def read(self, name: str) -> Tensor:
        """A tensor, on the CPU: a private view of the mapped file; clone what outlives the checkpoint.

        Raises:
            ValueError: the file has changed since it was opened.
            NotImplementedError: torch has no dtype for it.
        """
        stored = self.tensors[name]
        if stored.dtype not in DTYPES:
            raise NotImplementedError(f"{stored}: torch has no dtype for {stored.dtype}")
        dtype = DTYPES[stored.dtype]
        if stored.nbytes == 0:
            return torch.empty(stored.shape, dtype=dtype, device="cpu")
        raw = self._map(stored)[stored.start : stored.start + stored.nbytes]
        if stored.start % dtype.itemsize:
            raw = raw.clone()  # nothing in the format promises alignment
        return raw.view(dtype).reshape(stored.shape)

    def _map(self, stored: StoredTensor) -> Tensor:
        size = stored.path.stat().st_size
        if stored.path not in self._maps:
            self._maps[stored.path] = torch.from_file(
                str(stored.path), shared=False, size=size, dtype=torch.uint8, device="cpu"
            )
        if size < stored.start + stored.nbytes or self._maps[stored.path].numel() != size:
            raise ValueError(f"{stored}: the file has become another one since it was opened")
        return self._maps[stored.path]
