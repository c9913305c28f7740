"""The one error of a decoder of bytes."""

from typing import Any

__all__ = ["WireError"]


class WireError(ValueError):
    """The bytes are not a message of this format.

    Attributes:
        field: what was being read.
        got: what was found.
        allowed: what would have been accepted.
    """

    def __init__(self, field: str, got: Any, allowed: str):
        super().__init__(f"wire: {field} must be {allowed}; got {got}")
        self.field, self.got, self.allowed = field, got, allowed
