"""Pack a tree of many small files into a few tar archives; on the login node alone."""
