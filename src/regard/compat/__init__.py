"""Functions with the names, signatures and meanings of other attention libraries, computed by Regard."""
