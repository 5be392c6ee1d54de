"""The arguments of a call, checked and frozen. Imports only values (masks, scores, facts)."""
