"""A pipeline from a built module: `from_module` and its tracer."""
