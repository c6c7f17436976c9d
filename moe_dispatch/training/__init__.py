"""The numbers of a training step on many ranks: who holds what, and what follows from it."""

from moe_dispatch.training.parts import OnParts, joined_group
from moe_dispatch.training.per_expert import PerExpert
from moe_dispatch.training.setup import Setup
from moe_dispatch.training.table import Held, Table

__all__ = ["Held", "OnParts", "PerExpert", "Setup", "Table", "joined_group"]
