"""Dispatches on the routes of their forward. Public names are those of ``moe_dispatch.recompute``."""
