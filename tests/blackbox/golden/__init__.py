"""Golden orders: which sample goes to which worker, as it has been since they were written down."""
