"""Outside of steps: what hooks and callbacks do with tensors that not every rank holds."""
