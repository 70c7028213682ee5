"""From plain data to the typed, frozen configuration: types, allowed values, missing keys."""

from __future__ import annotations

import copy
import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from flagscale.config.errors import ConfigError, UserError, raise_all
from flagscale.config.fields import FieldInfo, all_fields, nearest, nested
from flagscale.config.schema import Config


def build_config(tree: Mapping[str, Any]) -> Config:
    """The configuration that a nested mapping of homes and values describes; absent keys take their default.

    Raises:
        ConfigError: for one unknown key, missing key, wrong type or forbidden value.
        UserErrors: for several of them.
    """
    errors: list[UserError] = []
    config = _build(Config, tree, "", errors)
    raise_all(errors)
    return config


def _build[T](cls: type[T], tree: Mapping[str, Any], prefix: str, errors: list[UserError]) -> T:
    """One section. A key with a mistake gets None here, and the mistake goes to `errors`, which the caller raises."""
    sections = nested(cls)
    values: dict[str, Any] = {}
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for name in tree:
        if name not in names:
            close = nearest((*prefix.split(".")[:-1], str(name)))
            remedy = f"nearest known keys: {', '.join(close)}" if close else "remove it"
            errors.append(ConfigError(f"{prefix}{name}", tree[name], "is no known key", remedy))
    for name in names:
        home, values[name] = f"{prefix}{name}", None
        try:
            if name in sections:
                below = tree.get(name, {})
                if not isinstance(below, Mapping):
                    raise ConfigError(home, below, "is a section of keys", "write its keys below it")
                values[name] = _build(sections[name], below, home + ".", errors)
            elif name in tree:
                values[name] = checked(all_fields()[home], tree[name])
            elif all_fields()[home].required:
                raise ConfigError(home, None, f"must be given ({all_fields()[home].meaning})", _missing_remedy(home))
            else:
                values[name] = copy.copy(all_fields()[home].default)
        except ConfigError as error:
            errors.append(error)
    return cls(**values)


def _missing_remedy(home: str) -> str:
    if home.startswith("model."):
        return "choose a model in the defaults list, such as `- model: qwen35_tiny`, or start with `- /qwen35_mimo`"
    return "set it, or choose a data group in the defaults list, such as `- data: digits`"


def checked(info: FieldInfo, value: Any) -> Any:
    """`value` in the type of the key.

    Raises:
        ConfigError: for a wrong type, a value that is no choice, or a number below the smallest allowed.
    """
    if value == "???":  # OmegaConf's mark for a value that whoever uses the file must give
        raise ConfigError(
            info.home, value, f"must be given ({info.meaning})", "set it in your YAML file or command line"
        )
    try:
        value = coerce(value, info.annotation)
    except TypeError as error:
        remedy = "write a value of that type"
        if isinstance(value, int | float) and not isinstance(value, bool) and info.annotation in (str, str | None):
            remedy = "put it in quotes"
        if value is None:
            remedy = "remove the line to get the default" if not info.required else remedy
        raise ConfigError(
            info.home, value, f"must be {type_name(info.annotation)}, not {_what_it_is(value)}", remedy
        ) from error
    if info.choices and value not in info.choices:
        raise ConfigError(info.home, value, f"must be one of {', '.join(info.choices)}", "choose one of them")
    if info.minimum is not None and value is not None and not value >= info.minimum:
        raise ConfigError(info.home, value, f"must be at least {info.minimum:g}", f"use {info.minimum:g} or more")
    return value


def coerce(value: Any, annotation: Any) -> Any:
    """`value` as `annotation`, converting only what loses nothing (int to float, the text of a float to float).

    Raises:
        TypeError: when the value is of another type.
    """
    options = _options(annotation)
    if value is None:
        if type(None) in options:
            return None
        raise TypeError
    for option in options:
        origin = typing.get_origin(option)
        if origin is list and isinstance(value, list | tuple):
            (element,) = typing.get_args(option)
            return [coerce(item, element) for item in value]
        if origin is dict and isinstance(value, Mapping):
            return dict(value)
        if option is float and isinstance(value, int | float | str) and not isinstance(value, bool):
            return _finite(value)
        if option is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(option, type) and origin is None and type(value) is option:
            return value
    raise TypeError


def _finite(value: float | str) -> float:
    try:
        number = float(value)
    except (ValueError, OverflowError) as error:
        raise TypeError from error
    if not math.isfinite(number):
        raise TypeError
    return number


def _what_it_is(value: Any) -> str:
    """A value's type in words, finer where the type alone would be the one asked for."""
    if isinstance(value, float) and not math.isfinite(value):
        return "one that is not finite"
    if isinstance(value, float) and not value.is_integer():
        return "a number with a fraction"
    if isinstance(value, list) and value:
        return f"a list with {' and '.join(dict.fromkeys(_what_it_is(item) for item in value))}"
    return type_name(type(value))


def type_name(annotation: Any) -> str:
    """A type in words."""
    words = {
        int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list", dict: "a mapping",
        type(None): "null",
    }  # fmt: skip
    names = []
    for option in _options(annotation):
        name = words.get(typing.get_origin(option) or option, str(option))
        if typing.get_origin(option) is list:
            (element,) = typing.get_args(option)
            name = f"a list of {words[element].removeprefix('a ')}s"
        names.append(name)
    return " or ".join(names)


def _options(annotation: Any) -> tuple[Any, ...]:
    return typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
