"""Time and memory of calls, and listeners of calls."""
