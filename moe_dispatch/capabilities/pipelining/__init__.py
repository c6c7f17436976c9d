"""Work in the stages of torch's pipelines. ``moe_dispatch.pipelining`` has the public names."""
