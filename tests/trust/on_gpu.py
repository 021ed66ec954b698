"""What only a GPU can be asked, by hand: small launches for a memory checker, repeats, loads without memory.

    PYTHONPATH=tests python -m trust.on_gpu compare [op ...]     a few cases of each kernel against the references
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=tests compute-sanitizer --tool memcheck --error-exitcode 9 \
        python -m trust.on_gpu launch [op ...]                   the same launches alone (also initcheck, racecheck)
    PYTHONPATH=tests python -m trust.on_gpu repeat [op ...]      1000 times the same bits, beside a busy second stream
    PYTHONPATH=tests python -m trust.on_gpu memory               out of memory in the middle of a load

Inputs are made on the CPU, so that a checker sees fpk's kernels and little else. Exits 1 if something is wrong.
"""

import argparse
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import op_laws
from op_laws import ample, results

import fpk.kernels
from fpk.check import assert_close, bits
from fpk.op import OPS, Op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES, TIMES = int(os.environ.get("FPK_TRUST_CASES", "3")), int(os.environ.get("FPK_TRUST_TIMES", "1000"))
NOISE = 4096  # size of the products on another stream, beside repeats

failures: list[str] = []


def moved(value: Tensor, device: str) -> Tensor:
    """On another device with strides, offset and all of the memory around it."""
    storage = value.untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),)).to(device)
    there = torch.empty(0, dtype=value.dtype, device=device)
    return there.set_(raw.untyped_storage(), value.storage_offset(), value.shape, value.stride())


def arguments(op: Op, case: dict, device: str = DEVICE) -> dict[str, Any]:
    return {n: moved(v, device) if isinstance(v, Tensor) else v for n, v in op.inputs(**case, device="cpu").items()}


def configs(op: Op, args: dict) -> list[dict]:
    """The one that a call would take, and one for every kernel, with its work split and whole."""
    bound, found = op.bind(**args), {}
    for config in (op.config_for(**args), *op.configs(**bound)):
        if op.is_legal(config, bound, op._device(bound)):
            parts = config.get("SPLIT_K", config.get("SPLITS", 1))
            found.setdefault((config.get("kernel"), parts > 1), config)
    return list(found.values())


def tensors(out: object) -> list[Tensor]:
    return [o for o in (out if isinstance(out, tuple) else (out,)) if isinstance(o, Tensor)]


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def aligned(op: Op) -> Iterator[dict[str, Any]]:
    """Cases of round sizes, which kernels of few GPUs want, with all else as it is by itself, or one option changed."""
    options = [{}, *({name: value} for name, choices in op.domain.items() if name not in "MNK" for value in choices)]
    for option in options:
        for m, n, k in ((40, 384, 1024), (300, 512, 1024), (2048, 512, 512), (8, 256, 1024), (1, 2048, 2048)):
            sizes = dict(M=m, N=n, K=k) | (dict(E=3) if "E" in op.domain else {})
            yield {name: size for name, size in sizes.items() if name in op.domain} | option


def kernel_of(op: Op, config: dict[str, Any]) -> str:
    return config.get("kernel", next(iter(op.kernels)))


def of_every_kernel(op: Op) -> Iterator[tuple[dict, dict]]:
    """(case, config): a few cases with their kernels, then one for each kernel of this GPU that they did not meet."""
    met: set[str] = set()
    for case in ample(op)[:CASES]:
        for config in configs(op, arguments(op, case)):
            met.add(kernel_of(op, config))
            yield case, config
    for case in itertools.chain(aligned(op), ample(op)[CASES:]):
        try:
            bound = op.bind(**arguments(op, case))
            op._validate(bound)
        except (TypeError, ValueError, NotImplementedError):
            continue  # sizes that this op does not take, or not alone
        device = op._device(bound)
        if all(n in met for n, k in op.kernels.items() if k.named and (not k.targets or device.arch in k.targets)):
            return
        for config in op.configs(**bound):
            if kernel_of(op, config) not in met and op.is_legal(config, bound, device):
                met.add(kernel_of(op, config))
                yield case, config
    print(f"not run here: {op.name} {sorted(op.kernels.keys() - met)}", flush=True)


def launches(op: Op, compare: bool) -> int:
    count = 0
    for case, config in of_every_kernel(op):
        args = arguments(op, case)
        print(f"> {op.name} {config} {case}", flush=True)  # a checker's findings stand behind this line
        out = results(op, lambda config=config, **given: op.launch(**given, config=config), args)
        synchronize()
        count += 1
        if compare:
            expected = results(op, op.reference, arguments(op, case))
            for o, e in zip(tensors(out), tensors(expected), strict=True):
                assert_close(o.contiguous(), e.contiguous(), op.tolerance(op.bind(**args)), f"{case} {config}: out")
    return count


