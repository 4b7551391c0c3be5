"""The script: (job, capabilities) -> text through templates/, and what it is submitted with."""
