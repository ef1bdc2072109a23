"""The errors of the library `tokenizers`, which has no classes for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_PANIC = "PanicException"


@contextmanager
def as_value_errors() -> Iterator[None]:
    """Around calls of the library: each of its errors is a ValueError.

    It raises plain Exceptions. For a few malformed files its code in Rust panics. That is a BaseException of a class
    that cannot be imported.
    """
    try:
        yield
    except Exception as error:
        raise ValueError(str(error)) from None
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        raise ValueError(f"tokenizers failed: {error}") from None
