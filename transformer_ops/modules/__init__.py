"""The modules that users make of ops, and views of those of torch."""
