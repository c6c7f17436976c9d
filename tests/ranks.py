"""Ranks that are threads, in groups that are kept from test to test: to connect and close four takes 30 ms."""

from moe_dispatch_testing import Ranks

run_ranks = Ranks().run
"""Runs a body that leaves no rank waiting, as ``moe_dispatch_testing.run_ranks`` does. If it raises, its groups go."""
