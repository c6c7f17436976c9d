"""The emulation of ``deep_ep.ElasticBuffer`` of v2 and of ``deep_ep.EPBuffer`` of V2.5."""
