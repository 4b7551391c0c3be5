"""The batch script: renders a job through templates/, and builds what is submitted with it."""
