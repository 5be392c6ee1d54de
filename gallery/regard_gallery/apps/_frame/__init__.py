"""What applications share: options, training, checkpoints, runs and reports."""
