"""Op: one Triton launcher together with everything needed to check, tune and time it."""

import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from fpk import db
from fpk._dispatch import dispatcher, refuse_grad
from fpk._space import Space
from fpk.check import expect_inner_contiguous, expect_near, expect_own_places, expect_same_device
from fpk.db import Config
from fpk.device import INTERPRETING, Device, enter_thread, of

P = ParamSpec("P")
R = TypeVar("R")

OPS: dict[str, "Op[..., Any]"] = {}
LIBRARY = torch.library.Library("fpk", "FRAGMENT")

# what a launch takes beside the kernel's own parameters; a name outside these and the kernel's constexprs is a mistake
# that triton itself would ignore
LAUNCH_OPTIONS = frozenset(
    {"num_warps", "num_stages", "num_ctas", "maxnreg", "waves_per_eu", "matrix_instr_nonkdim", "kpack"}
)

_MEMO_LIMIT = 16_384
_SIZES = frozenset(db.SIZES)
FIXED_BATCH = 64  # the batch that configs are chosen for in batch-invariant mode
# what ops whose results may depend on the config call their tensors with a row for each row of the batch
_BATCHED = frozenset(
    {"a", "scale_a", "zero_point_a", "global_scale_a", "gather", "q", "block_table", "seq_lens", "logits"}
)


@dataclass(frozen=True)
class Cost:
    """Work of one call: floating-point operations, and bytes that must cross the memory bus once."""

    flops: int
    bytes: int


@dataclass(frozen=True)
class Kernel:
    """A `@triton.jit` function of an op.

    targets: architectures it is meant for (empty: every one), as in `Device.arch`.
    interpretable: whether Triton's interpreter can run it (Gluon and inline assembly: no).
    matrix: whether it must compile to matrix instructions.
    named: whether a config may name it; one that no config names runs beside those, or in place of one.
    """

    fn: Any
    targets: tuple[str, ...] = ()
    interpretable: bool = True
    matrix: bool = False
    named: bool = True


def _always(**_: Any) -> bool:
    return True


