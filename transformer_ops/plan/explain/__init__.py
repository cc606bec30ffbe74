"""explain(): plans for reading, as text, as a table in a notebook, or as an SVG picture."""
