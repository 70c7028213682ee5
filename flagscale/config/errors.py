"""Mistakes that a user can make and correct; every one ends the program with exit code 2 and no traceback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class UserError(ValueError):
    """A mistake in YAML, command line, hostfile, data or checkpoint; the message names place, value, rule, remedy."""


class ConfigError(UserError):
    """A mistake in one configuration key.

    Args:
        key: dotted name of the key at its home, such as `model.micro_batch_size`.
        value: what it was set to.
        rule: what must hold, with the numbers on both sides.
        remedy: what to change.
        origin: where the value was written (as spelled there, with the file), empty when it is a default.
    """

    def __init__(self, key: str, value: Any, rule: str, remedy: str, origin: str = "") -> None:
        self.key, self.value, self.rule, self.remedy, self.origin = key, value, rule, remedy, origin
        where = f" ({origin})" if origin else ""
        super().__init__(f"{key} = {_shown(value)}{where}: {rule}; {remedy}")

    def at(self, origin: str) -> ConfigError:
        """The same mistake, with the place where the value was written."""
        return ConfigError(self.key, self.value, self.rule, self.remedy, origin)


class UserErrors(UserError):
    """Several mistakes found together; `errors` holds them one by one."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(str(error) for error in self.errors))


def raise_all(errors: Sequence[UserError]) -> None:
    """Raise what was collected: nothing for none, the error itself for one, `UserErrors` for more."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise UserErrors(errors)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str) else str(value)
