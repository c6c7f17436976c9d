"""The emulation of ``deep_ep.Buffer`` of v1, normal mode."""
