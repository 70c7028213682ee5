"""A conversation as tokens: the ChatML template, the loss targets, and where each image's placeholders stand.

Template, for each turn (`docs/design/003-data.md`):

    <|im_start|>ROLE\n CONTENT <|im_end|>\n

An image in CONTENT is <|vision_start|>, one <|image_pad|> a merged patch, <|vision_end|>. Loss targets are the content
of assistant turns and the <|im_end|> that closes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flagscale.data.records import ImageSlot, Record, SampleError, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flagscale.data.tokenizer import Tokenizer

IMAGE_FRAME = -1


@dataclass(frozen=True, slots=True)
class Placement:
    """A visual item in a sample.

    Attributes:
        grid_h, grid_w: patches before merging.
        start: position of its first placeholder in the token sequence.
        media: number of the image in the sample.
        frame: number of the frame group in a video; `IMAGE_FRAME` for an image.
    """

    grid_h: int
    grid_w: int
    start: int
    media: int
    frame: int = IMAGE_FRAME

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


class _Writer:
    """Tokens as they are appended."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.targets: list[bool] = []

    def add(self, tokens: Sequence[int], *, target: bool) -> None:
        self.tokens.extend(tokens)
        self.targets.extend([target] * len(tokens))


def encode_chat(
    record: Record, grids: Sequence[tuple[int, int]], tokenizer: Tokenizer, merge_size: int
) -> EncodedSample:
    """The conversation as tokens.

    Args:
        record: the conversation.
        grids: (grid_h, grid_w) in patches of every image of `record.images`.
        tokenizer: whose special tokens frame turns and images.
        merge_size: patches a side that make one token.

    Raises:
        SampleError: when the tokenizer cannot represent a text.
    """
    if len(grids) != len(record.images):
        raise SampleError(f"has {len(record.images)} images but {len(grids)} sizes are known; rebuild the index")
    writer = _Writer()
    placements: list[Placement] = []
    for turn in record.turns:
        _write_turn(writer, turn, grids, tokenizer, merge_size, placements)
    return EncodedSample(
        np.asarray(writer.tokens, dtype=np.int64), np.asarray(writer.targets, dtype=bool), tuple(placements)
    )


def _write_turn(
    writer: _Writer,
    turn: Turn,
    grids: Sequence[tuple[int, int]],
    tokenizer: Tokenizer,
    merge_size: int,
    placements: list[Placement],
) -> None:
    """Append one turn."""
    special, target = tokenizer.special, turn.role == "assistant"
    writer.add([special.im_start, *tokenizer.encode(turn.role + "\n")], target=False)
    for part in turn.parts:
        if isinstance(part, ImageSlot):
            grid_h, grid_w = grids[part.media]
            placement = Placement(grid_h, grid_w, len(writer.tokens) + 1, part.media)
            placements.append(placement)
            pads = [special.image] * placement.num_tokens(merge_size)
            writer.add([special.vision_start, *pads, special.vision_end], target=False)
        else:
            writer.add(tokenizer.encode(part), target=target)
    writer.add([special.im_end], target=target)
    writer.add(tokenizer.encode("\n"), target=False)
