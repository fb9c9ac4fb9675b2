"""What a process needs first: the version, and imports of modules on first use."""
