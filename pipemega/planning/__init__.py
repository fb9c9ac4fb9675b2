"""A run on paper: what a config will do, from the real model on the meta device."""
