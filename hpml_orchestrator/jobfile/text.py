"""Texts in a job file and on the command line: patterns, paths, ages and addresses."""

from __future__ import annotations

import base64
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import SplitResult, unquote, urlsplit

from hpml_orchestrator.errors import InputError, nearest
from hpml_orchestrator.records.job import JobPart
from hpml_orchestrator.records.units import OF_LAUNCHERS, read_span

if TYPE_CHECKING:
    from urllib.request import OpenerDirector

_NOT_DOUBLED = r"\{(?!(?<=\{\{)[\w:.-]+\}\})"
PLACEHOLDER = re.compile(
    _NOT_DOUBLED + r"((?:stage|run|point|local|shm|array|job|checkpoint|env)\.[A-Za-z0-9_]+)\}"
)
"""How arguments and variables refer to data, the run, the job, a task, a point of a sweep and the
job's environment; doubled braces are plain text."""
BRACES = re.compile(
    _NOT_DOUBLED
    + r"\s*((?:stage|run|point|local|shm|array|job|checkpoint|env)[._][^{}\s'\"]+"
    + r"|[A-Za-z][\w:.-]*)\s*\}",
    re.ASCII,
)
"""A word in braces, which may be a misspelt placeholder."""
FIXED_PLACEHOLDERS = (
    "run.dir",
    "run.id",
    "job.id",
    "array.index",
    "local.dir",
    "shm.dir",
    "checkpoint.dir",
)
"""Placeholders that do not end in a user's name."""

_DOUBLED = re.compile(r"\{(\{([A-Za-z][\w:.-]*)\})\}", re.ASCII)
_NAMED = re.compile(
    r"(?:stages?|points?)[._:-]\w+|env[.:].+|(?:stage|run|point|local|shm|array|job|checkpoint)[._]\w*\W.*"
    r"|stage|run|array|local|shm|job",
    re.IGNORECASE,
)
_MISSPELT = 0.8  # similarity; high, so that {epoch}, {index} and other words remain text

NODE_DIRECTORIES = frozenset(
    "TMPDIR SLURM_TMPDIR LOCAL_SCRATCH LOCALSCRATCH LSCRATCH JOBFS".split()
)
"""Variables that name a directory on the node's own disk when the job starts."""
PER_RANK = OF_LAUNCHERS | frozenset(
    "SLURM_PROCID SLURM_LOCALID SLURM_NODEID OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK "
    "PMI_RANK PMIX_RANK".split()
)
"""Variables that only ranks have: each rank may have another value."""


def intended_placeholder(word: str, known: Iterable[str] = ()) -> str | None:
    """Return the placeholder that a word in braces probably stands for.

    Args:
        word: the word between the braces.
        known: placeholders with users' names, such as `stage.digits`.

    Returns:
        None for a word that resembles no placeholder; empty if no known one is similar.
    >>> intended_placeholder("run_dir"), intended_placeholder("stage:set", ["stage.set"])
    ('run.dir', 'stage.set')
    >>> intended_placeholder("epoch"), intended_placeholder("node.name")
    (None, '')
    """
    plain = {re.sub(r"\W|_", "", name): name for name in (*FIXED_PLACEHOLDERS, *known)}
    meant = plain.get(nearest(re.sub(r"\W|_", "", word), plain, at_least=_MISSPELT), "")
    is_like_one = meant or _NAMED.fullmatch(word) or re.fullmatch(r"\w+\.\w+", word)
    return meant if is_like_one else None


def unescaped(text: str) -> str:
    """Return text with single braces in place of doubled ones, which escape a placeholder.

    >>> unescaped("{{run.dir}} {{epoch}} {'a': {'b': 1}}")
    "{run.dir} {{epoch}} {'a': {'b': 1}}"
    """
    return _DOUBLED.sub(
        lambda match: match[0] if intended_placeholder(match[2]) is None else match[1], text
    )


# Make the paths of a job absolute.

_T = TypeVar("_T")

_PATHS = re.compile(
    r"workdir|script|stage\.\d+\.source|monitor\.(web_config|targets)|environment\.venv"
)
_PATHS_OR_NAMES = re.compile(r"environment\.(conda|python)")
_WORDS = re.compile(r"(args|command)\.\d+|collect\.\d+\.source|environment\.variables\..+")


def absolute(job: _T, base: str | Path) -> _T:
    """Return a job with absolute paths: the script relative to the workdir, all else to `base`.

    A leading `~/` in arguments and variables becomes the home directory, as in a shell.

    Args:
        job: a job, or some of its fields before validation, as in a site profile.
        base: directory of the file that it comes from.
    """
    given = dict(texts_of(job))
    workdir = _joined(base, given.get("workdir", "."))
    engine = given.get("environment.container.engine", "")

    def change(field: str, text: str) -> str:
        if _WORDS.fullmatch(field):
            return os.path.expanduser(text) if f"{text}/".startswith("~/") else text
        is_path = (
            _PATHS.fullmatch(field)
            or (_PATHS_OR_NAMES.fullmatch(field) and "/" in text)
            or (re.fullmatch(r"collect\.\d+\.target", field) and text[:1] != "{")
            or (field == "environment.container.image" and is_image_file(engine, text))
        )
        return _joined(workdir if field == "script" else base, text) if is_path else text

    return cast("_T", with_texts(job, change))


def is_image_file(engine: str, image: str) -> bool:
    """Return whether a container's image is a file, not a reference or name."""
    is_squashfs = image.endswith((".sqsh", ".squashfs")) or (engine == "enroot" and "/" in image)
    return "://" not in image and (is_squashfs or engine == "apptainer")


