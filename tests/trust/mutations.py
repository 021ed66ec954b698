"""Wrong versions of a jitted function, made by rule from its syntax tree: one change each.

A mutation is known by its rule and by the text that it changes, not by a line number, so that a verdict outlives edits
elsewhere in the file.
"""

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Change = tuple[str, ast.AST, "ast.AST | None"]  # (rule, what stands there, what shall: None deletes the statement)

COMPARISONS: dict[type, tuple[str, type]] = {
    ast.Lt: ("comparison <=", ast.LtE), ast.LtE: ("comparison <", ast.Lt), ast.Gt: ("comparison >=", ast.GtE),
    ast.GtE: ("comparison >", ast.Gt), ast.Eq: ("comparison !=", ast.NotEq), ast.NotEq: ("comparison ==", ast.Eq),
}  # fmt: skip
SWAPPED = {"maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max", "sum": "max"}
REDUCTIONS = ("max", "min", "sum", "cumsum", "argmax", "argmin")


@dataclass(frozen=True)
class Mutation:
    """One change of the function `function` of `module`; `number` tells equal changes of one function apart."""

    module: str
    function: str
    rule: str
    old: str
    new: str
    number: int = 0

    @property
    def id(self) -> tuple[str, ...]:
        return (self.module, self.function, self.rule, self.old, self.new, str(self.number))


