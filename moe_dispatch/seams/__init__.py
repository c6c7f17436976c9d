"""The seams: how the core reaches what a plain call does not need. Read these files first, none of which does anything.

====================  ===============================================================  ==============================
file                  seam                                                             who stands behind it
====================  ===============================================================  ==============================
``call``              ``Call``: a dispatch as a value, which plug-ins pass on changed  recompute, carry, chunks
``calls``             ``Interceptor``: takes the calls of a thread                     ``capabilities.recompute``
``tracing``           ``TracedCalls``: takes the calls that torch traces               ``capabilities.compiling``
``observers``         ``Observer``: hears of the calls on a channel                    the watchdog, the recorder
``group_observers``   ``CollectiveObserver``: hears of the collectives of a group      the watchdog
``slots``             ``SlotOptions``, ``Slots``, ``Assigned``: choose expert slots    ``capabilities.balance``
``options``           ``Options``: the fields of a capability in a config              every capability with options
``extension_points``  what other packages add by name                                  entry points
``plug_ins``          the one loader of a capability, by the name of its module        every capability
====================  ===============================================================  ==============================

Two seams stand with the code that uses them: the contract of a backend in ``backends/base.py``, and ``WireFormat``, the
bytes of a row, in ``backends/wire.py``.
"""
