"""Checkpoints: plain files and folders, of any number of stages, checked before anything is loaded."""