def name_of(call: ast.AST) -> str:
    """Last part of what is called: `load` for tl.load, `to` for x.to."""
    if not isinstance(call, ast.Call):
        return ""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def integer(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int


def constant(value: Any) -> ast.Constant:
    return ast.Constant(value)


def plus(node: ast.expr, step: ast.expr, op: type[ast.operator] = ast.Add) -> ast.BinOp:
    return ast.BinOp(node, op(), step)


def changes(tree: ast.FunctionDef) -> Iterator[Change]:
    """Every change that a rule makes of a function, in the order of its text."""
    strides = [a.arg for a in tree.args.args if a.arg.startswith("stride_")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from of_comparison(node)
        elif isinstance(node, ast.BinOp):
            yield from of_operation(node)
        elif isinstance(node, ast.Call):
            yield from of_call(node)
        elif isinstance(node, ast.Subscript):
            yield from of_broadcast(node)
        elif isinstance(node, ast.Name) and node.id in strides:
            others = [s for s in strides if s != node.id and s[:-1] == node.id[:-1]]
            yield from (("swapped strides", node, ast.Name(other)) for other in others[:1])
        elif isinstance(node, ast.AugAssign):
            yield "accumulation dropped", node, None
            if isinstance(node.op, ast.Add):
                yield "overwritten, not added to", node, ast.Assign([node.target], node.value, lineno=0)
        elif isinstance(node, ast.If):
            yield "branch flipped", node.test, ast.UnaryOp(ast.Not(), node.test)
        elif isinstance(node, ast.Expr) and name_of(node.value) in ("store", "atomic_add", "atomic_max"):
            yield "store dropped", node, None
        elif isinstance(node, ast.UnaryOp) and not integer(node.operand):
            yield "sign or negation dropped", node, node.operand


def of_comparison(node: ast.Compare) -> Iterator[Change]:
    left, right, kind = node.left, node.comparators[0], type(node.ops[0])
    if kind in (ast.Is, ast.IsNot):
        return
    if ast.dump(left) == ast.dump(right):
        yield "NaN overlooked", node, ast.Compare(left, [ast.Lt()], [right])
        return
    if kind in COMPARISONS:
        rule, other = COMPARISONS[kind]
        yield rule, node, ast.Compare(left, [other()], [right])
    if kind is ast.Lt:
        yield "bound one too small", node, ast.Compare(left, [ast.Lt()], [plus(right, constant(1), ast.Sub)])


def of_operation(node: ast.BinOp) -> Iterator[Change]:
    left, right = node.left, node.right
    match node.op:
        case ast.BitAnd():
            yield "side of & dropped", node, left
            if not integer(right):
                yield "side of & dropped", node, right
        case ast.BitOr():
            yield "side of | dropped", node, left
            yield "side of | dropped", node, right
        case ast.Mult():
            yield "factor dropped", node, left
            yield "factor dropped", node, right
        case ast.Add():
            yield "term dropped", node, left
            yield "term dropped", node, right
            yield "- for +", node, ast.BinOp(left, ast.Sub(), right)
        case ast.Sub():
            yield "+ for -", node, ast.BinOp(left, ast.Add(), right)
            yield "term dropped", node, left
        case ast.FloorDiv():
            yield "division dropped", node, left
        case ast.Mod():
            yield "// for %", node, ast.BinOp(left, ast.FloorDiv(), right)
        case ast.LShift() | ast.RShift():
            yield "shift one too far", node, ast.BinOp(left, node.op, plus(right, constant(1)))
        case ast.Div():
            inverse = ast.BinOp(constant(1.0), ast.Div(), right)
            if not isinstance(left, ast.Constant) or left.value != 1:
                yield "division by a reciprocal", node, ast.BinOp(left, ast.Mult(), inverse)


def of_call(node: ast.Call) -> Iterator[Change]:
    name, keywords = name_of(node), {k.arg: k.value for k in node.keywords}

    def without(*names: str) -> ast.Call:
        return ast.Call(node.func, node.args, [k for k in node.keywords if k.arg not in names])

    def with_argument(position: int, value: ast.expr) -> ast.Call:
        return ast.Call(node.func, [*node.args[:position], value, *node.args[position + 1 :]], node.keywords)

    def with_keyword(name: str, value: ast.expr) -> ast.Call:
        keywords = [ast.keyword(k.arg, value if k.arg == name else k.value) for k in node.keywords]
        return ast.Call(node.func, node.args, keywords)

    if name == "load":
        if "other" in keywords:
            yield "other missing", node, without("other")
            yield "wrong other", node, with_keyword("other", constant(1))
        if "mask" in keywords:
            yield "mask missing", node, without("mask", "other")
    elif name == "store" and "mask" in keywords:
        yield "mask missing", node, without("mask")
    elif name == "program_id" and integer(node.args[0]):
        yield "wrong axis of the grid", node, with_argument(0, constant(1 - node.args[0].value))
    elif name in ("maximum", "minimum"):
        yield "bound dropped", node, node.args[0]
        yield "bound dropped", node, node.args[1]
    elif name == "where" and len(node.args) == 3:
        yield "choice dropped", node, node.args[1]
        yield "choice dropped", node, node.args[2]
    elif name == "div_rn":
        inverse = ast.BinOp(constant(1.0), ast.Div(), node.args[1])
        yield "division by a reciprocal", node, ast.BinOp(node.args[0], ast.Mult(), inverse)
    elif name == "to" and "int64" in ast.unparse(node.args[0]):
        yield "offsets of 32 bits", node, node.func.value
    elif name == "range":
        yield from of_loop(node)
    if isinstance(node.func, ast.Attribute) and name in SWAPPED and getattr(node.func.value, "id", "") == "tl":
        other = ast.Call(ast.Attribute(node.func.value, SWAPPED[name]), node.args, node.keywords)
        yield f"{SWAPPED[name]} for {name}", node, other
    if name in REDUCTIONS:
        axis = keywords.get("axis", node.args[1] if len(node.args) > 1 else None)
        if integer(axis):
            other_axis = constant(max(axis.value - 1, 0) if axis.value else 1)
            by_name = "axis" in keywords
            yield "wrong axis", node, with_keyword("axis", other_axis) if by_name else with_argument(1, other_axis)


def of_loop(node: ast.Call) -> Iterator[Change]:
    first, last, step = {1: (None, 0, None), 2: (0, 1, None), 3: (0, 1, 2)}[len(node.args)]
    by = constant(1) if step is None else node.args[step]

    def replaced(position: int, value: ast.expr) -> ast.Call:
        return ast.Call(node.func, [*node.args[:position], value, *node.args[position + 1 :]], node.keywords)

    yield "last round of the loop lost", node, replaced(last, plus(node.args[last], by, ast.Sub))
    if first is not None:
        yield "first round of the loop lost", node, replaced(first, plus(node.args[first], by))


def of_broadcast(node: ast.Subscript) -> Iterator[Change]:
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else []
    kinds = [isinstance(p, ast.Constant) and p.value is None for p in parts]
    if len(parts) == 2 and any(kinds) and all(k or isinstance(p, ast.Slice) for k, p in zip(kinds, parts, strict=True)):
        yield "broadcast along the wrong axis", node, ast.Subscript(node.value, ast.Tuple(parts[::-1]))


class _Replacing(ast.NodeTransformer):
    def __init__(self, number: int, new: ast.AST | None):
        self.number, self.new = number, new

    def visit(self, node: ast.AST) -> Any:
        if getattr(node, "number", None) != self.number:
            return self.generic_visit(node)
        return ast.Pass() if self.new is None else self.new


def _parsed(function: Callable) -> ast.FunctionDef:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    tree.decorator_list = []
    for number, node in enumerate(ast.walk(tree)):
        node.number = number  # type: ignore[attr-defined]
    return tree


def _each(module: str, tree: ast.FunctionDef) -> Iterator[tuple[Mutation, ast.AST, ast.AST | None]]:
    counts: dict[tuple[str, ...], int] = {}
    for rule, node, new in changes(tree):
        old_text = ast.unparse(node)
        new_text = "" if new is None else ast.unparse(ast.fix_missing_locations(new))
        if old_text != new_text:
            key = (rule, old_text, new_text)
            counts[key] = counts.get(key, -1) + 1
            yield Mutation(module, tree.name, rule, old_text, new_text, counts[key]), node, new


def mutations(module: str, function: Callable) -> list[Mutation]:
    """Every mutation of a plain Python function, as it stands in its file."""
    return [mutation for mutation, _, _ in _each(module, _parsed(function))]


def mutated(mutation: Mutation, function: Callable) -> str:
    """The text of the function with that change, without decorators."""
    tree = _parsed(function)
    node, new = next((node, new) for found, node, new in _each(mutation.module, tree) if found == mutation)
    changed = _Replacing(node.number, copy.deepcopy(new)).visit(copy.deepcopy(tree))  # type: ignore[attr-defined]
    return ast.unparse(ast.fix_missing_locations(changed)) + "\n"
