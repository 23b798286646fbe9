"""The discounts of modified Kneser-Ney: how much of a count is kept for unseen n-grams."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlm.errors import EstimationError
from dlm.estimate.settings import Fallback


def discounts(
    counts_of_counts: NDArray[np.integer], order: int, fallback: Fallback | None
) -> tuple[NDArray[np.float32], bool]:
    """The discounts of adjusted counts 1, 2, and 3 or more, of one order.

    Args
        counts_of_counts  (4,)  how many n-grams of the order have the adjusted count 1, 2, 3, 4
        fallback          what to use where the closed form fails; None: that is an error
    Returns     (discounts (4,) float32, the first 0; whether they are the fallback)
    Raises      EstimationError  the closed form fails and there is no fallback
    Guarantees  0 <= discounts[j] <= j
    Paper       Chen and Goodman 1998, equation 26, in the float32 arithmetic of lmplz
    """
    n = [np.float32(0), *(np.float32(int(count)) for count in counts_of_counts)]
    fault = ""
    found = np.zeros(4, np.float32)
    for j in (1, 2, 3):
        if n[j] == 0:
            fault = f"no {order}-gram has the adjusted count {j}"
            break
    else:
        n1, n2 = (int(count) for count in counts_of_counts[:2])
        y = n[1] / np.float32(n1 + 2.0 * n2)
        for j in (1, 2, 3):
            found[j] = np.float32(j) - np.float32(j + 1) * y * n[j + 1] / n[j]
            if not 0 <= found[j] <= j:
                fault = f"the discount of {order}-grams with adjusted count {j} would be {found[j]}"
                break
    if not fault:
        return found, False
    if fallback is None:
        raise EstimationError(
            f"order {order}: {fault}, so Kneser-Ney discounts cannot be computed from these counts "
            f"(n-grams with counts 1, 2, 3, 4: {', '.join(str(int(c)) for c in counts_of_counts)}; "
            "expected some of each, falling). The text is small or repeats itself: remove repeated "
            "lines, or pass --discount-fallback"
        )
    return np.array([0.0, *fallback], np.float32), True
