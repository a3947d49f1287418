"""Random words for compression. They are the same for every version of numpy: messages are decoded with them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def words(key: int, count: int) -> NDArray[np.uint32]:
    """Return uniformly distributed 32-bit numbers."""
    raw: Any = np.random.Philox(key=key).random_raw(-(-count // 2))
    return np.atleast_1d(raw).astype("<u8").view("<u4")[:count]


def signs(key: int, count: int) -> NDArray[np.float32]:
    """Return random signs, −1 or 1."""
    packed = words(key, -(-count // 32)).view(np.uint8)
    return np.unpackbits(packed, count=count).astype(np.float32) * 2 - 1
