"""`python -m hpml_orchestrator.cli`: the same as `hpml`."""

from hpml_orchestrator.cli.main import main

main()
