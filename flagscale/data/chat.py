"""A conversation as tokens: the ChatML template, the loss targets, and where each image's placeholders stand.

Template, for each turn (`docs/design/003-data.md`):

    <|im_start|>ROLE\n CONTENT <|im_end|>\n

An image in CONTENT is <|vision_start|>, one <|image_pad|> a merged patch, <|vision_end|>. A video is, for each of its
frame groups, the group's time, `<1.5 seconds>`, and the same with <|video_pad|>. Loss targets are the content of
assistant turns and the <|im_end|> that closes them.

A tokenizer with a chat template of its own writes the conversation instead (`template.py`).

A document of a text corpus is its tokens and <|endoftext|>, all of them targets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flagscale.data.records import TEXT, MediaSlot, Record, SampleError, Turn
from flagscale.data.template import write_through_template

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flagscale.data.tokenizer import Tokenizer

IMAGE_FRAME = -1


@dataclass(frozen=True, slots=True)
class Shape:
    """What is known of a medium before it is decoded.

    Attributes:
        grid_h, grid_w: patches of the image or of every frame group, before merging.
        times: of every frame group of a video, in tenths of a second; empty for an image.
    """

    grid_h: int
    grid_w: int
    times: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """A visual item in a sample.

    Attributes:
        grid_h, grid_w: patches before merging.
        start: position of its first placeholder in the token sequence.
        media: number of the image or video in the sample.
        frame: number of the frame group in a video; `IMAGE_FRAME` for an image.
        time: of the frame group, in tenths of a second.
    """

    grid_h: int
    grid_w: int
    start: int
    media: int
    frame: int = IMAGE_FRAME
    time: int = 0

    def num_tokens(self, merge_size: int) -> int:
        """Placeholders of the item, which is also the number of its embeddings."""
        return self.grid_h * self.grid_w // merge_size**2


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """Token ids and, for each, whether it is a loss target; placements in the order of their placeholders.

    `tokens_T` int64, `is_target_T` bool, T the sample's length.
    """

    tokens_T: np.ndarray
    is_target_T: np.ndarray
    placements: tuple[Placement, ...]

    @property
    def num_loss_tokens(self) -> int:
        """Positions i whose next token i+1 is a target."""
        return int(self.is_target_T[1:].sum())

    @property
    def num_mtp_loss_tokens(self) -> int:
        """Positions i whose token i+2 is a target: multi-token prediction's shift by one more."""
        return int(self.is_target_T[2:].sum())

    def truncated(self, length: int, merge_size: int) -> EncodedSample:
        """The first `length` tokens.

        Raises:
            SampleError: when that would cut an image or video, or leave nothing to learn.
        """
        end = max((item.start + item.num_tokens(merge_size) + 1 for item in self.placements), default=0)
        if end > length:
            raise SampleError(
                f"has visual tokens up to position {end}, more than model.seq_length={length}, and they are never cut; "
                "raise model.seq_length or lower data.max_pixels"
            )
        cut = EncodedSample(self.tokens_T[:length], self.is_target_T[:length], self.placements)
        if cut.num_loss_tokens == 0:
            raise SampleError(
                f"has no answer within the first model.seq_length={length} of its {len(self.tokens_T)} tokens; "
                "raise model.seq_length or shorten the question"
            )
        return cut


def shapes_of(placements: Sequence[Placement]) -> list[Shape]:
    """Shapes of a sample's media, by media number, as its placements tell them."""
    shapes: dict[int, Shape] = {}
    for item in placements:
        times = () if item.frame == IMAGE_FRAME else (item.time,)
        before = shapes.get(item.media, Shape(item.grid_h, item.grid_w))
        shapes[item.media] = Shape(item.grid_h, item.grid_w, before.times + times)
    return [shapes[number] for number in sorted(shapes)]


class _Writer:
    """Tokens as they are appended."""

    def __init__(self, tokenizer: Tokenizer, shapes: Sequence[Shape], merge_size: int) -> None:
        self.tokenizer = tokenizer
        self.shapes = shapes
        self.merge_size = merge_size
        self.tokens: list[int] = []
        self.targets: list[bool] = []
        self.placements: list[Placement] = []

    def add(self, tokens: Sequence[int], *, target: bool) -> None:
        self.tokens.extend(tokens)
        self.targets.extend([target] * len(tokens))

    def add_text(self, text: str, *, target: bool) -> None:
        self.add(self.tokenizer.encode(text), target=target)

    def add_medium(self, media: int) -> None:
        """An image; or all frame groups of a video, each after its time."""
        shape = self.shapes[media]
        if not shape.times:
            self.add_item(shape, media, IMAGE_FRAME, 0)
        for frame, time in enumerate(shape.times):
            self.add_text(f"<{time / 10:.1f} seconds>", target=False)
            self.add_item(shape, media, frame, time)

    def add_item(self, shape: Shape, media: int, frame: int, time: int) -> None:
        """The placeholders of a visual item, between the marks of its start and end."""
        special = self.tokenizer.special
        item = Placement(shape.grid_h, shape.grid_w, len(self.tokens) + 1, media, frame, time)
        self.placements.append(item)
        pad = special.image if frame == IMAGE_FRAME else special.video
        self.add([special.vision_start, *[pad] * item.num_tokens(self.merge_size), special.vision_end], target=False)


def encode_chat(record: Record, shapes: Sequence[Shape], tokenizer: Tokenizer, merge_size: int) -> EncodedSample:
    """The conversation as tokens.

    Args:
        record: the conversation.
        shapes: of every medium of `record.media`.
        tokenizer: whose special tokens frame turns and images.
        merge_size: patches a side that make one token.

    Raises:
        SampleError: when the tokenizer cannot represent a text, or its chat template adds placeholders of its own.
    """
    if len(shapes) != len(record.media):
        raise SampleError(f"has {len(record.media)} media but {len(shapes)} sizes are known; rebuild the index")
    writer = _Writer(tokenizer, shapes, merge_size)
    if tokenizer.has_template and all(turn.role != TEXT for turn in record.turns):
        write_through_template(record, writer)
    else:
        for turn in record.turns:
            _write_turn(writer, turn)
    tokens_T, is_target_T = np.asarray(writer.tokens, dtype=np.int64), np.asarray(writer.targets, dtype=bool)
    placeholders = int(np.isin(tokens_T, (tokenizer.special.image, tokenizer.special.video)).sum())
    features = sum(item.num_tokens(merge_size) for item in writer.placements)
    if placeholders != features:
        raise SampleError(
            f"has {placeholders} placeholders for {features} visual features after the tokenizer's chat template; "
            "correct the template, which must write one for each medium"
        )
    return EncodedSample(tokens_T, is_target_T, tuple(writer.placements))


def _write_turn(writer: _Writer, turn: Turn) -> None:
    """Append one turn."""
    special, target = writer.tokenizer.special, turn.role in ("assistant", TEXT)
    if turn.role != TEXT:
        writer.add([special.im_start], target=False)
        writer.add_text(turn.role + "\n", target=False)
    for part in turn.parts:
        if not isinstance(part, MediaSlot):
            writer.add_text(part, target=target)
        else:
            writer.add_medium(part.media)
    if turn.role == TEXT:
        writer.add([special.pad], target=True)
        return
    writer.add([special.im_end], target=target)
    writer.add_text("\n", target=False)
