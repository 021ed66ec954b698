"""Gluon kernels from their own source, as Python on tensors: what `gluon_emulator` runs.

`emulated` catches launches of Gluon kernels and runs them, program by program (clusters together). A kernel's functions
are read anew, `x += y` becomes `x = x + y`, methods of tensors become functions, and names of Gluon's become those
below. Functions that are inline assembly have a counterpart each. Layouts mean nothing here, all memory is row-major.
"""

import ast
import contextlib
import functools
import inspect
import itertools
import math
import textwrap
from collections.abc import Callable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from gluon_emulator import Barrier, Buffer, Fault, Machine, Product, Program, Region, Task, pause, task
from torch import Tensor
from triton.experimental.gluon import language as real
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import ConstexprFunction, JITFunction

TORCH = {
    "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2, "int8": torch.int8, "uint8": torch.uint8,
    "int16": torch.int16, "int32": torch.int32, "int64": torch.int64, "fp16": torch.float16, "bf16": torch.bfloat16,
    "fp32": torch.float32, "int1": torch.bool,
}  # fmt: skip


def torch_type(dtype: Any) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else TORCH[dtype.name]


class Pointer:
    """Addresses of a tensor's elements, in elements from its first."""

    def __init__(self, tensor: Tensor, at: Any = 0) -> None:
        self.tensor, self.at = tensor, at
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.tensor, self.at + more)

    def __sub__(self, less: Any) -> "Pointer":
        return Pointer(self.tensor, self.at - less)

    def places(self, mask: Any) -> tuple[Tensor, Tensor, Tensor]:
        """(the memory from the first element to the last, places in it, mask); outside of the tensor is a fault."""
        extent = sum((n - 1) * s for n, s in zip(self.tensor.shape, self.tensor.stride(), strict=True)) + 1
        flat = self.tensor.as_strided((extent,), (1,))
        at, wanted = torch.as_tensor(self.at), torch.as_tensor(True if mask is None else mask)
        at, wanted = torch.broadcast_tensors(at.long(), wanted)
        inside = torch.zeros(extent, dtype=torch.bool)
        inside.as_strided(self.tensor.shape, self.tensor.stride()).fill_(True)
        safe = at.clamp(0, extent - 1)
        if bool((wanted & ~((safe == at) & inside[safe])).any()):
            raise Fault(f"an address outside of a tensor of {tuple(self.tensor.shape)}")
        return flat, safe, wanted


def method_to(x: Any, dtype: Any, bitcast: bool = False) -> Any:
    if isinstance(x, Product):
        raise Fault("a product is used before it was waited for")
    if not isinstance(x, Tensor):
        return x
    return x.contiguous().view(torch_type(dtype)) if bitcast else x.to(torch_type(dtype))


def method_reinterpret(x: Buffer, dtype: Any, shape: Any, layout: Any) -> Buffer:
    return Buffer(x.program, x.region, x.at, torch_type(dtype), shape, row_major(shape))


def row_major(shape: Any) -> list[int]:
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


METHODS: dict[str, Callable[..., Any]] = {
    "to": method_to, "_reinterpret": method_reinterpret, "reinterpret": method_reinterpret,
    "split": lambda x: x.unbind(-1),
}  # fmt: skip


def wait_products(pending: int, deps: Any) -> Any:
    pause()
    mine = [p for p in task().products if not p.done]
    for product in mine[: len(mine) - pending]:
        product.finish()
    task().products = mine[len(mine) - pending :] if pending else []
    results = [d.result if isinstance(d, Product) and d.done else d for d in deps]
    return results[0] if len(results) == 1 else tuple(results)


def multiply(left: Any, right: Any, acc: Any, *, use_acc: Any = True, is_async: bool = False, **_: Any) -> Any:
    pause()
    product = Product(left, right, acc if use_acc else None)
    task().products.append(product)
    return product if is_async else wait_products(0, [product])


def fence() -> None:
    task().program.unseen.clear()


