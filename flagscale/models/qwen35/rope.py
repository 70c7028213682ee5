"""Rotary embeddings: interleaved three-axis angles for the language model, two-axis angles for the vision encoder.

Both return angles, not cosines: Megatron-Core's attention takes [S, B, 1, R] angles, R the rotated channels of a head,
the two halves equal. Shapes: S sequence, B batch, P patches, R rotated channels.
"""

from __future__ import annotations

import torch
from torch import Tensor


class InterleavedMRope(torch.nn.Module):
    """Angles of positions (time, height, width), the axes taking turns over the frequencies.

    Megatron-Core's MultimodalRotaryEmbedding gives each axis a contiguous chunk of frequencies. Qwen3.5 interleaves
    them: of 32 frequencies height takes 1, 4, .. 31, width 2, 5, .. 29, time the rest. Text is the same either way,
    images are not (0.26 of 2.97 in the logits).
    """

    def __init__(self, head_dim: int, rotary_percent: float, rotary_base: float, sections: list[int]) -> None:
        super().__init__()
        rotated = int(head_dim * rotary_percent)
        if sum(sections) != rotated // 2:
            raise ValueError(f"mrope_section {sections} sums to {sum(sections)}, rotated channels need {rotated // 2}")
        exponent = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
        self.frequency_F = 1.0 / rotary_base**exponent
        self.axis_F = torch.zeros(rotated // 2, dtype=torch.int64)
        for axis in (1, 2):
            self.axis_F[axis : 3 * sections[axis] : 3] = axis

    def forward(self, position_ids_3BS: Tensor) -> Tensor:
        """[S, B, 1, R] angles in fp32."""
        device = position_ids_3BS.device
        # Plain attributes, not buffers: a model cast to bfloat16 would round the frequencies.
        if self.frequency_F.device != device:
            self.frequency_F, self.axis_F = self.frequency_F.to(device), self.axis_F.to(device)
        position_FBS = position_ids_3BS.float()[self.axis_F]
        angle_SBF = position_FBS.permute(2, 1, 0) * self.frequency_F
        return torch.cat((angle_SBF, angle_SBF), -1).unsqueeze(2)


def vision_angles(rows_P: Tensor, columns_P: Tensor, head_dim: int, base: float) -> Tensor:
    """[P, 1, 1, head_dim] angles in fp32: a quarter of the channels by row, a quarter by column, then both again."""
    half = head_dim // 2
    exponent = torch.arange(0, half, 2, dtype=torch.float32, device=rows_P.device) / half
    frequency_F = 1.0 / base**exponent
    angle_PF = torch.cat((rows_P.float()[:, None] * frequency_F, columns_P.float()[:, None] * frequency_F), -1)
    return torch.cat((angle_PF, angle_PF), -1)[:, None, None]
