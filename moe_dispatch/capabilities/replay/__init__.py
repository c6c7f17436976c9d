"""The routing of an earlier pass. Public names are those of ``moe_dispatch.replay``."""