@dataclass(eq=False)
class Op(Generic[P, R]):
    """A launcher with its named parts. Calling it looks a config up (memoised), never measures, never synchronises.

    `check`, `configs`, `key`, `legal`, `cost` and a callable `tol` are called with all arguments by name; they declare
    those they use, then `**_`. `legal` also gets `config` and `device`.
    """

    launcher: Callable[..., R]  # the op's signature plus a keyword `config`
    # what is right
    reference: Callable[P, R]
    check: Callable[..., None]  # metadata only: shapes, dtypes, strides; raises ValueError or NotImplementedError
    inputs: Callable[..., dict[str, Any]]
    domain: Mapping[str, Sequence[Any]]
    tol: float | Callable[..., float]
    # where it runs
    kernels: Mapping[str, Kernel]  # by the name that `config["kernel"]` picks; the first is the default
    # what may be tuned
    configs: Callable[..., Iterable[Config]]
    key: Callable[..., dict[str, int | str]]
    # what is worth timing
    cost: Callable[..., Cost]
    cases: Mapping[str, Mapping[str, Any]]
    baselines: Mapping[str, Callable[P, R]] = field(default_factory=dict)
    # only if needed
    legal: Callable[..., bool] = _always
    mutates: tuple[str, ...] = ()
    launcher_fields: tuple[str, ...] = ()  # config fields that the launcher itself reads, such as a number of programs

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.launcher)
        self.name = self.launcher.__name__
        self.__signature__ = _signature_without_config(self.launcher)
        self._parameters = list(self.__signature__.parameters)
        self._names = set(self._parameters)
        self._defaults = {n: p.default for n, p in self.__signature__.parameters.items() if p.default is not p.empty}
        self._memo: dict[Any, Any] = {}
        self._spaces: dict[Any, Space] = {}  # by device and the key's flags
        if list(inspect.signature(self.reference).parameters) != self._parameters:
            raise TypeError(f"{self.name}: reference and launcher take different arguments")
        interactive = self.launcher.__module__ == "__main__"  # a notebook cell that runs again replaces its op
        if self.name in OPS and not interactive:
            raise ValueError(f"{self.name} is declared twice: {OPS[self.name].__module__}, {self.__module__}")
        OPS[self.name] = self
        self.look_up, self._run, self._call = dispatcher(self)
        self.torch_op = self._run if interactive else _register(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return self.torch_op(*args, **kwargs)
        return self._call(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Op {self.name}{self.__signature__}>"

    def bind(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """All arguments by name, defaults filled in."""
        if not kwargs and len(args) == len(self._parameters):
            return dict(zip(self._parameters, args, strict=True))
        bound = self._defaults | dict(zip(self._parameters, args, strict=False)) | kwargs
        if len(args) > len(self._parameters) or bound.keys() != self._names:
            self.__signature__.bind(*args, **kwargs)  # raises the TypeError that a function would
        return bound

    def config_for(self, *args: Any, **kwargs: Any) -> Config:
        """The config a call with these arguments would run with: the database's if legal here, else the default."""
        bound = self.bind(*args, **kwargs)
        self._validate(bound)
        return dict(self._choose(bound))

    def launch(self, *args: Any, config: Config, **kwargs: Any) -> R:
        """Run the kernel with a config of the caller's choice, after the checks of an ordinary call."""
        bound = self.bind(*args, **kwargs)
        self._validate(bound)
        self.validate_config(config)
        device = self._device(bound)
        if not self.is_legal(config, bound, device):
            raise ValueError(f"{self.name}.config: not legal for these arguments on {device.arch}, got {config}")
        return self._launch_on_device(bound, config)

    def validate_config(self, config: Config) -> None:
        """Raise ValueError for a key that neither the kernel nor the launch knows."""
        kernel = self.kernel_of(config)
        known = LAUNCH_OPTIONS | {"kernel", *self.launcher_fields} | _constexprs(kernel.fn)
        for name in config:
            if name not in known:
                raise ValueError(
                    f"{self.name}.config: expected a constexpr of the kernel or a launch option, got {name!r}"
                )

    def kernel_of(self, config: Config) -> Kernel:
        name = config.get("kernel", next(iter(self.kernels)))
        if name not in self.kernels:
            raise ValueError(f"{self.name}.config: expected kernel in {', '.join(self.kernels)}, got {name!r}")
        return self.kernels[name]

    def is_legal(self, config: Config, bound: dict[str, Any], device: Device) -> bool:
        """May this config run with these arguments on this device? Right target, and the op's own conditions."""
        kernel = self.kernel_of(config)
        if device.arch == "cpu" and not kernel.interpretable:
            return False
        if kernel.targets and device.arch != "cpu" and device.arch not in kernel.targets:
            return False
        return self.legal(config=config, device=device, **bound)

    def tolerance(self, bound: dict[str, Any]) -> float:
        return self.tol(**bound) if callable(self.tol) else self.tol

    def _device(self, bound: dict[str, Any]) -> Device:
        for value in bound.values():
            if isinstance(value, Tensor):
                return of(value.device)
        raise ValueError(f"{self.name}: expected a tensor among the arguments")

    def _validate(self, bound: dict[str, Any]) -> None:
        expect_same_device(self.name, {n: v for n, v in bound.items() if isinstance(v, Tensor)})
        self.check(**bound)
        for name, value in bound.items():  # kernels take the strides of matrices, a vector's elements are neighbours
            if isinstance(value, Tensor) and value.dim() == 1:
                expect_inner_contiguous(f"{self.name}.{name}", value)
            elif isinstance(value, Tensor) and name.startswith(("scale", "zero_point")):
                expect_near(f"{self.name}.{name}", value)
            if isinstance(value, Tensor) and name in self.mutates:
                expect_own_places(f"{self.name}.{name}", value)

    def _choose(self, bound: dict[str, Any]) -> Config:
        device = self._device(bound)
        database = db.active()
        asked = self._at_fixed_batch(bound) if isinstance(database, db.BatchInvariant) else bound
        key = self.key(**asked)
        found = database.candidates(self.name, key, device)
        if found:
            flags = (device, *[v for n, v in key.items() if n not in _SIZES])
            space = self._spaces.get(flags)
            if space is None:
                space = self._spaces[flags] = Space()
            for config in found:
                if space.has(config, self.configs, asked) and self.is_legal(config, bound, device):
                    return config
        for config in self.configs(**asked):
            if self.is_legal(config, bound, device):
                return config
        raise NotImplementedError(f"{self.name}: no config of it is legal for these arguments on {device.arch}")

    def is_sound(self, config: Config, bound: dict[str, Any]) -> bool:
        """Could this config of a table be a candidate's? Tables are files: what is damaged there is passed over."""
        return Space().has(config, self.configs, bound)

    def _at_fixed_batch(self, bound: dict[str, Any]) -> dict[str, Any]:
        """The arguments as they would be in a batch of FIXED_BATCH rows, if configs matter to results."""
        if self.tol == 0.0:
            return bound
        changed = {}
        for name in self._names & _BATCHED:
            tensor = bound[name]
            if tensor is not None:
                changed[name] = torch.empty((FIXED_BATCH, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
        return bound | changed

    def _launch_on_device(self, bound: dict[str, Any], config: Config, device: torch.device | None = None) -> R:
        if device is None:
            device = next(v for v in bound.values() if isinstance(v, Tensor)).device
        if device.type == "cuda":
            if device.index != torch.cuda.current_device():
                with torch.cuda.device(device):
                    enter_thread()
                    return self.launcher(**bound, config=config)
            enter_thread()
        return self.launcher(**bound, config=config)

    def _resolve(self, bound: dict[str, Any], device: torch.device | None) -> Config:
        """What a memo miss does: the checks, then the config. On CPUs without the interpreter there is none."""
        self._validate(bound)
        device_type = device.type if device is not None else ""
        if device_type == "cpu" and not INTERPRETING:
            return {}
        if device_type in ("cpu", "cuda"):
            return self._choose(bound)
        raise NotImplementedError(f"{self.name}: runs on cuda and cpu tensors, got {device_type}")

    def _miss(self, memo_key: Any, bound: dict[str, Any]) -> Config:
        """Fill the memo. A hit has passed the checks: they read metadata only, and all of it is in the memo's key."""
        device = next((v.device for v in bound.values() if isinstance(v, Tensor)), None)
        config = self._resolve(bound, device)
        self._remember(memo_key, config)
        return config

    def _remember(self, memo_key: Any, value: Any) -> None:
        if len(self._memo) >= _MEMO_LIMIT:
            self._memo.clear()
        self._memo[memo_key] = value

    def _execute(self, bound: dict[str, Any], config: Config, device: torch.device | None) -> R:
        if not INTERPRETING and device is not None and device.type == "cpu":
            if torch.is_autocast_enabled("cpu"):  # a kernel knows nothing of it, a reference would lose its fp32 sums
                with torch.autocast("cpu", enabled=False):
                    return self.reference(**bound)  # type: ignore[call-arg]
            return self.reference(**bound)  # type: ignore[call-arg]
        return self._launch_on_device(bound, config, device)


def batch_must_not_matter() -> bool:
    """Are configs chosen for a fixed batch, so that no result depends on the batch?"""
    return isinstance(db.active(), db.BatchInvariant)


# a constant of a traced graph, as dynamo has no context variables; torch's own decorator imports dynamo for seconds
batch_must_not_matter._dynamo_marked_constant = True  # type: ignore[attr-defined]


def op(*, reference: Callable[P, R], **parts: Any) -> Callable[[Callable[..., R]], Op[P, R]]:
    """Declare the decorated launcher as an op; `parts` are the fields of Op."""

    def declare(launcher: Callable[..., R]) -> Op[P, R]:
        return Op(launcher, reference, **parts)

    return declare


def _constexprs(kernel: Any) -> frozenset[str]:
    """Names of a jitted (or interpreted) function's constexpr parameters."""
    return _names_of_constexprs(getattr(kernel, "fn", kernel))


@functools.cache
def _names_of_constexprs(function: Callable[..., Any]) -> frozenset[str]:
    """Of the Python function: a jitted one is hashed by its sources, which Gluon's in the interpreter do not allow."""
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if "constexpr" in str(p.annotation))


def _signature_without_config(launcher: Callable[..., Any]) -> inspect.Signature:
    hints = typing.get_type_hints(launcher)
    signature = inspect.signature(launcher)
    kept = [p.replace(annotation=hints[n]) for n, p in signature.parameters.items() if n != "config"]
    returned = hints["return"]
    # get_type_hints says NoneType, of which torch's schemas know nothing
    return signature.replace(parameters=kept, return_annotation=None if returned is type(None) else returned)


def _register(op: "Op[..., Any]") -> Callable[..., Any]:
    """Make torch.ops.fpk.<name>. Its fake kernel is the reference, run on fake tensors after the checks."""

    def fake(*args: Any, **kwargs: Any) -> Any:
        bound = op.bind(*args, **kwargs)
        op._validate(bound)
        if any(isinstance(v, Tensor) and v.requires_grad for v in bound.values()):
            refuse_grad(op.name, bound)
        return op.reference(**bound)

    op._run.__signature__ = op.__signature__  # type: ignore[attr-defined]
    LIBRARY.define(op.name + torch.library.infer_schema(op._run, mutates_args=op.mutates))
    LIBRARY.impl(op.name, op._run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{LIBRARY.ns}::{op.name}", fake, lib=LIBRARY)
    return getattr(getattr(torch.ops, LIBRARY.ns), op.name).default
