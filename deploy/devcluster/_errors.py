"""The one error that users see as a message instead of a traceback."""


class DevclusterError(Exception):
    """Something the user can act on; its text is the whole message."""
