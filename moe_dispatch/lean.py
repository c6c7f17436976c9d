"""The two ends of experts that save for the backward what cannot be gathered or computed again, and nothing else.

    out = last_mm(sent, first_mm(sent, w13), w2, activation=swiglu)

See ``docs/your-model.md``.
"""

from moe_dispatch.capabilities.lean.activations import Activation, swiglu
from moe_dispatch.capabilities.lean.first import first_mm
from moe_dispatch.capabilities.lean.last import Outputs, last_mm

__all__ = ["Activation", "Outputs", "first_mm", "last_mm", "swiglu"]
