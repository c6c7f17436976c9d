"""The command ``moe-dispatch prove``."""
