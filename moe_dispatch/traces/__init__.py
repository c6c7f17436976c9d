"""Routing traces: the routing of real steps in one file, for experiments and bug reports."""

from moe_dispatch.traces.trace import Call, Part, Trace

__all__ = ["Call", "Part", "Trace"]
