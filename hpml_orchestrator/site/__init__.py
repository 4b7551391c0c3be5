"""The site profile of a cluster: write it, find the one that applies, check the installation."""
