"""The native backend: allocates results and calls the compiled core."""
