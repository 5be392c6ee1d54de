"""Model parts that several applications share."""
