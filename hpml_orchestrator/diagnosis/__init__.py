"""Why a job is slow, what to change in its job file, and what that gains."""
