"""What a call asks: its arguments, checked once and frozen. Imports only values (masks, scores, facts)."""
