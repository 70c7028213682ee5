"""The configuration surface grows on purpose only: every key is in tests/golden/config_keys.txt."""

from __future__ import annotations

from pathlib import Path

from flagscale.config.build import type_name
from flagscale.config.fields import all_fields, nested
from flagscale.config.schema import Config

GOLDEN = Path(__file__).resolve().parents[1] / "golden/config_keys.txt"


def snapshot() -> str:
    """A line a key: home, type, default."""
    lines = []
    for info in all_fields().values():
        default = "required" if info.required else repr(info.default)
        lines.append(f"{info.home}: {type_name(info.annotation)}, {default}")
    return "\n".join(lines) + "\n"


def test_the_keys_are_those_of_the_snapshot() -> None:
    assert snapshot() == GOLDEN.read_text(encoding="utf-8"), (
        "the keys changed; when that is meant, write the new list with "
        "`python -m tests.sanity.test_config_keys` and review the difference"
    )


def test_every_key_says_what_it_means_in_one_sentence() -> None:
    for info in all_fields().values():
        assert info.meaning, info.home
        assert not info.meaning.endswith("."), info.home
        assert len(info.meaning) <= 120, info.home


def test_every_section_has_a_docstring() -> None:
    def sections(cls: type) -> list[type]:
        return [cls, *(inner for child in nested(cls).values() for inner in sections(child))]

    for cls in sections(Config):
        assert cls.__doc__
        assert "(" not in cls.__doc__.splitlines()[0][:20], f"{cls.__name__} has the docstring dataclass makes"


if __name__ == "__main__":
    GOLDEN.write_text(snapshot(), encoding="utf-8")
