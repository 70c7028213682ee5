"""A conversation as tokens through the tokenizer's own chat template.

The template sees marks in place of what the data says, and each text is encoded plainly where its mark comes out. So a
template decides about turns, think blocks and media, but a text cannot open a turn by spelling a special token.

Loss targets are what the model has to say in assistant turns: its reasoning, the end of the think block, the answer,
and the <|im_end|> that closes the turn. What a generation prompt holds already is none: `<think>\n`, or the whole empty
think block before an answer without reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flagscale.data.records import MediaSlot, Record, SampleError

# Private-use characters around a number: templates pass them through, and do not take them for space.
MARK = re.compile("\ue000(\\d+)\ue001")
THINKING = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)
# What has a meaning of its own in the template's text.
LITERAL = re.compile(
    r"(?P<start><\|im_start\|>\w+\n)|(?P<end><\|im_end\|>)|(?P<video><\|video_pad\|>)"
    r"|(?P<image><\|vision_start\|><\|image_pad\|><\|vision_end\|>)"
)
ASSISTANT = "<|im_start|>assistant\n"
# What generation starts from; the empty block first, since it begins like the open one.
PROMPTS = ("<think>\n\n</think>\n\n", "<think>\n")


class TemplateTokenizer(Protocol):
    """What is asked of a tokenizer with a chat template."""

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The conversation by the template. Raises SampleError where that refuses."""

    def encode_template(self, text: str) -> list[int]:
        """Ids of a template's text, in which special tokens are meant."""


class Sink(Protocol):
    """What takes the tokens."""

    tokenizer: TemplateTokenizer

    def add(self, tokens: Sequence[int], *, target: bool) -> None:
        """Token ids."""

    def add_text(self, text: str, *, target: bool) -> None:
        """Plain text."""

    def add_medium(self, media: int) -> None:
        """An image between its marks; or all frame groups of a video, each with its time and marks."""


@dataclass(slots=True)
class _Marked:
    """A conversation as templates take it, and the texts behind its marks.

    Attributes:
        optional: numbers of texts that a template may leave out: the reasoning of earlier turns.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    optional: set[int] = field(default_factory=set)

    def mark(self, text: str) -> str:
        self.texts.append(text)
        return f"\ue000{len(self.texts) - 1}\ue001"


def write_through_template(record: Record, sink: Sink) -> None:
    """Appends the conversation; the sink's tokenizer has a chat template.

    Raises:
        SampleError: the template refuses the conversation, or leaves out a part of it.
    """
    marked = _marked(record)
    rendered = sink.tokenizer.render(marked.messages)
    slots = [part.media for turn in record.turns for part in turn.parts if isinstance(part, MediaSlot)]
    written: set[int] = set()
    answering = False  # inside an assistant turn
    opening = False  # at its very start, where a think block may open
    for kind, text in _pieces(rendered):
        if kind == "mark":
            written.add(int(text))
            sink.add_text(marked.texts[int(text)], target=answering)
        elif kind in ("image", "video") and slots:
            if (record.media[slots[0]].kind) != kind:
                raise SampleError(f"has a {record.media[slots[0]].kind} that the chat template writes as {kind}")
            sink.add_medium(slots.pop(0))
        elif kind == "start":
            _add(sink, text, target=False)
            answering = opening = text == ASSISTANT
            continue
        else:
            prompt = next((prompt for prompt in PROMPTS if opening and text.startswith(prompt)), "")
            _add(sink, prompt, target=False)
            _add(sink, text.removeprefix(prompt), target=answering)
            answering = answering and kind != "end"
        opening = False
    if slots or set(range(len(marked.texts))) - written - marked.optional:
        raise SampleError("is not written whole by the tokenizer's chat template; use roles and media that it knows")


def _marked(record: Record) -> _Marked:
    marked = _Marked()
    for turn in record.turns:
        message: dict[str, Any] = {"role": turn.role}
        parts = list(turn.parts)
        if turn.role == "assistant" and isinstance(parts[0], str) and (found := THINKING.match(parts[0])):
            reasoning, parts[0] = found[1].strip(), found[2].strip()
            message["reasoning_content"] = marked.mark(reasoning) if reasoning else ""
            marked.optional |= {len(marked.texts) - 1} if reasoning else set()
        content: list[dict[str, str]] = []
        for part in parts:
            if isinstance(part, MediaSlot):
                content.append({"type": record.media[part.media].kind})
            elif part:
                content.append({"type": "text", "text": marked.mark(part)})
        # Templates without media take a plain text only.
        whole = "".join(entry.get("text", "") for entry in content)
        message["content"] = whole if all(entry["type"] == "text" for entry in content) else content
        marked.messages.append(message)
    return marked


def _pieces(rendered: str) -> Iterator[tuple[str, str]]:
    """(kind, text) in order: a group of `LITERAL`, `mark` with its number, or `text` of the template."""
    for number, part in enumerate(MARK.split(rendered)):
        if number % 2:
            yield "mark", part
            continue
        end = 0
        for match in LITERAL.finditer(part):
            if match.start() > end:
                yield "text", part[end : match.start()]
            yield str(match.lastgroup), match[0]
            end = match.end()
        if end < len(part):
            yield "text", part[end:]


def _add(sink: Sink, text: str, *, target: bool) -> None:
    """Text of the template, in which special tokens are meant."""
    if text:
        sink.add(sink.tokenizer.encode_template(text), target=target)
