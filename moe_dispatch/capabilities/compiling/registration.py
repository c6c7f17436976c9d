"""Registration of functions as operators of ``torch.ops.moe_dispatch``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.library import CustomOpDef, custom_op

NAMESPACE = "moe_dispatch"


def operator(body: Callable[..., Any]) -> CustomOpDef:
    """Register a function as an operator of the same name. Its annotations are the schema."""
    return custom_op(f"{NAMESPACE}::{body.__name__}", body, mutates_args=())
