"""Near-duplicate documents, found by MinHash over their lines (Broder 1997)."""

import zlib
from collections.abc import Iterable

import numpy as np

BANDS, ROWS = 16, 3  # two documents that share half of their lines agree in some band with probability 0.88
_random = np.random.default_rng(0)
_A = _random.integers(1, 2**63, BANDS * ROWS, dtype=np.uint64) | np.uint64(1)
_B = _random.integers(0, 2**63, BANDS * ROWS, dtype=np.uint64)


def shingles(text: str) -> np.ndarray:
    """Hashes of the distinct lines of at least 12 characters, `uint64[n]`; of the whole text if it has no such line."""
    lines = {line for raw in text.split("\n") if len(line := raw.strip()) >= 12} or {text}
    return np.fromiter((zlib.crc32(line.encode()) for line in lines), np.uint64, len(lines))


def signature(hashes: np.ndarray) -> np.ndarray:
    """MinHash signature, `uint32[48]`: two agree in a share of their places equal to the sets' Jaccard index."""
    with np.errstate(over="ignore"):
        return ((hashes[:, None] * _A + _B) >> np.uint64(32)).min(0).astype(np.uint32)


def keep_first(texts: Iterable[str], guarded: int = 0, threshold: float = 0.5) -> list[bool]:
    """Which documents to keep so that no two are near-duplicates; the earlier of two is kept.

    `threshold` is the estimated Jaccard index of two documents' lines. The first `guarded` documents are held out: a
    later document is also dropped if over `threshold` of its own lines occur among theirs, which catches a file copied
    into a bigger one.
    """
    buckets: dict[tuple[int, bytes], int] = {}
    signatures: list[np.ndarray] = []
    held_out: list[np.ndarray] = []
    guard = np.empty(0, np.uint64)
    keep: list[bool] = []
    for index, text in enumerate(texts):
        hashes = shingles(text)
        mark = signature(hashes)
        signatures.append(mark)
        bands = [(band, mark[band * ROWS : (band + 1) * ROWS].tobytes()) for band in range(BANDS)]
        near = {buckets[band] for band in bands if band in buckets}
        fresh = not any((signatures[other] == mark).mean() > threshold for other in near)
        if index < guarded:
            held_out.append(hashes)
        else:
            if index == guarded and held_out:
                guard = np.unique(np.concatenate(held_out))
            if len(guard):
                place = np.searchsorted(guard, hashes).clip(max=len(guard) - 1)
                fresh = fresh and (guard[place] == hashes).mean() <= threshold
        if fresh:
            for band in bands:
                buckets.setdefault(band, index)
        keep.append(fresh)
    return keep
