"""The emulation of ``deep_ep.ElasticBuffer`` of v2."""
