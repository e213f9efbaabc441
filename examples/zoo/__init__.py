"""Data and models of the examples. Nothing in them knows about pipelines."""