def grown(op: Op) -> dict[str, Any]:
    """A case of many tiles where the op's sizes allow that."""
    case = ample(op)[0]
    try:
        larger = {n: 5 * v if n in op_laws.SIZES else v for n, v in case.items()}
        op.config_for(**arguments(op, larger))
        return larger
    except (ValueError, NotImplementedError):
        return case


def repeats(op: Op) -> int:
    """Launches, none of which gave other bits than the first, of every kernel with its work split and whole."""
    case = grown(op)
    found = [(case, config) for config in configs(op, arguments(op, case))]
    met = {kernel_of(op, config) for _, config in found}
    found += [(case, config) for case, config in of_every_kernel(op) if kernel_of(op, config) not in met]
    for case, config in found:
        print(f"> {op.name} {config} {case}", flush=True)
        repeat(op, arguments(op, case), config)
    return TIMES * len(found)


def repeat(op: Op, args: dict[str, Any], config: dict[str, Any]) -> None:
    def launch() -> list[Tensor]:
        return tensors(results(op, lambda **given: op.launch(**given, config=config), args))

    written = {n: args[n].clone() for n in op.mutates if args[n] is not None}
    first = [bits(o).clone() for o in launch()]
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    side, noise = torch.cuda.Stream(), torch.randn(NOISE, NOISE, dtype=torch.bfloat16, device=DEVICE)
    for turn in range(TIMES):
        if turn % 50 == 0:
            with torch.cuda.stream(side):
                noise @ noise
        for name, value in written.items():
            args[name].copy_(value)
        for o, f in zip(launch(), first, strict=True):
            wrong += (bits(o) != f).sum()
    assert int(wrong) == 0, f"{int(wrong)} elements differ, {config}"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4096, 4096, bias=False) for _ in range(8)])
        self.embed = nn.Embedding(8192, 4096)


def loads_without_memory() -> None:
    """Whatever is left of the memory: the whole model, or an error and the model as it was, and then the whole."""
    with torch.device(DEVICE):
        source = Model().bfloat16()
    fpk.quantize_(source, "fp8_channel")
    directory = Path(tempfile.mkdtemp(), "checkpoint")
    fpk.save_quantized(source, directory, config={"model_type": "any"})
    wanted = {n: bits(t.cpu()) for n, t in source.state_dict().items()}
    del source
    for dtype in (torch.bfloat16, torch.float32):
        for left in (8, 24, 40, 64, 96, 128):  # MiB
            with torch.device(DEVICE):
                target = Model().to(dtype).requires_grad_(False)
            modules, before = dict(target.named_modules()), {n: t.cpu() for n, t in target.state_dict().items()}
            torch.cuda.empty_cache()
            total = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (left << 20)) / total)
            try:
                fpk.load_quantized(target, directory, device=DEVICE)
                said = "loaded"
            except torch.OutOfMemoryError:
                said = "out of memory"
            torch.cuda.set_per_process_memory_fraction(1.0)
            torch.cuda.empty_cache()
            if said != "loaded":
                after = target.state_dict()
                assert dict(target.named_modules()) == modules, f"{left} MiB left: layers were swapped"
                assert all(torch.equal(before[n], t.cpu()) for n, t in after.items()), f"{left} MiB left: half loaded"
                fpk.load_quantized(target, directory, device=DEVICE)
            codes = {n: t for n, t in target.state_dict().items() if n in wanted and t.dtype == torch.float8_e4m3fn}
            assert codes and all(torch.equal(bits(t.cpu()), wanted[n]) for n, t in codes.items())
            print(f"{dtype}, {left} MiB left: {said}, then whole", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("compare", "launch", "repeat", "memory"))
    parser.add_argument("ops", nargs="*", help="names; all")
    args = parser.parse_args()
    op_laws.DEVICE = "cpu"  # where `ample` makes what it measures
    if args.what == "memory":
        loads_without_memory()
        return 0
    for name in args.ops or OPS:
        try:
            done = repeats(OPS[name]) if args.what == "repeat" else launches(OPS[name], args.what == "compare")
            print(f"{name}: {done} launches", flush=True)
        except NotImplementedError as error:
            print(f"{name}: not here, {error}", flush=True)
        except Exception as error:
            failures.append(name)
            print(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:400]}", flush=True)
            if "CUDA error" in str(error):  # nothing else would run in this process
                print(f"{name}: the GPU is lost", flush=True)
                os._exit(3)
    print(f"{len(failures)} ops failed: {', '.join(failures)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
