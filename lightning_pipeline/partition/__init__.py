"""What is cut, and where: stage_config, ownership of parameters and buffers, placeholders, micro-batches."""
