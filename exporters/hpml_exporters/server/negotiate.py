"""Which form of the metrics a client asks for, with its weights (RFC 9110, 12.4.2)."""

from __future__ import annotations

__all__ = ["OPENMETRICS_TYPE", "TEXT_TYPE", "wants_gzip", "wants_openmetrics"]

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_MOST_CHOICES = 32


def wants_openmetrics(accept: str) -> bool:
    """Return whether a header Accept prefers OpenMetrics 1.0.0 to the text format.

    Without a word about OpenMetrics the text format is what everybody reads.

    >>> wants_openmetrics("application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    True
    >>> wants_openmetrics("application/openmetrics-text;version=0.0.1,*/*;q=0.1")
    False
    """
    open_weight = 0.0
    texts: dict[int, float] = {}
    for kind, options in _choices(accept):
        weight = _weight(options)
        if kind == "application/openmetrics-text":
            if options.get("version", "1.0.0") == "1.0.0":
                open_weight = max(open_weight, weight)
        elif kind == "text/plain":
            version = options.get("version", "")
            if version in {"", "0.0.4"}:
                exact = 3 if version else 2
                texts[exact] = max(texts.get(exact, 0.0), weight)
        elif kind == "text/*":
            texts[1] = weight
        elif kind == "*/*":
            texts[0] = weight
    text_weight = texts[max(texts)] if texts else 0.0
    return open_weight > 0 and open_weight >= text_weight


def wants_gzip(accept_encoding: str) -> bool:
    """Return whether a header Accept-Encoding takes gzip.

    >>> wants_gzip("deflate, gzip;q=0.5"), wants_gzip("gzip;q=0, *"), wants_gzip("")
    (True, False, False)
    """
    found = {name: _weight(options) for name, options in _choices(accept_encoding)}
    for name in ("gzip", "x-gzip", "*"):
        if name in found:
            return found[name] > 0
    return False


def _choices(header: str) -> list[tuple[str, dict[str, str]]]:
    """Return what a list of weighted choices names, with the parameters of each."""
    found = []
    for choice in header.split(",", _MOST_CHOICES)[:_MOST_CHOICES]:
        name, *parameters = choice.split(";")
        options = {}
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            options[key.strip().lower()] = value.strip().strip('"')
        found.append((name.strip().lower(), options))
    return found


def _weight(options: dict[str, str]) -> float:
    """Return the weight of a choice; what is no number counts as none given."""
    try:
        weight = float(options.get("q", "1"))
    except ValueError:
        return 1.0
    return weight if 0 <= weight <= 1 else 1.0
