"""Regular expressions that come with a checkpoint: as Python matches them, in a time that no expression can blow up.

Python's matcher tries one way after the other, and an expression such as `(a+)+b` has exponentially many. Whatever may
be slow that way is followed here along all ways at once: from a set of places in the text to the set of places where a
part of the expression can end. Which way was taken does not matter to somebody who only asks whether a name matches.
What looks ahead is asked once for each place, and a name that needs more than STEPS is refused.
"""

import functools
import re
from collections.abc import Callable, Iterator
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from typing import Any

Places = frozenset[int]
LONGEST, DEEPEST = 2000, 10  # characters of an expression, and parts inside of each other
# Where ways part FEW times, and never inside of a repetition, Python's matcher tries at most the cube of a name's
# length, times the alternatives; names of up to NAME characters keep that below a second.
FEW, NAME = 3, 300
STEPS = 500_000  # places looked at for one name; expressions of real checkpoints need some hundreds

_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)


def expression(what: str, text: str) -> Callable[[str], bool]:
    """Does a name match from its start? `text` is what follows `re:`.

    Raises:
        ValueError: naming `what`; not a regular expression, too long, or with what needs to know the way that a match
            took (references to groups, atomic groups, possessive repeats) where ways are many. The answer raises it for
            a name that needs too many steps.
    """
    try:
        match = _matcher(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise _refused(what, text, error) from error

    def matches(name: str) -> bool:
        try:
            return match(name)
        except (re.error, RecursionError) as error:
            raise _refused(what, text, error) from error

    return matches


def _refused(what: str, text: str, error: Exception) -> ValueError:
    return ValueError(f"{what}: expected a regular expression, got {'re:' + text!r:.80} ({error})")


@functools.lru_cache(1024)
def _matcher(text: str) -> Callable[[str], bool]:
    if len(text) > LONGEST:
        raise re.error(f"longer than {LONGEST} characters")
    parsed = _parser.parse(text)
    partings = list(_partings(parsed, inside=False, depth=0))
    if len(partings) <= FEW and not any(partings):
        python = re.compile(text)
        return lambda name: python.match(name) is not None if len(name) <= NAME else _followed(text)(name)
    return _followed(text)


@functools.lru_cache(1024)
def _followed(text: str) -> Callable[[str], bool]:
    match = _sequence(_parser.parse(text))
    return lambda name: bool(match(_Name(name), frozenset([0])))


class _Name:
    """A name on its way through an expression: what was found to lie ahead of its places, and the steps left."""

    def __init__(self, text: str) -> None:
        self.text, self.left = text, STEPS
        self.ahead: dict[tuple[int, int], bool] = {}  # by assertion and place

    def spend(self, steps: int) -> None:
        self.left -= steps
        if self.left < 0:
            raise re.error(f"more than {STEPS} steps for a name of {len(self.text)} characters")


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


Step = Callable[[_Name, Places], Places]


def _sequence(parsed: Any) -> Step:
    steps = [_step(parsed.state, code, argument) for code, argument in parsed]

    def match(name: _Name, places: Places) -> Places:
        for step in steps:
            if not places:
                break
            places = step(name, places)
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
        return lambda name, places: frozenset().union(*(way(name, places) for way in ways))
    if code in (_constants.ASSERT, _constants.ASSERT_NOT):
        return _assertion(argument[0], argument[1], code is _constants.ASSERT)
    if code in (_constants.LITERAL, _constants.NOT_LITERAL, _constants.ANY, _constants.IN, _constants.AT):
        return _character(_compiler.compile(_parser.SubPattern(state, [(code, argument)]), state.flags))
    raise re.error(f"{str(code).lower()} is not supported where it repeats or branches often")


def _character(one: re.Pattern[str]) -> Step:
    def match(name: _Name, places: Places) -> Places:
        name.spend(len(places))
        return frozenset(m.end() for p in places if (m := one.match(name.text, p)))

    return match


def _repeat(least: int, most: int, body: Step) -> Step:
    def match(name: _Name, places: Places) -> Places:
        for _ in range(least):
            name.spend(1)
            following = body(name, places)
            if following == places:
                break
            places = following
        fresh, reached = places, set(places)
        for _ in range(least, most):  # ends when nothing new is reached, after the text's length at most
            name.spend(1)
            fresh = body(name, fresh) - reached
            if not fresh:
                break
            reached |= fresh
        return frozenset(reached)

    return match


def _assertion(direction: int, parsed: Any, wanted: bool) -> Step:
    match, (low, high) = _sequence(parsed), parsed.getwidth()
    back = low if direction < 0 else 0
    if direction < 0 and low != high:
        raise re.error("look-behind requires fixed-width pattern")

    def holds(name: _Name, place: int) -> bool:
        key = (id(match), place)
        if key not in name.ahead:  # nested ones would be asked for every pair of places, and so on
            name.ahead[key] = place >= back and bool(match(name, frozenset([place - back])))
        return name.ahead[key] == wanted

    return lambda name, places: frozenset(p for p in places if holds(name, p))
