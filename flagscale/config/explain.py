"""`action=explain key=...`: type, default, meaning of a key, and which files set it."""

from __future__ import annotations

from flagscale.config.build import type_name
from flagscale.config.canonical import DELETED, unknown_key
from flagscale.config.errors import UserError
from flagscale.config.fields import FREE, FieldInfo, all_fields, find_home, is_section
from flagscale.config.loading import Loaded
from flagscale.config.secrets import shown


def explain(key: str | None, loaded: Loaded) -> str:
    """A text about one key, or the keys of a section.

    Raises:
        UserError: no key given, or an unknown one.
    """
    if not key:
        sections = ", ".join(dict.fromkeys(home.rsplit(".", 1)[0] for home in all_fields() if "." in home))
        raise UserError(f"action=explain: no key given; add key=NAME with a key or one of the sections {sections}")
    path = tuple(key.split("."))
    home = find_home(path) or find_home(("model", *path))
    if home is not None and home.startswith(FREE + "."):
        home = FREE
    if home in all_fields():
        return _one(all_fields()[home], loaded)
    if is_section(path):
        below = [info for name, info in all_fields().items() if name.startswith(key + ".")]
        return "".join(f"{info.home}: {info.meaning}\n" for info in below)
    raise unknown_key(path, None, "command line")


def _one(info: FieldInfo, loaded: Loaded) -> str:
    value = loaded.config
    for part in info.home.split("."):
        value = getattr(value, part)
    lines = [info.home, f"  meaning:  {info.meaning}", f"  type:     {type_name(info.annotation)}"]
    if info.unit:
        lines.append(f"  unit:     {info.unit}")
    if info.choices:
        lines.append(f"  choices:  {', '.join(info.choices)}")
    if info.minimum is not None:
        lines.append(f"  minimum:  {info.minimum:g}")
    lines.append("  default:  " + ("none, must be given" if info.required else repr(info.default)))
    lines.append(f"  value:    {shown(info.home, value)!r}")
    settings = loaded.history.get(info.home, [])
    for index, setting in enumerate(settings):
        role = "set by" if index == len(settings) - 1 else "overridden"
        text = "its default" if setting.value is DELETED else repr(shown(setting.home, setting.value))
        lines.append(f"  {role + ':':<11} {text}, {setting.origin}")
    for name, below in loaded.history.items():  # names that the user makes up are keys of their own
        if name.startswith(info.home + "."):
            lines.append(f"  set by:     {name} = {shown(name, below[-1].value)!r}, {below[-1].origin}")
            settings = below
    if not settings:
        lines.append("  set by:     no file, it is the default")
    return "\n".join(lines) + "\n"
