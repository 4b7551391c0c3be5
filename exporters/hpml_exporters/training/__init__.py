"""What trainings report about themselves."""
