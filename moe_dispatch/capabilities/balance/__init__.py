"""Expert slots: where experts and their copies are, and how rows and weights get there.

Public names are those of ``moe_dispatch.balance``. Arithmetic, in which nothing talks to other ranks:

- ``placement``: ``ExpertPlacement``, which says what expert each expert slot of each rank holds.
- ``planners``: functions that compute a placement from the rows that experts get, and the rows that each rank gets
  under a placement.
- ``slot_table``: translates expert ids to expert slots, on the device.
- ``movement``: which weights travel under a placement.

The others plug into the dispatchers, by ``moe_dispatch.seams.slots``:

- ``options``: the options of ``balance``. A planner with options of its own derives a class from ``PlannerOptions``.
- ``slots``: chooses the slots of a dispatch, and runs ``Dispatcher.place``.
- ``slot_weights``: ``SlotWeights``, which brings the weights of experts to their slots, and their gradients home.
"""
