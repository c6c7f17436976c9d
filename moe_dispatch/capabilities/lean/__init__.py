"""Experts that save for the backward what cannot be gathered or computed again, and nothing else.

``first_mm`` and ``last_mm`` are the two ends of a layer's experts. What stands between them is the model's own.

- ``packets``: rows as they arrived, each token once, which are copied to their experts when somebody reads them. The
  core asks for it with ``deliver="packets"`` in the config; the seam is ``Encoded`` of ``moe_dispatch.backends.wire``.
- ``first`` and ``last``: the two products. Each is cut into a node for the gradients of its inputs and a node for those
  of its weights, so a backward in two passes computes every product and exchange once.
- ``activations``: functions between the two that ``last_mm`` computes again in the backward.

Public names are those of ``moe_dispatch.lean``.
"""
