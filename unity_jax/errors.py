"""What can go wrong, as types a caller can catch. Every message names the argument and says what to do."""

from __future__ import annotations


class UnityError(Exception):
    """The base of all errors raised on purpose by unity_jax."""


class UnsupportedError(UnityError, TypeError):
    """The function uses something that cannot be planned; the message starts at the user's line."""


class PinError(UnityError, ValueError):
    """A pinned layout cannot hold: a missing path, an unknown mesh axis, a dimension that does not divide."""


class PlanError(UnityError, ValueError):
    """A plan cannot be read, or is not the plan of this function and these arguments."""


class MemoryLimitError(UnityError, RuntimeError):
    """The plan needs more memory per device than there is; names the largest tensors and the knob that helps."""
