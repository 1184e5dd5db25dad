"""Code written for other libraries: modules of Lightning, and metrics of TorchMetrics."""
