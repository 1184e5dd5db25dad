"""Code written for other libraries: Lightning modules, creator functions, Horovod."""