def box(desc: Any, start: Any) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Where a descriptor's tile lies in its tensor, and which part of the tile that is."""
    start = [int(s) for s in start]
    if start[-1] * desc.base.element_size() % 16:
        raise Fault(f"TMA at element {start[-1]} of a row, which is no multiple of 16 bytes")  # an illegal instruction
    ends = [min(s + b, n) for s, b, n in zip(start, desc.block_shape, desc.shape, strict=True)]
    begins = [min(max(s, 0), e) for s, e in zip(start, ends, strict=True)]
    inside = tuple(slice(b, e) for b, e in zip(begins, ends, strict=True))
    return inside, tuple(slice(b - s, e - s) for b, e, s in zip(begins, ends, start, strict=True))


def tile_of(desc: Any, start: Any) -> Tensor:
    tile = torch.zeros(desc.block_shape, dtype=desc.base.dtype)
    inside, part = box(desc, start)
    if all(s.start < s.stop for s in inside):
        tile[part] = desc.base.as_strided(desc.shape, desc.strides)[inside]
    return tile.view(torch.uint8).flatten()


def load_tile(desc: Any, start: Any, bar: Buffer, buffer: Buffer, pred: Any = True) -> None:
    pause()
    if list(buffer.shape) != list(desc.block_shape) or buffer.dtype != desc.base.dtype:
        raise Fault(f"{buffer.region.name}: a copy of {desc.block_shape} into {buffer.shape}")
    if pred:
        task().program.land(buffer.range, tile_of(desc, start), bar.address)


def store_tile(desc: Any, start: Any, buffer: Buffer) -> None:
    pause()
    me = task()
    buffer.check_visible("a store")
    if list(buffer.shape) != list(desc.block_shape):
        raise Fault(f"{buffer.region.name}: a store of {desc.block_shape} from {buffer.shape}")
    mine = [buffer.range]
    me.stores.append(mine)

    def leave() -> None:
        inside, part = box(desc, start)
        desc.base.as_strided(desc.shape, desc.strides)[inside] = buffer.view[part]
        mine.clear()

    me.machine.copy(leave)


def wait_stores(pending: int) -> None:
    waited = task().stores[: max(len(task().stores) - pending, 0)]
    pause(lambda: not any(waited), "its stores")


def wait_at(at: int, parity: Any) -> None:
    barrier = task().program.barrier(at)
    pause(lambda: barrier.passed(int(parity)), f"parity {int(parity)} of {barrier}")


def change(at: int, arrivals: int, bytes: int = 0, program: Program | None = None) -> None:
    pause()
    (program or task().program).barrier(at).change(arrivals, bytes)


def init(bar: Buffer, count: int) -> None:
    name = f"{bar.region.name}[{bar.at // 8}]"
    task().program.barriers[bar.address] = Barrier(name, count)


def arrive(bar: Buffer, *, count: int = 1, pred: Any = True) -> None:
    if pred:
        change(bar.address, count)


mbarrier = SimpleNamespace(
    MBarrierLayout=lambda: None, init=init, arrive=arrive, invalidate=lambda bar: None,
    wait=lambda bar, phase, pred=True, deps=(): wait_at(bar.address, phase) if pred else None,
    expect=lambda bar, bytes, pred=True: change(bar.address, 1, bytes) if pred else None,
)  # fmt: skip


def allocate(dtype: Any, shape: Any, layout: Any, name: str = "memory") -> Buffer:
    kind, program = torch_type(dtype), task().program
    program.regions.append(Region(name, math.prod(shape) * kind.itemsize))
    return Buffer(program, program.regions[-1], 0, kind, shape, row_major(shape))


def specialize(parts: Any, warps: Any, registers: Any) -> None:
    me = task()
    tasks = [
        Task(me.program, f"{fn.__name__} {i} of program {me.program.rank}", functools.partial(fn, *args))
        for i, (fn, args) in enumerate(parts)
    ]
    pause(lambda: all(t.over for t in tasks), "its partitions")


def load(pointer: Pointer, mask: Any = None, other: Any = None, **_: Any) -> Any:
    flat, at, wanted = pointer.places(mask)
    poison = math.nan if flat.dtype.is_floating_point else -1
    values = torch.where(wanted, flat[at], torch.tensor(poison if other is None else other, dtype=flat.dtype))
    return values if values.dim() or flat.dtype.is_floating_point else values.item()


def store(pointer: Pointer, values: Any, mask: Any = None, **_: Any) -> None:
    flat, at, wanted = pointer.places(mask)
    flat[at[wanted]] = torch.as_tensor(values, dtype=flat.dtype).expand(at.shape)[wanted]


