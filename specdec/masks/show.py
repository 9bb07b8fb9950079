"""A mask as a small picture in text, for a notebook or a terminal."""

from __future__ import annotations

import torch

from specdec.masks.lower import MaskMod, dense, home

CELLS = 24  # each way; a cell is two characters wide, so that it looks square
SAMPLE = 16  # the most positions of a cell that are evaluated
SEEN, PARTLY, HIDDEN = "██", "▒▒", " ·"


class Picture(str):
    """Text that a notebook shows without quotes."""

    def __repr__(self) -> str:
        return str(self)


def picture(mask: MaskMod, length: int, row: int = 0, head: int = 0) -> Picture:
    """Queries down, keys across; a cell of several positions shows whether all, some or none of its pairs are seen.

    Raises:
        ValueError: length below 1.
    """
    if length < 1:
        raise ValueError(f"length is {length}: a picture has at least 1 position")
    step = 1 << (-(-length // CELLS) - 1).bit_length()
    # A large cell is sampled, both ends included; a smaller last cell repeats positions, which changes nothing.
    inside = torch.linspace(0, step - 1, min(step, SAMPLE)).long()
    at = (torch.arange(-(-length // step))[:, None] * step + inside).clamp(max=length - 1)
    at = at.to(home(mask))
    seen = dense(mask, at.flatten(), at.flatten(), row, head).view(*at.shape, *at.shape)
    every, some = seen.all(3).all(1).tolist(), seen.any(3).any(1).tolist()
    lines = [
        f"{i * step:>6} {''.join(SEEN if a else PARTLY if o else HIDDEN for a, o in zip(all_of, some_of))}"
        for i, (all_of, some_of) in enumerate(zip(every, some))
    ]
    scale = "one position each way" if step == 1 else f"{step} x {step} positions"
    return Picture(
        "\n".join(
            [
                repr(mask),
                *lines,
                f"queries down, keys across; {SEEN} seen, {PARTLY} partly; a cell is {scale}",
            ]
        )
    )
