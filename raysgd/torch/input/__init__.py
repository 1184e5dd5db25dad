"""What the loaders of a worker read: orders, batches, iterable data."""
