"""One step: micro-batches on their way through the stages by a schedule, their gradients, and the checks at its end."""
