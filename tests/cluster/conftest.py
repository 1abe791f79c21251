from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def cluster():
    """A Ray cluster of two processes."""
    ray = pytest.importorskip(
        "ray", reason="needs Ray: pip install 'mergekit-ram[ray]'", exc_type=ImportError
    )
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
    )
    yield
    ray.shutdown()
