"""Prove a training set-up: run its steps on several ranks and on one process, and compare.

``prove`` takes a ``Setup``, or a file that defines the same names, and returns a ``Proof``. ``moe-dispatch prove FILE``
prints it.
"""

from moe_dispatch_testing.prove.proof import Proof, prove, prove_all
from moe_dispatch_testing.prove.running import look
from moe_dispatch_testing.prove.setup import Setup, load_setup

__all__ = ["Proof", "Setup", "load_setup", "look", "prove", "prove_all"]
