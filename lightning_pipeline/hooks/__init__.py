"""Hooks and callbacks: operations outside of steps on tensors that not every rank holds."""
