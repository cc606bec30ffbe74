"""Plans as Python sees them: their steps, the bytes they save, and how they are explained."""
