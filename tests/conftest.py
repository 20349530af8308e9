"""Every test runs on one thread, as the child processes do: sums over more threads round differently."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
