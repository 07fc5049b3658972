"""Numbers that stand for objects where only numbers can be passed, as into an operator of a compiled graph."""

import itertools
import weakref
from typing import Any

_holders: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def draw(holder: Any) -> int:
    """A number that no other object has; it doesn't keep `holder` alive."""
    number = next(_numbers)
    _holders[number] = holder
    return number


def holder_of(number: int) -> Any:
    """The object that drew `number`."""
    return _holders[number]
