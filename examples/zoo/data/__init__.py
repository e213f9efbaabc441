"""Data modules of the examples."""
