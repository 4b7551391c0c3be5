"""What is written down: plain, versioned records and the directories they live in."""
