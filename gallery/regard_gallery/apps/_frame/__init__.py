"""The framework of the applications: options, training, checkpoints, runs and reports."""
