"""Helpers for all other folders: argument checks, listeners, time and memory measurements."""
