"""Subcommands that the `regard` command finds through entry points."""
