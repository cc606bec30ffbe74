"""Fusions: the registry, and the planning call that passes groups of ops to users' functions."""
