"""The layer between a model and a backend: checks, sizes, padding of rows, autograd and counters.

One call passes these modules:

- ``dispatcher``: the class that a model calls.
- ``verbs``: dispatch and combine, for eager and for traced calls.
- ``planning``: checks a call on its own rank, and prepares what this rank sends.
- ``agreement``: agrees on sizes with the other ranks, and tells them if this rank refuses the call.
- ``autograd``: the computation of both verbs and of their backwards.
- ``operators``: the same computation as operators of torch, for ``torch.compile`` and selective checkpointing.

There are two kinds of padding:

- Rank padding makes the number of rows of each rank fit the backend's ``Constraints`` (``padded`` and ``brought``).
  ``agreement`` settles the number if the ranks need a common one, and ``autograd.Selection`` adds the rows.
- Expert padding makes the rows of each expert a multiple of the config's ``pad_multiple``. ``permutation.tables`` (or
  ``triton_tables``) adds these rows after the exchange. If the backend has ``pads_experts``, its library adds them.

All calls use ``channel``, the objects that dispatchers with the same config and group share. They count in ``metrics``.
``slot_weights`` stands above the dispatcher: it brings the weights of copied experts to the ranks that hold them.
The other modules serve the dispatcher outside of a call: ``opening`` (it opens a channel), ``overflow`` (it reads what
graph-safe calls needed), ``placing``, ``capture``, ``self_test`` and ``ddp``.
"""

from moe_dispatch.dispatchers.dispatcher import Dispatcher, build_dispatcher
from moe_dispatch.dispatchers.metrics import Metrics
from moe_dispatch.dispatchers.overflow import RequiredCapacity
from moe_dispatch.dispatchers.slot_weights import SlotWeights

__all__ = ["Dispatcher", "Metrics", "RequiredCapacity", "SlotWeights", "build_dispatcher"]
