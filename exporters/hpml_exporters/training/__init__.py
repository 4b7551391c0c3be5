"""What trainings say of themselves."""
