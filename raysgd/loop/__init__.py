"""What a worker does with an operator, whatever the framework that it is written for."""
