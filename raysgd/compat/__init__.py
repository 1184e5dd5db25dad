"""Names of RaySGD and Ray Train for older scripts, as mixins that import no other package."""
