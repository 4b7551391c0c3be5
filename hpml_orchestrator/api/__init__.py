"""The Python API: submit jobs and read their records; `hpml_orchestrator` exports its names."""
