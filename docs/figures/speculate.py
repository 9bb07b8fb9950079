"""Draws docs/figures/speculate.png: the best speed over plain decoding, by acceptance and by the costs of draft and verification.

    python docs/figures/speculate.py

A chain of k tokens, each accepted with chance a, gives (1 - a^(k + 1)) / (1 - a) tokens a round (arXiv 2211.17192, equation 1), and a round takes
k c + 1 + k s steps of plain decoding: c is the time of a draft step, s that of one more token in a verification.
"""

from pathlib import Path

import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

ACCEPTANCE = np.arange(0.3, 0.96, 0.1)
DRAFT = np.array([0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7])
VERIFY = {
    0.0: "verifying is free (small batch, GPU)",
    0.15: "one more token: 0.15 steps",
    0.6: "one more token: 0.6 steps",
}
LENGTHS = np.arange(1, 17)


def speeds(a: np.ndarray, c: np.ndarray, s: float) -> tuple[np.ndarray, np.ndarray]:
    """The best speed over plain decoding and its length, ``[len(c), len(a)]``."""
    k, a, c = LENGTHS[:, None, None], a[None, None], c[None, :, None]
    ratio = (1 - a ** (k + 1)) / (1 - a) / (k * c + 1 + k * s)
    return ratio.max(0), LENGTHS[ratio.argmax(0)]


def main() -> None:
    figure = Figure(figsize=(11, 3.9), layout="constrained")
    for plot, (s, title) in zip(figure.subplots(1, len(VERIFY), sharey=True), VERIFY.items()):
        ratio, length = speeds(ACCEPTANCE, DRAFT, s)
        plot.imshow(ratio, norm=TwoSlopeNorm(1, 0.5, 4), cmap="RdBu", aspect="auto", origin="lower")
        for (y, x), value in np.ndenumerate(ratio):
            dark = value > 2.5 or value < 0.65
            plot.text(
                x, y, f"{value:.1f}\nk {length[y, x]}", ha="center", va="center", fontsize=7,
                color="white" if dark else "black",
            )  # fmt: skip
        plot.set_xticks(range(len(ACCEPTANCE)), [f"{a:.1f}" for a in ACCEPTANCE])
        plot.set_yticks(range(len(DRAFT)), [f"{c:g}" for c in DRAFT])
        plot.set(title=title, xlabel="acceptance of a token")
    figure.axes[0].set_ylabel("a draft step, in steps of the target")
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=85)


if __name__ == "__main__":
    main()