def atomic_add(pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> Any:
    pause()
    before = load(pointer, mask, 0)
    store(pointer, before + value, mask)
    return before


def where(condition: Any, a: Any, b: Any) -> Any:
    return torch.where(condition, a, b) if isinstance(condition, Tensor) else (a if condition else b)


def assembly(text: str, constraints: str, args: Any, *, dtype: Any, **_: Any) -> Tensor:
    """Conversions of int8 are the only assembly inside of a kernel's own functions that has a counterpart."""
    if len(args) != 1 or args[0].dtype is not torch.int8:
        raise Fault(f"no counterpart of inline assembly: {text}")
    return method_to(args[0], dtype)


def static_assert(condition: bool, *_: Any) -> None:
    if not condition:
        raise Fault("static_assert")


def extreme(of_numbers: Callable[..., Any], of_tensors: Callable[..., Any]) -> Callable[..., Any]:
    def either(a: Any, b: Any) -> Any:
        if not isinstance(a, Tensor) and not isinstance(b, Tensor):
            return of_numbers(a, b)
        kind = (a if isinstance(a, Tensor) else b).dtype
        return of_tensors(torch.as_tensor(a, dtype=kind), torch.as_tensor(b, dtype=kind))

    return either


class Language:
    """Gluon's names: these, or Gluon's own classes of layouts and types."""

    program_id = staticmethod(lambda axis: task().machine.first[axis] + (axis == 0) * task().program.rank)
    num_programs = staticmethod(lambda axis: task().machine.grid[axis])
    arange = staticmethod(lambda a, b, layout=None: torch.arange(a, b))
    zeros = staticmethod(lambda shape, dtype, layout=None: torch.zeros(tuple(shape), dtype=torch_type(dtype)))
    full = staticmethod(lambda shape, x, dtype, layout=None: torch.full(tuple(shape), x, dtype=torch_type(dtype)))
    cdiv = staticmethod(lambda a, b: -(-a // b))
    expand_dims = staticmethod(lambda x, axis: x.unsqueeze(axis))
    join = staticmethod(lambda a, b: torch.stack((a, b), -1))
    convert_layout = staticmethod(lambda x, layout, assert_trivial=False: x)
    minimum, maximum = staticmethod(extreme(min, torch.minimum)), staticmethod(extreme(max, torch.maximum))
    static_range, static_assert = range, staticmethod(static_assert)
    allocate_shared_memory, warp_specialize = staticmethod(allocate), staticmethod(specialize)
    load, store = staticmethod(load), staticmethod(store)
    where, atomic_add = staticmethod(where), staticmethod(atomic_add)
    sum = staticmethod(lambda x, axis: x.sum(axis, dtype=x.dtype))
    max, min = staticmethod(lambda x, axis: x.amax(axis)), staticmethod(lambda x, axis: x.amin(axis))
    associative_scan = staticmethod(lambda x, axis, add: x.cumsum(axis, dtype=x.dtype))
    inline_asm_elementwise = staticmethod(assembly)
    thread_barrier = barrier = staticmethod(lambda: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(real, name)


HOPPER = dict(
    warpgroup_mma=multiply, warpgroup_mma_wait=wait_products, fence_async_shared=fence, mbarrier=mbarrier,
    tma=SimpleNamespace(store_wait=wait_stores), gl=Language(), tma_load=load_tile, tma_store=store_tile,
    barrier=lambda: None, gdc_wait=lambda: None, gdc_launch_dependents=lambda: None,
)  # fmt: skip


def argument(value: Any) -> Any:
    """What a kernel sees of a launch's argument."""
    if isinstance(value, TensorDescriptor):
        size = math.prod(value.block_shape) * value.base.element_size()
        return SimpleNamespace(**vars(value), dtype=value.base.dtype, block_type=SimpleNamespace(nbytes=size))
    return Pointer(value) if isinstance(value, Tensor) else value


class Rewrite(ast.NodeTransformer):
    """Python on immutable tensors."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        self.generic_visit(node)
        node.decorator_list = []
        for argument in node.args.args:
            argument.annotation = None
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        self.generic_visit(node)
        assert isinstance(node.target, ast.Name)
        value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        return ast.copy_location(ast.Assign([node.target], value), node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        self.generic_visit(node)
        call, name = node.value, node.targets[0]
        is_memory = isinstance(call, ast.Call) and ast.unparse(call.func) == "gl.allocate_shared_memory"
        if is_memory and isinstance(name, ast.Name):
            call.keywords.append(ast.keyword("name", ast.Constant(name.id)))  # type: ignore[attr-defined]
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
            node.args.insert(0, node.func.value)
            node.func = ast.Name("method_" + node.func.attr, ast.Load())
        return node

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if node.attr == "layout" and isinstance(node.value, ast.Attribute) and node.value.attr == "type":
            return ast.Constant(None)
        return self.generic_visit(node)


class Translation:
    """The functions of a kernel as Python, each translated when it is called first; `changes` are made to the source:
    function: (old, new)."""

    def __init__(self, changes: dict[str, tuple[str, str]]) -> None:
        self.changes, self.functions = changes, dict[Any, Callable[..., Any]]()

    def name(self, module: str, name: str, value: Any) -> Any:
        from gluon_clusters import ASSEMBLY

        if name in HOPPER:
            return HOPPER[name]
        if isinstance(value, (JITFunction, InterpretedFunction)):
            place = value.fn.__module__.rsplit(".")[-1]
            counterpart = ASSEMBLY.get(place, {}).get(value.fn.__name__)
            return counterpart or (self.function(value.fn) if isinstance(value, JITFunction) else value)
        if isinstance(value, ConstexprFunction):
            return value.fn
        return value.value if isinstance(value, real.constexpr) else value

    def function(self, fn: FunctionType) -> Callable[..., Any]:
        if fn not in self.functions:

            def first(*args: Any, **kwargs: Any) -> Any:
                if "translated" not in vars(first):
                    first.translated = self.translate(fn)  # type: ignore[attr-defined]
                return first.translated(*args, **kwargs)  # type: ignore[attr-defined]

            first.__name__ = fn.__name__
            self.functions[fn] = first
        return self.functions[fn]

    def translate(self, fn: FunctionType) -> Callable[..., Any]:
        source = textwrap.dedent(inspect.getsource(fn))
        if fn.__name__ in self.changes:
            old, new = self.changes[fn.__name__]
            if old not in source:  # no AssertionError, which is what broken kernels are to raise
                raise LookupError(f"{fn.__name__} has no {old}")
            source = source.replace(old, new)
        tree = ast.fix_missing_locations(Rewrite().visit(ast.parse(source)))
        names = {n: self.name(fn.__module__, n, v) for n, v in fn.__globals__.items() if not n.startswith("__")}
        names |= {f"method_{n}": f for n, f in METHODS.items()}
        exec(compile(tree, f"<{fn.__name__}>", "exec"), names)
        return names[fn.__name__]


@contextlib.contextmanager
def emulated(seed: int = 0, **changes: tuple[str, str]) -> Iterator[list[str]]:
    """Inside the block launches of Gluon kernels run here; the names of those that ran are appended to the list."""
    translation, ran = Translation(changes), list[str]()
    interpreted = InterpretedFunction.run
    original, seeds = JITFunction.run, itertools.count(seed * 1000)

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = [p.name for p in self.params]
        values = dict(zip(names, args, strict=False)) | {n: v for n, v in kwargs.items() if n in names}
        size = values.get("CLUSTER", 1)
        grid = (*grid, 1, 1)[:3]
        whole = (grid[0] * size, *grid[1:])
        clusters = list(itertools.product(*(range(n) for n in grid)))
        order = Machine(next(seeds), 0).random.sample(clusters, len(clusters))
        wrapped = {n: argument(v) for n, v in values.items()}
        kernel = translation.function(self.fn)
        for x, *rest in order:
            machine = Machine(next(seeds), size)
            machine.grid, machine.first, machine.arguments = whole, (x * size, *rest), list(wrapped.values())
            machine.run(functools.partial(kernel, **wrapped))
        ran.append(self.fn.__name__)

    def interpret(self: Any, *args: Any, **kwargs: Any) -> Any:  # the interpreter cannot wait for a kernel in front
        return interpreted(self, *args, **kwargs | ({"PDL": False} if "PDL" in kwargs else {}))

    JITFunction.run, InterpretedFunction.run = run, interpret
    try:
        yield ran
    finally:
        JITFunction.run, InterpretedFunction.run = original, interpreted
