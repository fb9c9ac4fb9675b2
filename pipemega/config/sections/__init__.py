"""The sections of the config: one pydantic class each."""
