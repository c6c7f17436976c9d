"""Integers that travel with the rows of a dispatch: ``dispatch(x, routing, carry={"adapter": ids})``.

- ``columns``: one such dispatch. ``load_carry`` of ``moe_dispatch.seams.calls`` asks for it.
- ``packets``: backends that send packets of ours carry the integers in them.
- ``gathered``: for other backends, one all-gather brings the ids and the integers of all ranks, from which each rank
  finds those of its rows.
"""
