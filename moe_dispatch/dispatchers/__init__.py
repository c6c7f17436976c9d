"""What stands between a model and a backend: checks, sizes, padding of rows, autograd, counters.

One call passes, in this order:

- ``dispatcher``: the class that a model calls.
- ``verbs``: dispatch and combine; what an eager call and a traced one do.
- ``planning``: the checks of a call, the sizes that ranks agree on, and how peers hear of a refusal.
- ``autograd``: what both verbs and their backwards run. ``Selection`` cuts and pads the rows of a rank; rows per expert
  are padded after the exchange, by ``moe_dispatch.permutation.index`` or by a backend's library.
- ``operators``: the same as operators of torch, for ``torch.compile`` and selective checkpointing.

Beside the call: ``channel`` (what dispatchers of one config and group share), ``opening`` and ``requirements``
(building one), ``overflow``, ``metrics``, ``capture`` and ``self_test``.
"""

from moe_dispatch.dispatchers.dispatcher import Dispatcher, build_dispatcher
from moe_dispatch.dispatchers.metrics import Metrics
from moe_dispatch.dispatchers.overflow import RequiredCapacity

__all__ = ["Dispatcher", "Metrics", "RequiredCapacity", "build_dispatcher"]
