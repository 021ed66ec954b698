"""What a memo hit of a call may take for the same call: everything that checks and choice read must be equal."""

import contextlib
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from op_laws import ample
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fpk
from fpk import _dispatch, db
from fpk.device import pretend
from fpk.op import OPS
from fpk.tune.arguments import outline

CODES = torch.float8_e4m3fn


@pytest.fixture(params=["quick", "full"])
def misses(request, monkeypatch):
    """The list of calls of scaled_mm that the memo did not answer; with torch's guard and without it."""
    op, seen = OPS["scaled_mm"], []
    miss, look_up = op._miss, op.look_up
    if request.param == "full":
        monkeypatch.setattr(_dispatch, "TensorGuards", None)
        look_up = _dispatch.dispatcher(op)[0]
    monkeypatch.setattr(op, "_miss", lambda key, bound: seen.append(bound) or miss(key, bound))
    op._memo.clear()
    yield look_up, seen
    op._memo.clear()


def arguments(M=16, N=32, K=64):
    a, b = (torch.zeros(rows, K).to(CODES) for rows in (M, N))
    return a, b, torch.ones(M, 1), torch.ones(N, 1)


def test_the_same_call_is_a_hit(misses):
    look_up, seen = misses
    a, b, sa, sb = arguments()
    first = look_up(a, b, sa, sb)
    assert look_up(a, b, sa, sb) is first and look_up(a.clone(), b, sa.clone(), sb) is first
    assert look_up(a, b, scale_b=sb, scale_a=sa, fast_accum=False) is first
    assert len(seen) == 1


@pytest.mark.parametrize(
    "other", ["shape", "strides", "dtype", "alignment", "argument", "optional", "database", "mode"]
)
def test_another_call_is_a_miss(misses, other):
    """Each differs in one thing, at the same addresses and with as many elements where that can be."""
    look_up, seen = misses
    a, b, sa, sb = arguments()
    look_up(a, b, sa, sb)
    look_up(a, b, sa, sb)
    more = {}
    if other == "shape":
        a, sa = arguments(M=8)[0], torch.ones(8, 1)
    elif other == "strides":
        a = torch.zeros(16, 128).to(CODES)[:, :64]
    elif other == "dtype":
        a = a.view(torch.float8_e5m2)
        b = b.view(torch.float8_e5m2)
    elif other == "alignment":
        a = torch.zeros(16 * 64 + 1).to(CODES)[1:].view(16, 64)
    elif other == "argument":
        more = {"fast_accum": True}
    elif other == "optional":
        more = {"bias": torch.zeros(32)}
    for _ in range(2):
        if other == "database":
            with db.use(database := db.Empty()):
                look_up(a, b, sa, sb)
                look_up(a, b, sa, sb)
            del database
            break
        if other == "mode":
            with db.batch_invariant():
                look_up(a, b, sa, sb)
        else:
            look_up(a, b, sa, sb, **more)
    assert len(seen) == 2


def test_a_hit_does_not_spare_a_check(misses):
    """As many elements at the same address, but another shape: refused as if it were the first call."""
    look_up, _ = misses
    a, b, sa, sb = arguments()
    for _ in range(3):
        look_up(a, b, sa, sb)
    with pytest.raises(ValueError, match=r"scaled_mm\.b: expected"):
        look_up(a.view(32, 32), b, sa, sb)
    with pytest.raises(ValueError, match=r"scaled_mm\.scale_b: expected"):
        look_up(a, b, sa, sb.view(1, 32))
    with pytest.raises(ValueError, match=r"scaled_mm\.a: expected"):
        look_up(torch.zeros(()).to(CODES), b, sa, sb)


def test_one_tensor_of_as_many_elements_is_another_call(monkeypatch):
    op, seen = OPS["quantize_fp8_token"], []
    miss = op._miss
    monkeypatch.setattr(op, "_miss", lambda key, bound: seen.append(bound["x"].shape) or miss(key, bound))
    op._memo.clear()
    data = torch.zeros(4096)
    views = [data[:256].view(4, 64), data[:256].view(2, 128), data[:512].view(4, 128)[:, :64]]
    for view in (*views, *views):
        op.look_up(view)
    assert len(seen) == 3


def test_a_hit_does_not_let_a_gradient_pass(misses):
    look_up, _ = misses
    a, b, sa, sb = arguments()
    for _ in range(2):
        look_up(a, b, sa, sb)
    sb.requires_grad_(True)
    with torch.no_grad():
        look_up(a, b, sa, sb)
        look_up(a, b, sa, sb)
    with pytest.raises(ValueError, match=r"scaled_mm\.scale_b: expected a tensor that needs no gradient"):
        look_up(a, b, sa, sb)


WORDS = [
    (name, argument)
    for name, op in sorted(OPS.items())
    for argument in op._parameters
    if argument.startswith(_dispatch._NATURAL)
]