def texts_of(value: object, field: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the value of every text in a job, or in fields of one."""
    if isinstance(value, str):
        yield field, value
    for name, inner in _inside(value):
        yield from texts_of(inner, f"{field}.{name}" if field else str(name))


def with_texts(value: Any, change: Callable[[str, str], str], field: str = "") -> Any:
    """Return a job or some of its fields, with each text replaced by `change(name, text)`."""
    if isinstance(value, str):
        return change(field, value)
    new = {
        name: with_texts(inner, change, f"{field}.{name}" if field else str(name))
        for name, inner in _inside(value)
    }
    if isinstance(value, JobPart):
        return replace(value, **new)  # type: ignore[arg-type,type-var] # each part is a dataclass
    if isinstance(value, (list, tuple)):
        return type(value)(new.values())
    return new if isinstance(value, dict) else value


def _inside(value: object) -> Iterable[tuple[object, object]]:
    if isinstance(value, JobPart):
        return [(one.name, getattr(value, one.name)) for one in fields(value)]  # type: ignore[arg-type] # one is
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else ()


def _joined(base: str | Path, path: str) -> str:
    if not path or "\0" in path or "://" in path:
        return path  # a URL, or wrong, which validation reports
    return os.path.normpath(os.path.join(base, os.path.expanduser(path)))


# Ages and dates on the command line and in the Python API, such as 90m, 3d or 2026-11-20.

_DAYS = {"today": 0, "yesterday": 1}


def parse_age(text: str, *, field: str) -> float:
    """Return the seconds of an age such as 7d.

    Raises:
        InputError: it has another form; names the option.

    >>> parse_age("90m", field="--older"), parse_age("1.5h", field="--older")
    (5400.0, 5400.0)
    """
    seconds = read_span(text)
    if seconds is None:
        raise InputError(
            "must be a number with a unit (s, m, h, d, w), e.g. 90m, 12h or 7d",
            field=field,
            value=text,
        )
    return seconds


def parse_since(text: str | datetime, *, field: str, now: float) -> float:
    """Return the time for an age such as 3d, or a day such as yesterday or 2026-11-20.

    Args:
        text: the age, or the local date with or without a time; or a datetime.
        field: the option or argument.
        now: seconds since the epoch.

    Raises:
        InputError: it has another form, or is in the future; names the option.
    """
    try:
        if isinstance(text, datetime):
            moment = text.timestamp()
        elif (age := read_span(text)) is not None:
            moment = now - age
        elif (ago := _DAYS.get(text.strip().lower())) is not None:
            day = datetime.fromtimestamp(now, UTC).astimezone().date() - timedelta(ago)
            moment = datetime.combine(day, time()).timestamp()
        else:
            moment = datetime.fromisoformat(text.strip()).timestamp()
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise InputError(
            "must be an age such as 2h or 3d, today, yesterday, or a date such as 2026-11-20 or"
            " 2026-11-20T08:00",
            field=field,
            value=text,
        ) from None
    if moment > now:
        raise InputError("is in the future", field=field, value=text)
    return moment


# Addresses of servers, and credentials for them.

LOCAL_NAMES = ("127.0.0.1", "localhost")


def web_address(url: str) -> SplitResult | None:
    """Return the parts of a valid http or https address; None for any other text.

    >>> [web_address(url) for url in ("http://[::1", "http://h:99999", "ftp://h", "http://a b")]
    [None, None, None, None]
    """
    try:
        parts = urlsplit(url)
        parts.hostname.encode("idna") if parts.hostname else None
        is_whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # unclosed bracket, port too large, label of 64 characters
        return None
    return parts if is_whole and not re.search(r"[\x00-\x20\x7f]", url) else None


def split_login(url: str, *, field: str) -> tuple[str, str]:
    """Split an http or https address into the address without login, and an Authorization header.

    The header is empty if the address has no user and password.

    Raises:
        InputError: it is not such an address; the value is not shown if it may contain a password.
    """
    parts = web_address(url)
    if parts is None:
        raise InputError(
            "must be an http or https address",
            field=field,
            value=None if "@" in url else url,
            hint="for example http://prometheus.example.org:9090",
        )
    host = parts.netloc.rpartition("@")[2]
    header = ""
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        header = f"Basic {base64.b64encode(login.encode()).decode()}"
    return f"{parts.scheme}://{host}{parts.path}".rstrip("/"), header


def opener_for(url: str) -> OpenerDirector:
    """Return an opener for an address; it ignores the environment's proxies for this machine."""
    from urllib.request import ProxyHandler, build_opener  # noqa: PLC0415 - few need it

    return build_opener(*([ProxyHandler({})] if urlsplit(url).hostname in LOCAL_NAMES else []))


def read_secret(path: str, option: str) -> str:
    """Return the single line of a file that only its owner may read.

    Args:
        path: the file.
        option: the option that named it, for errors.

    Raises:
        InputError: the file cannot be read, others may read it, or it is not one line of ASCII.
    """
    try:
        with open(path, encoding="utf-8") as file:
            # Check the open file, not the path: the file could be swapped between the check and the
            # read.
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read().strip()
    except UnicodeDecodeError:
        text = "\0"
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        raise InputError(message, field=option, value=path) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        hint = f"chmod 600 {path}"
        raise InputError(f"others can read it: mode {mode:o}", field=option, value=path, hint=hint)
    if not text or not text.isprintable() or not text.isascii():
        message = "must have one line of ASCII" if text else "is empty"
        raise InputError(message, field=option, value=path)
    return text


def read_credentials(path: str) -> str:
    """Return the Authorization header for a file with `user:password` or a token.

    It is empty without a path.

    Raises:
        InputError: the file cannot be read, others may read it, or it does not have one line.
    """
    if not path:
        return ""
    text = read_secret(path, "--prometheus-auth")
    if ":" in text:
        return f"Basic {base64.b64encode(text.encode()).decode()}"
    return f"Bearer {text}"
