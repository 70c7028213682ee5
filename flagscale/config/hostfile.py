"""The hostfile of the ssh runner: one machine a line, `[user@]host[:port] [slots=N]`, `#` starts a comment.

An IPv6 address stands in brackets when a port follows, `[fe80::1]:2222`, and may stand alone without.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from flagscale.config.errors import UserError, raise_all

_LABEL = r"[A-Za-z0-9]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_LONGEST_NAME = 253
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
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(
            f"experiment.runner.hostfile = {str(path)!r}: is a pipe or device, which cannot be read again; write the "
            "hosts into a file"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows start a file with a mark
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
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            host = _host(words, number)
            other = hosts.setdefault(f"{canonical(host.address)} {host.port or ''}", host)
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
        if not bracket or not _is_ipv6(address) or (rest and not rest.startswith(":")):
            raise ValueError(f"{place!r} is no IPv6 address in brackets; {_FORM}")
        return address, _number("port", rest[1:], 1, 65535) if rest else None
    if place.count(":") > 1:
        if not _is_ipv6(place):
            raise ValueError(f"{place!r} is neither a host nor an IPv6 address; {_FORM}")
        return place, None
    address, colon, port = place.partition(":")
    if not is_address(address):
        kind = "IPv4 address" if re.fullmatch(r"[0-9.]+", address) else "host name"
        raise ValueError(f"{_cut(address)!r} is no {kind}; {_FORM}")
    return address, _number("port", port, 1, 65535) if colon else None


def _number(name: str, text: str, low: int, high: int) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not low <= int(text) <= high:
        raise ValueError(f"{name} must be a whole number from {low} to {high}, not {_cut(text)!r}")
    return int(text)


def is_address(text: str) -> bool:
    """Whether a text is a host name, or an IPv4 or IPv6 address without brackets and port."""
    if _is_ipv6(text):
        return True
    if re.fullmatch(r"[0-9.]+", text):
        try:
            return bool(ipaddress.IPv4Address(text))
        except ValueError:
            return False
    return len(text) <= _LONGEST_NAME and _NAME.fullmatch(text) is not None


def canonical(address: str) -> str:
    """The same text for every spelling of an address."""
    return str(ipaddress.IPv6Address(address)) if _is_ipv6(address) else address.lower()


def _is_ipv6(text: str) -> bool:
    try:
        return bool(ipaddress.IPv6Address(text))
    except ValueError:
        return False


def _cut(text: str) -> str:
    """A text short enough for a message."""
    return text if len(text) <= 80 else f"{text[:80]}..."
