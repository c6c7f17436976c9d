"""What a config, a call or an import asks for. A plain call loads nothing of these folders, and each can be deleted.

The core reaches them through ``moe_dispatch.seams``. Users import their public names from a module with the name of the
folder, such as ``moe_dispatch.replay``.
"""
