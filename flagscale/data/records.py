"""One record of a source as a conversation, whatever form it was written in.

Forms that are read (`docs/data.md` shows each):

- ShareGPT: `{"conversations": [{"from": "human", "value": "<image>What?"}, ...], "images": [...], "videos": [...]}`,
  with LLaVA's variants: `image` or `video` as one name or a list, `<image>` as the mark of a video where only videos
  are listed, and turns that say `role` and `content`.
- OpenAI: `{"messages": [{"role": "user", "content": ...}, ...]}`, where content is a text (with `<image>` and a list
  `images` as above) or a list of parts `{"type": "text" | "image" | "image_url" | "video" | "video_url", ...}`.
- Plain text: `{"text": "..."}`, a document of a text corpus; with images or videos beside it, their caption.

A text under `system` beside the turns of either form is their first turn, unless they begin with one.

A medium is named by a path, a data URI, or comes with its bytes (Parquet, WebDataset).
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from flagscale.config.errors import UserError

IMAGE, VIDEO = "image", "video"
MARKS = {IMAGE: "<image>", VIDEO: "<video>"}
TEXT = "text"
"""Role of the only turn of a text corpus' document: all of it is learned."""
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
PARTS = {"image": IMAGE, "image_url": IMAGE, "video": VIDEO, "video_url": VIDEO}


URL = re.compile(r"[a-z][a-z0-9+.-]*://")
LONGEST_NAME = 160  # characters of a name that are told: some files hold a picture where its name belongs


class SampleError(UserError):
    """A sample that cannot be used; the message holds cause and remedy, the caller adds where it stands."""

    def __init__(self, cause: str) -> None:
        super().__init__(printable(cause))


