"""Fusions: the registry, and the planning call that hands groups of ops to users' functions."""
