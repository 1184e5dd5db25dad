"""Golden orders: a record of which sample goes to which worker at which step."""
