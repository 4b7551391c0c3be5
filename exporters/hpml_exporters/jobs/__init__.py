"""Jobs: found on the node, and what they use."""
