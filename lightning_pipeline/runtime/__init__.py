"""What moves tensors and failures between the processes of a pipeline."""
