"""Figures that trainings report."""
