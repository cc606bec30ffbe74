"""Helpers to verify fusions."""
