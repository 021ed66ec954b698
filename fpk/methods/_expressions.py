"""Regular expressions that come with a checkpoint: as Python matches them, in a time that no expression can blow up.

Python's matcher tries one way after the other, and an expression such as `(a+)+b` has exponentially many. Whatever may
be slow that way is followed here along all ways at once: from a set of places in the text to the set of places where a
part of the expression can end. Which way was taken does not matter to somebody who only asks whether a name matches.
"""

import functools
import re
from collections.abc import Callable, Iterator
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any

Places = frozenset[int]
LONGEST, DEEPEST = 2000, 10  # characters of an expression, and parts inside of each other
FEW = 3  # ways part so often in an expression that is left to Python: at most the cube of a name's length

_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)


def expression(what: str, text: str) -> Callable[[str], bool]:
    """Does a name match from its start? `text` is what follows `re:`.

    Raises:
        ValueError: naming `what`; not a regular expression, too long, or with what needs to know the way that a match
            took (references to groups, atomic groups, possessive repeats) where ways are many.
    """
    try:
        return _matcher(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{what}: expected a regular expression, got {'re:' + text!r:.80} ({error})") from error


@functools.lru_cache(1024)
def _matcher(text: str) -> Callable[[str], bool]:
    if len(text) > LONGEST:
        raise re.error(f"longer than {LONGEST} characters")
    parsed = _parser.parse(text)
    partings = list(_partings(parsed, inside=False, depth=0))
    if len(partings) <= FEW and not any(partings):
        python = re.compile(text)
        return lambda name: python.match(name) is not None
    match = _sequence(parsed)
    match("", frozenset([0]))  # says at once what it cannot follow
    return lambda name: bool(match(name, frozenset([0])))


def _partings(parsed: Any, inside: bool, depth: int) -> Iterator[bool]:
    """For each place where a match may go on in more than one way: is it inside of something repeated?"""
    if depth > DEEPEST:
        raise re.error(f"parts inside of each other more than {DEEPEST} times")
    for code, argument in parsed:
        again, parts = inside, _parts(argument)
        if code in _REPEATS:
            again = argument[1] > 1
            if argument[0] != argument[1]:
                yield inside
        elif code is _constants.BRANCH or code in (_constants.GROUPREF, _constants.ASSERT, _constants.ASSERT_NOT):
            yield inside
        for part in parts:
            yield from _partings(part, inside or again, depth + 1)


def _parts(argument: Any) -> Iterator[Any]:
    if isinstance(argument, _parser.SubPattern):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for inner in argument:
            yield from _parts(inner)


Step = Callable[[str, Places], Places]


def _sequence(parsed: Any) -> Step:
    steps = [_step(parsed.state, code, argument) for code, argument in parsed]

    def match(text: str, places: Places) -> Places:
        for step in steps:
            if not places:
                break
            places = step(text, places)
        return places

    return match


def _step(state: Any, code: Any, argument: Any) -> Step:
    if code in _REPEATS:
        return _repeat(argument[0], argument[1], _sequence(argument[2]))
    if code is _constants.SUBPATTERN:
        if argument[1] or argument[2]:
            raise re.error("flags for a part of it are not supported where it repeats or branches often")
        return _sequence(argument[3])
    if code is _constants.BRANCH:
        ways = [_sequence(part) for part in argument[1]]
        return lambda text, places: frozenset().union(*(way(text, places) for way in ways))
    if code in (_constants.ASSERT, _constants.ASSERT_NOT):
        return _assertion(argument[0], argument[1], code is _constants.ASSERT)
    if code in (_constants.LITERAL, _constants.NOT_LITERAL, _constants.ANY, _constants.IN, _constants.AT):
        one = _compiler.compile(_parser.SubPattern(state, [(code, argument)]), state.flags)
        return lambda text, places: frozenset(m.end() for p in places if (m := one.match(text, p)))
    raise re.error(f"{str(code).lower()} is not supported where it repeats or branches often")


def _repeat(least: int, most: int, body: Step) -> Step:
    def match(text: str, places: Places) -> Places:
        for _ in range(least):
            following = body(text, places)
            if following == places:
                break
            places = following
        reached = fresh = places
        for _ in range(least, most):  # ends when nothing new is reached, after the text's length at most
            fresh = body(text, fresh) - reached
            if not fresh:
                break
            reached |= fresh
        return reached

    return match


def _assertion(direction: int, parsed: Any, wanted: bool) -> Step:
    match, (low, high) = _sequence(parsed), parsed.getwidth()
    back = low if direction < 0 else 0
    if direction < 0 and low != high:
        raise re.error("look-behind requires fixed-width pattern")
    return lambda text, places: frozenset(
        p for p in places if (p >= back and bool(match(text, frozenset([p - back])))) == wanted
    )
