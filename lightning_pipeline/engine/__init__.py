"""One step: micro-batches run through the stages by a schedule, gradients are reduced, and ranks compare notes."""
