"""Names of RaySGD and Ray Train 1, as mixins and functions that the other packages use."""
