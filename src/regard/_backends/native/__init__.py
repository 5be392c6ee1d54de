"""The native backend: allocates the results and calls the compiled core."""
