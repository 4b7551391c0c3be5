"""The exporter's end of the training feed; hpml_orchestrator/node/feed.py is the agents' end."""
