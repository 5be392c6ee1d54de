"""Checks and freezes the arguments of a call. Imports only value classes: masks, scores, facts."""
