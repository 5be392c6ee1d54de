"""The public functions, each in its own file."""
