"""What the user wants: the job file and the site profile as models, and how they are loaded.

Names are imported from the modules, not from here: commands that load no job file use `values` and
`array`, and must not pay for pydantic.
"""
