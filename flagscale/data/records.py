"""One line of a JSONL source as a conversation, whatever form it was written in.

Two forms are read. ShareGPT: `{"conversations": [{"from": "human", "value": "<image>What?"}, ...], "images": [...]}`.
OpenAI: `{"messages": [{"role": "user", "content": ...}, ...]}`, where content is a text (with `<image>` and a list
`images` as in ShareGPT) or a list of parts `{"type": "text" | "image" | "image_url", ...}`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.config.errors import UserError

IMAGE_MARK = "<image>"
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}


class SampleError(UserError):
    """A sample that cannot be used; the message holds cause and remedy, the caller adds where it stands."""


@dataclass(frozen=True, slots=True)
class ImageSlot:
    """Where image number `media` of the sample stands in a turn."""

    media: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What one speaker says: texts and images in their order. `role` is user, assistant or system."""

    role: str
    parts: tuple[str | ImageSlot, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """A conversation and the images it refers to, as written in the source."""

    id: str
    turns: tuple[Turn, ...]
    images: tuple[str, ...]


def parse_record(line: bytes | str) -> Record:
    """The conversation in one JSONL line.

    Raises:
        SampleError: when the line is no JSON object, has neither form, an unknown role, an assistant turn without
            text, no assistant turn, or another number of placeholders than images.
    """
    data = _json_object(line)
    images = _listed_images(data)
    if "conversations" in data:
        raw_turns = [_raw_turn(entry, "from", "value") for entry in _list(data, "conversations")]
    elif "messages" in data:
        raw_turns = [_raw_turn(entry, "role", "content") for entry in _list(data, "messages")]
    else:
        raise SampleError(
            f"has neither 'conversations' nor 'messages' (keys: {', '.join(sorted(data)) or 'none'}); "
            "write it in ShareGPT or OpenAI form"
        )
    turns: list[Turn] = []
    num_marks, inline = 0, []
    for role, content in raw_turns:
        parts: list[str | ImageSlot] = []
        for kind, value in _pieces(content):
            if kind == "text":
                parts.append(value)
                continue
            if kind == "inline":
                inline.append(value)
            parts.append(ImageSlot(num_marks))
            num_marks += 1
        turns.append(Turn(role, _stripped(parts)))
    if inline and (images or len(inline) != num_marks):
        raise SampleError(f"names images both in its parts and by {IMAGE_MARK!r} or 'images'; use one of the two ways")
    images = images or tuple(inline)
    _check(turns, num_marks, images)
    return Record(str(data.get("id", "")), tuple(turns), images)


def _json_object(line: bytes | str) -> dict[str, Any]:
    """The line as a JSON object."""
    try:
        data = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SampleError(f"is not valid JSON ({error}); correct or remove the line") from None
    if not isinstance(data, dict):
        raise SampleError(f"is a JSON {type(data).__name__}, not an object; write one {{...}} a line")
    return data


def _list(data: dict[str, Any], name: str) -> list[Any]:
    """The list under `name`."""
    value = data[name]
    if not isinstance(value, list) or not value:
        raise SampleError(f"'{name}' is not a list with at least one turn; write the turns as a list")
    return value


def _listed_images(data: dict[str, Any]) -> tuple[str, ...]:
    """Image files under `images`, or LLaVA's `image`, which is one file or a list."""
    if data.get("videos") or data.get("video"):
        raise SampleError("has videos, which are not read; give their frames as 'images' or remove the sample")
    listed = data.get("images", data.get("image"))
    listed = [] if listed is None else [listed] if isinstance(listed, str) else listed
    if not isinstance(listed, list) or not all(isinstance(name, str) and name for name in listed):
        raise SampleError("'images' is not a list of file names; write \"images\": [\"a.png\", ...]")
    return tuple(listed)


def _raw_turn(entry: Any, role_key: str, content_key: str) -> tuple[str, Any]:
    """Role (in our words) and content of one entry."""
    if not isinstance(entry, dict) or role_key not in entry or content_key not in entry:
        raise SampleError(f"has a turn without '{role_key}' and '{content_key}'; every turn needs both")
    role = entry[role_key]
    if role not in ROLES:
        raise SampleError(f"has a turn of role {role!r}; roles are {', '.join(sorted(ROLES))}")
    return ROLES[role], entry[content_key]


def _pieces(content: Any) -> list[tuple[str, str]]:
    """Pieces ("text", text), ("mark", "") and ("inline", file name) of a turn's content, in their order."""
    if isinstance(content, str):
        return _marked_pieces(content)
    if not isinstance(content, list):
        raise SampleError(f"has a turn whose content is a {type(content).__name__}; write a text or a list of parts")
    pieces: list[tuple[str, str]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            pieces.extend(_marked_pieces(part["text"]))
        elif kind == "image":
            pieces.append(_image_piece(part.get("image", part.get("path"))))
        elif kind == "image_url":
            url = part.get("image_url")
            pieces.append(_image_piece(url.get("url") if isinstance(url, dict) else url))
        else:
            raise SampleError(f"has a part of type {kind!r} that is not read; types are text, image, image_url")
    return pieces


def _marked_pieces(text: str) -> list[tuple[str, str]]:
    """A text cut at its image marks."""
    pieces: list[tuple[str, str]] = []
    for i, chunk in enumerate(text.split(IMAGE_MARK)):
        if i:
            pieces.append(("mark", ""))
        if chunk:
            pieces.append(("text", chunk))
    return pieces


def _image_piece(name: Any) -> tuple[str, str]:
    """The piece of an image part: its own file, or the next of 'images' when it names none."""
    if name is None:
        return "mark", ""
    if not isinstance(name, str) or not name:
        raise SampleError(f"has an image part that names {name!r}; write the file's name")
    return "inline", name.removeprefix("file://")


def _stripped(parts: list[str | ImageSlot]) -> tuple[str | ImageSlot, ...]:
    """The turn without white space at its two ends, as Qwen's chat template writes it."""
    if parts and isinstance(parts[0], str):
        parts[0] = parts[0].lstrip()
    if parts and isinstance(parts[-1], str):
        parts[-1] = parts[-1].rstrip()
    return tuple(part for part in parts if part != "")


def _check(turns: list[Turn], num_marks: int, images: tuple[str, ...]) -> None:
    """Rules over the whole conversation."""
    if num_marks != len(images):
        raise SampleError(
            f"has {num_marks} {IMAGE_MARK!r} placeholder(s) and {len(images)} image(s); there must be one for each"
        )
    answers = [turn for turn in turns if turn.role == "assistant"]
    if not answers:
        raise SampleError("has no assistant turn, so there is nothing to learn; add the answer")
    if any(not any(isinstance(part, str) for part in turn.parts) for turn in answers):
        raise SampleError("has an assistant turn without text; write the answer or remove the turn")
    if any(isinstance(part, ImageSlot) for turn in turns if turn.role != "user" for part in turn.parts):
        raise SampleError("has an image outside the user's turns; move it into a user turn")


def media_path(source: Path, name: str) -> Path:
    """Where an image lies: relative names count from the folder of the JSONL file."""
    return source.parent / name