@pytest.mark.parametrize("name, argument", WORDS, ids="-".join)
def test_addresses_of_scales_that_are_words_do_not_matter(name, argument, monkeypatch):
    """A hit does not ask for them: beyond the four bytes that words are aligned to, no choice may read them."""
    op = OPS[name]
    with pretend("sm90") as device:
        bound = outline(op, next(iter(op.cases.values())))
        tensor = bound[argument]
        if not isinstance(tensor, torch.Tensor) or tensor.itemsize < 4:
            return

        def chosen(address):
            monkeypatch.setattr(torch.Tensor, "data_ptr", lambda t: address if t is tensor else 1024)
            op._validate(bound)
            return op.key(**bound), [(c, op.is_legal(c, bound, device)) for c in op.configs(**bound)]

        assert chosen(1024) == chosen(1028)


class Told(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Asked(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Own(torch.Tensor):
    pass


@pytest.mark.parametrize("listener", ["nobody", "dispatch", "function", "profiler", "trace", "subclass", "vmap"])
def test_a_hit_goes_past_the_dispatcher_if_nobody_listens(listener, monkeypatch):
    op, x, told = OPS["quantize_fp8_token"], torch.randn(4, 64), []
    for _ in range(2):
        op(x)
    through = op.torch_op
    monkeypatch.setattr(op, "torch_op", lambda *args: told.append(args) or through(*args))
    if listener == "trace":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert "fpk::quantize_fp8_token" in str(torch.jit.trace(lambda t: op(t)[1], x).graph)
    elif listener == "subclass":
        op(x.as_subclass(Own))
    elif listener == "vmap":
        assert torch.vmap(op)(torch.randn(2, 4, 64))[1].shape == (2, 4, 1)
    else:
        modes = dict(nobody=contextlib.nullcontext, dispatch=Told, function=Asked, profiler=torch.profiler.profile)
        with modes[listener]():
            op(x)
    assert bool(told) == (listener != "nobody")


def test_scales_of_bytes_may_lie_anywhere(monkeypatch):
    """e8m0 scales that begin between words are another call."""
    op, seen = OPS["scaled_mm_group"], []
    miss = op._miss
    monkeypatch.setattr(op, "_miss", lambda key, bound: seen.append(key) or miss(key, bound))
    op._memo.clear()
    a, b = (torch.zeros(rows, 256).to(CODES) for rows in (16, 128))
    scale_b, buffer = torch.full((1, 2), 127, dtype=torch.uint8), torch.full((48,), 127, dtype=torch.uint8)
    for at in (0, 1, 0, 1):
        op.look_up(a, b, buffer[at : at + 32].view(16, 2), scale_b)
    op._memo.clear()
    assert len(seen) == 2


def test_the_memo_is_bounded(monkeypatch):
    monkeypatch.setattr(fpk.op, "_MEMO_LIMIT", 8)
    op = OPS["scaled_mm"]
    op._memo.clear()
    for _ in range(20):
        op.look_up(*arguments())  # new addresses, the same key
    assert len(op._memo) <= 8


class Counting(dict):
    """A memo that counts what quick entries answered: they are asked for by subscript, full ones by `get`."""

    hits = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.hits += 1
        return found


@pytest.mark.skipif(_dispatch.TensorGuards is None, reason="torch has no guards of tensors to import")
@pytest.mark.parametrize("name", sorted(OPS))
def test_every_op_has_quick_entries(name, monkeypatch):
    """The second call of the same arguments, aligned and without optional tensors, asks nothing but the quick entry."""
    op = OPS[name]
    for case in ample(op):
        args = op.inputs(**case, device="cpu")
        tensors = {n: v for n, v in args.items() if isinstance(v, torch.Tensor)}
        required = {n for n in tensors if op.__signature__.parameters[n].annotation is torch.Tensor}
        if required == set(tensors) and not any(v.data_ptr() % 16 or v.requires_grad for v in tensors.values()):
            break
    else:
        pytest.fail("no case without optional tensors")
    memo = Counting()
    monkeypatch.setattr(op, "_memo", memo)
    look_up = _dispatch.dispatcher(op)[0]
    first = look_up(**args)
    assert memo.hits == 0
    assert look_up(**args) is first and memo.hits == 1


def test_a_thread_has_a_context_before_its_first_launch(monkeypatch):
    """One event for each thread, before the launcher, on the device of the arguments."""
    seen: list[str] = []
    now = [0]

    @contextlib.contextmanager
    def on(device):
        before, now[0] = now[0], device.index
        yield
        now[0] = before

    event = SimpleNamespace(record=lambda: seen.append(f"context of {now[0]}"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "device", on)
    op = OPS["amax"]
    monkeypatch.setattr(op, "launcher", lambda **_: seen.append(f"launch on {now[0]}"))

    def calls():
        for index in (1, 0):
            op._launch_on_device({}, {}, torch.device("cuda", index))

    for _ in range(2):
        thread = threading.Thread(target=calls)
        thread.start()
        thread.join()
    assert seen == 2 * ["context of 1", "launch on 1", "launch on 0"]
