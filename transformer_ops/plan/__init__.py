"""Plans as Python sees them: their steps, the bytes they keep, and how they are explained."""
