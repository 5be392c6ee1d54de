"""The public functions, one file for each."""
