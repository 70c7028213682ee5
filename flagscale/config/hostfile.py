"""The hostfile of the ssh runner: one machine a line, `[user@]host[:port] [slots=N]`, `#` starts a comment.

An IPv6 address stands in brackets when a port follows, `[fe80::1]:2222`, and may stand alone without.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from flagscale.config.errors import UserError, raise_all

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9._-]+)?")
_FORM = "write [user@]host[:port] [slots=N], an IPv6 address with a port as [address]:port"


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One machine. `port` None leaves the port to ssh, `slots` None allows any number of processes."""

    address: str
    user: str | None = None
    port: int | None = None
    slots: int | None = None
    line: int = 0

    @property
    def label(self) -> str:
        """Name of the host's folder in a run; two servers of one address have two."""
        return self.address if self.port is None else f"{self.address}_{self.port}"

    @property
    def target(self) -> str:
        """What ssh connects to."""
        return f"{self.user}@{self.address}" if self.user else self.address


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a file, in its order.

    Raises:
        UserError, UserErrors: the file cannot be read, holds no host, or has malformed lines, each with its number.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"experiment.runner.hostfile = {str(path)!r}: cannot be read ({error.strerror}); name a file with one host "
            "a line"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is no UTF-8 text ({error.reason}); save it as UTF-8") from error
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, source: str) -> list[Host]:
    """The hosts of a hostfile's text.

    Args:
        source: name of the file, for messages.

    Raises:
        UserError, UserErrors: for each malformed line, and when there is no host.
    """
    hosts: dict[str, Host] = {}
    errors: list[UserError] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            host = _host(words, number)
            other = hosts.setdefault(f"{host.address} {host.port or ''}", host)
            if other is not host:
                raise ValueError(f"{host.address} is on line {other.line} already; give each host one line")
        except ValueError as error:
            errors.append(UserError(f"{source}, line {number}: {error}"))
    raise_all(errors)
    if not hosts:
        raise UserError(f"{source}: names no host; {_FORM}")
    return list(hosts.values())


def _host(words: list[str], number: int) -> Host:
    user, at, place = words[0].rpartition("@")
    if at and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9._-]*", user):
        raise ValueError(f"{user!r} is no user name; {_FORM}")
    address, port = _address(place)
    slots = None
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if name != "slots" or not equals:
            raise ValueError(f"{word!r} is not understood; {_FORM}")
        if slots is not None:
            raise ValueError("slots is given twice; keep one of them")
        slots = _number("slots", value, 1, 1024)
    return Host(address=address, user=user or None, port=port, slots=slots, line=number)


def _address(place: str) -> tuple[str, int | None]:
    """(address, port) of `host`, `host:port`, `[address]`, `[address]:port` or a bare IPv6 address."""
    if place.startswith("["):
        address, bracket, rest = place[1:].partition("]")
        if not bracket or not _IPV6.fullmatch(address) or (rest and not rest.startswith(":")):
            raise ValueError(f"{place!r} is no IPv6 address in brackets; {_FORM}")
        return address, _number("port", rest[1:], 1, 65535) if rest else None
    if place.count(":") > 1:
        if not _IPV6.fullmatch(place):
            raise ValueError(f"{place!r} is neither a host nor an IPv6 address; {_FORM}")
        return place, None
    address, colon, port = place.partition(":")
    if not _NAME.fullmatch(address):
        raise ValueError(f"{address!r} is no host name; {_FORM}")
    return address, _number("port", port, 1, 65535) if colon else None


def _number(name: str, text: str, low: int, high: int) -> int:
    if not text.isascii() or not text.isdigit() or not low <= int(text) <= high:
        raise ValueError(f"{name} must be a whole number from {low} to {high}, not {text!r}")
    return int(text)
