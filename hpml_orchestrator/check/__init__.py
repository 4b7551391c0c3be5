"""Would the cluster take a job, and start it? Pure rules over facts that are gathered first."""
