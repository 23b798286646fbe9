"""What goes wrong on a worker is said plainly, before work is spent."""

from __future__ import annotations

import pytest

from dlm.errors import EstimationError
from dlm.spark import jobs


def test_a_worker_of_another_version_is_refused_with_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both versions are named; one of the driver's runs."""
    run = jobs.checked(lambda x: 2 * x)
    assert run(2) == 4
    monkeypatch.setattr(jobs, "__version__", "0.0.9")
    with pytest.raises(EstimationError, match=r"dlm 0\.0\.9 .*driver has dlm"):
        run(2)
