"""What the loaders of a worker read: orders, parts of batches, streams."""
