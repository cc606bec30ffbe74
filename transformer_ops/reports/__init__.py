"""Tables, pictures, bars of progress, and counts of bytes and FLOPs."""
