"""Every test runs on one thread, as the child processes do: sums over more threads round differently."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread():
    """Also after a test that has set another number."""
    yield
    torch.set_num_threads(1)
