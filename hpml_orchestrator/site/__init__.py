"""The site profile of a cluster: write one, find the one that counts, check the installation."""
