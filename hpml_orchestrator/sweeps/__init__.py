"""Many runs of one job: plan, controller, search, statistics and models, report."""
