"""Names of RaySGD and of Ray Train, for older scripts.

The classes are mixins of the classes that they extend. They import nothing of them, so the names of
the past stay here.
"""
