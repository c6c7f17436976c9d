"""torch's own search for host syncs on a CUDA device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def refused_syncs() -> Iterator[None]:
    """Make torch raise where an operator would wait for the device."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells once that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
