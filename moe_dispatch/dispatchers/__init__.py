"""The layer between a model and a backend: checks, sizes, padding of rows, autograd and counters.

``Dispatcher.dispatch`` in ``dispatcher`` tells the story of a call from top to bottom:

- A dispatch is a value, a ``Call``. Plug-ins may change it before ``make``, the one function that runs it.
- ``checks.check_call`` compares the tensors and the plan with the config, and drafts a plan if there is none.
- ``autograd.start`` cleans the ids, lets ``agreement`` settle the sizes if the plan has none, pads, and hands the rows
  to the backend. ``autograd.finish`` waits for them. ``Dispatch`` and ``Combine`` attach the verbs to autograd.

One dispatch has these records. ``Backend.start`` and ``finish`` return the first two, and know nothing of the model:

=============  ==========================  ====================================================================
layer          until the rows have come    afterwards
=============  ==========================  ====================================================================
backend        its own (``Started``)       ``Arrived``, with the ``Route`` for combine and both backwards
dispatcher     ``autograd.Departed``       ``autograd.State``: the route, and how to pad and trim the model's rows
model          ``InFlight``, if it asks    ``Dispatched``, with the state
=============  ==========================  ====================================================================

There are two kinds of padding:

- Rank padding makes the number of rows of each rank fit the backend's ``Constraints``. ``autograd.start`` decides the
  number: that of the plan, which ``agreement.settle`` sets if the ranks need a common one, else its own, by
  ``Constraints.padded``. ``autograd.pad`` adds the rows, and ``autograd.trim`` removes them from what comes back.
- Expert padding makes the rows of each expert a multiple of the config's ``pad_multiple``. After the exchange, the
  backend calls ``group_slots`` or, in graph-safe mode, ``group_statically`` of ``permutation.index`` (or of
  ``triton_tables``), which add these rows. If the backend has ``pads_experts``, its library adds them.

All calls use ``channel``, the objects that dispatchers with the same config and group open and share. They count in
``meter``. In a call, a plug-in behind ``moe_dispatch.seams.slots`` chooses expert slots if the config asks for it, and
observers behind ``moe_dispatch.seams.observers`` hear of the call if there are any. Outside of a call: ``requirements``
(what config and backend need from a group), ``metrics`` and ``overflow`` (they read what calls counted and needed),
and ``self_test`` (random rows through identity experts). Above the dispatcher stand ``moe_dispatch.cuda_graphs``, which
captures graph-safe calls, ``moe_dispatch.capabilities`` and ``moe_dispatch.steps``.
"""

from typing import TYPE_CHECKING

from moe_dispatch.dispatchers.dispatcher import Dispatcher, build_dispatcher
from moe_dispatch.seams.plug_ins import imported_on_use

if TYPE_CHECKING:
    from moe_dispatch.capabilities.balance.slot_weights import SlotWeights
    from moe_dispatch.capabilities.phases.release import release, reopen
    from moe_dispatch.dispatchers.metrics import Metrics
    from moe_dispatch.dispatchers.overflow import RequiredCapacity
    from moe_dispatch.steps.chunks import run_in_chunks
    from moe_dispatch.steps.rounds import even_rounds
else:
    __getattr__, __dir__ = imported_on_use(
        globals(),
        Metrics="moe_dispatch.dispatchers.metrics",
        RequiredCapacity="moe_dispatch.dispatchers.overflow",
        SlotWeights="moe_dispatch.capabilities.balance.slot_weights",
        even_rounds="moe_dispatch.steps.rounds",
        release="moe_dispatch.capabilities.phases.release",
        reopen="moe_dispatch.capabilities.phases.release",
        run_in_chunks="moe_dispatch.steps.chunks",
    )

__all__ = [
    "Dispatcher",
    "Metrics",
    "RequiredCapacity",
    "SlotWeights",
    "build_dispatcher",
    "even_rounds",
    "release",
    "reopen",
    "run_in_chunks",
]