def printable(text: str) -> str:
    """The text with halves of characters, which no file or terminal takes, spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()


def told(name: object) -> str:
    """A name, cut to a length that a message bears."""
    text = str(name)
    return text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}... ({len(text)} characters)"


@dataclass(frozen=True, slots=True)
class Media:
    """An image or a video.

    Attributes:
        kind: `IMAGE` or `VIDEO`.
        name: file or folder as the source names it; what people are told.
        load: reads the file's bytes where the source holds them; may raise SampleError.
        frames: of a video that the source holds as its frames.
        fps: frames a second of `frames`, where the source says so.
    """

    kind: str
    name: str
    load: Callable[[], bytes] | None = field(default=None, compare=False)
    frames: tuple[Media, ...] = ()
    fps: float | None = None


Pieces = list[str | tuple[str, Media | None]]
"""A turn's content in order: texts, and (kind, medium) where the medium is None when it is the list's next."""


@dataclass(frozen=True, slots=True)
class MediaSlot:
    """Where medium number `media` of the record stands in a turn."""

    media: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What one speaker says: texts and media in their order. `role` is user, assistant, system or `TEXT`."""

    role: str
    parts: tuple[str | MediaSlot, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """A conversation and the media it refers to, images before videos.

    `num_bytes` of the source were read for it; media that the source holds are read, and counted, when they are wanted.
    """

    id: str
    turns: tuple[Turn, ...]
    media: tuple[Media, ...]
    num_bytes: int = field(default=0, compare=False)


def parse_record(raw: bytes | str | Mapping[str, Any]) -> Record:
    """The conversation in one record: a line of JSON, or the mapping it stands for.

    Raises:
        SampleError: when it is no JSON object, has no known form, an unknown role, an assistant turn without text, no
            assistant turn, or another number of placeholders than media.
    """
    data = raw if isinstance(raw, Mapping) else _json_object(raw)
    data = {key: value for key, value in data.items() if value is not None}  # a table's row may leave columns empty
    record_id = printable(str(data.get("id", "")))
    listed = {kind: _listed(data, kind) for kind in MARKS}
    if "conversations" not in data and "messages" not in data:
        media = tuple(item for kind in MARKS for item in listed[kind])
        document = _document(data)
        return Record(record_id, _captioned(document, media) if media else (document,), media)
    name = "conversations" if "conversations" in data else "messages"
    turns: list[tuple[str, Pieces]] = []
    for entry in _list(data, name):
        role, content = _raw_turn(entry)
        turns.append((role, _pieces(content)))
    if str(data.get("system", "")).strip() and turns[0][0] != "system":
        turns.insert(0, ("system", _pieces(data["system"])))
    turns = _marked_as_images(turns, listed)
    media = _media(turns, listed)
    numbers = {kind: iter([i for i, item in enumerate(media) if item.kind == kind]) for kind in MARKS}
    built = tuple(
        Turn(role, _stripped([p if isinstance(p, str) else MediaSlot(next(numbers[p[0]])) for p in pieces]))
        for role, pieces in turns
    )
    _check(built)
    return Record(record_id, built, media)


def _json_object(line: bytes | str) -> dict[str, Any]:
    """The line as a JSON object."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SampleError(f"is not valid JSON ({error}); correct or remove the line") from None
    if not isinstance(data, dict):
        raise SampleError(f"is a JSON {type(data).__name__}, not an object; write one {{...}} a line")
    return data


def _document(data: Mapping[str, Any]) -> Turn:
    """The turn of a plain text."""
    text = data.get("text")
    if not isinstance(text, str):
        raise SampleError(
            f"has none of 'conversations', 'messages' and 'text' (keys: {', '.join(sorted(data)) or 'none'}); "
            "write it in ShareGPT or OpenAI form, or as plain text"
        )
    if not text.strip():
        raise SampleError("has an empty text; write it or remove the sample")
    return Turn(TEXT, (_whole(text),))


def _captioned(document: Turn, media: tuple[Media, ...]) -> tuple[Turn, ...]:
    """The turns of media whose caption is a text: the caption is the answer, and nothing is asked."""
    (text,) = document.parts
    assert isinstance(text, str), "a document is a text"
    if any(mark in text for mark in MARKS.values()):
        raise SampleError("has placeholders in the caption of its images or videos; write it as 'conversations'")
    return Turn("user", tuple(map(MediaSlot, range(len(media))))), Turn("assistant", (text.strip(),))


def _list(data: Mapping[str, Any], name: str) -> list[Any]:
    """The list of turns under `name`; Parquet files also hold it as JSON text."""
    value = data[name]
    if isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise SampleError(f"has '{name}' that is not valid JSON ({error}); correct it") from None
    if not isinstance(value, list) or not value:
        raise SampleError(f"'{name}' is not a list with at least one turn; write the turns as a list")
    return value


def _listed(data: Mapping[str, Any], kind: str) -> list[Media]:
    """Media under `images` (`videos`), or under LLaVA's `image` (`video`), which is one medium or a list."""
    listed = data.get(f"{kind}s")
    listed = data.get(kind) if listed is None else listed
    if listed is None or listed == "":  # a sample of text only among others
        return []
    if not isinstance(listed, list):
        listed = [listed]
    return [medium(kind, item) for item in listed]


def medium(kind: str, value: Any) -> Media:
    """A medium from what a source holds: a name, a data URI, bytes, `{"bytes": ..., "path": ...}`, or, for a video, the
    list of its frames. Raises SampleError."""
    if isinstance(value, Media):
        return value
    if isinstance(value, Mapping) and value.keys() & {"bytes", "path"}:
        name = value.get("path") or f"embedded {kind}"
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
        if isinstance(value, bytes):
            return embedded(kind, str(name), value)
    if value is None:
        raise SampleError(f"has null among its {kind}s; name the {kind}, or remove it and its placeholder")
    if isinstance(value, bytes):
        return embedded(kind, f"embedded {kind}", value)
    if kind == VIDEO and isinstance(value, list) and value:
        return Media(kind, "frames", frames=tuple(medium(IMAGE, frame) for frame in value))
    if not isinstance(value, str) or not value:
        raise SampleError(f"'{kind}s' is not a list of file names; write \"{kind}s\": [\"a.png\", ...]")
    if value.startswith("data:"):
        return _from_uri(kind, value)
    name = value.removeprefix("file://")
    if URL.match(name):
        raise SampleError(f"names the {kind} {told(name)}, which is on the web; download it and name the file")
    return Media(kind, name)


def embedded(kind: str, name: str, data: bytes) -> Media:
    """A medium whose bytes are at hand."""
    return Media(kind, name, partial(bytes, data))


def _from_uri(kind: str, uri: str) -> Media:
    """The medium in a data URI (RFC 2397, base64)."""
    header, comma, body = uri.partition(",")
    try:
        if not comma or not header.endswith(";base64"):
            raise ValueError("it is not base64")
    except ValueError as error:
        raise SampleError(f"has a data URI that cannot be read ({error}); write data:image/png;base64,...") from None
    return Media(kind, f"{told(header)},...", partial(_decoded, body))


def _decoded(body: str) -> bytes:
    """The bytes behind base64."""
    try:
        return base64.b64decode(body, validate=True)
    except ValueError as error:
        raise SampleError(f"has a data URI that is no base64 ({error}); write data:image/png;base64,...") from None


def _raw_turn(entry: Any) -> tuple[str, Any]:
    """Role (in our words) and content of one entry; either form's names of the two are understood."""
    keys = next((pair for pair in (("from", "value"), ("role", "content")) if _has(entry, pair)), None)
    if keys is None:
        raise SampleError("has a turn without 'from' and 'value' or 'role' and 'content'; every turn needs both")
    role = entry[keys[0]]
    if not isinstance(role, str) or role not in ROLES:
        raise SampleError(f"has a turn of role {role!r}; roles are {', '.join(sorted(ROLES))}")
    return ROLES[role], entry[keys[1]]


def _has(entry: Any, keys: tuple[str, str]) -> bool:
    return isinstance(entry, Mapping) and all(entry.get(key) is not None for key in keys)


def _pieces(content: Any) -> Pieces:
    """A turn's content in order."""
    if isinstance(content, str):
        return _marked_pieces(content)
    if not isinstance(content, list):
        raise SampleError(f"has a turn whose content is a {type(content).__name__}; write a text or a list of parts")
    pieces: Pieces = []
    for part in content:
        written = part.get("type") if isinstance(part, Mapping) else None
        if written == "text" and isinstance(part.get("text"), str):
            pieces.extend(_marked_pieces(part["text"]))
        elif isinstance(written, str) and written in PARTS:
            kind = PARTS[written]
            value = next((part[key] for key in (written, "path", "url") if part.get(key) is not None), None)
            value = value.get("url") if isinstance(value, Mapping) and "url" in value else value
            pieces.append((kind, None if value is None else medium(kind, value)))
        else:
            known = ", ".join(("text", *PARTS))
            raise SampleError(f"has a part of type {written!r} that is not read; types are {known}")
    return pieces


def _marked_pieces(text: str) -> Pieces:
    """A text cut at its marks."""
    pieces: Pieces = [_whole(text)]
    for kind, mark in MARKS.items():
        cut: Pieces = []
        for piece in pieces:
            if not isinstance(piece, str):
                cut.append(piece)
                continue
            for i, chunk in enumerate(piece.split(mark)):
                cut += [(kind, None)] * (i > 0) + [chunk] * bool(chunk)
        pieces = cut
    return pieces


def _whole(text: str) -> str:
    """The text. Raises SampleError when it holds half a character, as JSON's \\ud83d may, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start : error.end]
        raise SampleError(f"has half a character ({half!r}) in a text; correct the text or remove the sample") from None
    return text


def _marked_as_images(turns: list[tuple[str, Pieces]], listed: Mapping[str, list[Media]]) -> list[tuple[str, Pieces]]:
    """The turns with the marks of videos where only videos are listed and `<image>` marks each, as in LLaVA-Video."""
    marks = [p for _, pieces in turns for p in pieces if not isinstance(p, str)]
    if listed[IMAGE] or not listed[VIDEO] or marks != [(IMAGE, None)] * len(listed[VIDEO]):
        return turns
    return [(role, [p if isinstance(p, str) else (VIDEO, None) for p in pieces]) for role, pieces in turns]


def _media(turns: list[tuple[str, Pieces]], listed: Mapping[str, list[Media]]) -> tuple[Media, ...]:
    """All media in the order of their placeholders, images before videos."""
    found: list[Media] = []
    for kind, mark in MARKS.items():
        marks = [p[1] for _, pieces in turns for p in pieces if not isinstance(p, str) and p[0] == kind]
        inline = [item for item in marks if item is not None]
        if inline and (listed[kind] or len(inline) != len(marks)):
            raise SampleError(f"names {kind}s both in its parts and by {mark!r} or '{kind}s'; use one of the two ways")
        chosen = inline or listed[kind]
        if len(marks) != len(chosen):
            raise SampleError(
                f"has {len(marks)} {mark!r} placeholder(s) and {len(chosen)} {kind}(s); there must be one for each"
            )
        found += chosen
    return tuple(found)


def _stripped(parts: list[str | MediaSlot]) -> tuple[str | MediaSlot, ...]:
    """The turn without white space at its two ends, as Qwen's chat template writes it."""
    if parts and isinstance(parts[0], str):
        parts[0] = parts[0].lstrip()
    if parts and isinstance(parts[-1], str):
        parts[-1] = parts[-1].rstrip()
    return tuple(part for part in parts if part != "")


def _check(turns: tuple[Turn, ...]) -> None:
    """Rules over the whole conversation."""
    answers = [turn for turn in turns if turn.role == "assistant"]
    if not answers:
        raise SampleError("has no assistant turn, so there is nothing to learn; add the answer")
    if any(not any(isinstance(part, str) for part in turn.parts) for turn in answers):
        raise SampleError("has an assistant turn without text; write the answer or remove the turn")
    if any(isinstance(part, MediaSlot) for turn in turns if turn.role != "user" for part in turn.parts):
        raise SampleError("has an image or video outside the user's turns; move it into a user turn")
