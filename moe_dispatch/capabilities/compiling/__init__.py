"""Both verbs in calls that ``torch.compile`` traces, or that a selective checkpoint records. Nothing else loads this.

- ``calls``: what takes the place of a verb in such a call. ``moe_dispatch.seams.tracing`` asks for it.
- ``operators``: the operators that these calls are made of, ``torch.ops.moe_dispatch``.
- ``routes``: how the route of a backend becomes tensors, which is all that an operator takes and returns.
- ``expert_rows``: ``per_expert`` and ``grouped_mm`` of a ``Dispatched`` in compiled experts.
- ``registration``: how a function becomes an operator.
"""
