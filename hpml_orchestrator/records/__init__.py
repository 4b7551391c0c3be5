"""Records on disk: plain, versioned files and their directories."""
