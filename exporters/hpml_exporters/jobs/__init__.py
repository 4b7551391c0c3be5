"""Jobs on the node, and their use of resources."""
