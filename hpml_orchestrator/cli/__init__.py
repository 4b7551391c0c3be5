"""The command line: one file per command group; reads options, calls one function, prints."""
