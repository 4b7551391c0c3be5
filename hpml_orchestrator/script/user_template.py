"""Templates of a user's own: in Jinja2's sandbox, bounded, and their errors told by line.

The sandbox refuses attributes that lead out of the values. It bounds `range()`, but not loops in
loops, nor numbers as large as a file system; so rendering counts the lines of Python that it runs,
and no number or text may grow beyond what a script needs. That works in every thread and gives
the same answer on every machine, which a clock would not.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.filters
import jinja2.nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel

from hpml_orchestrator import assets
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.script.template_blocks import (
    LINE_END,
    chain,
    check_blocks,
    starts_something,
    with_line_ends,
)

if TYPE_CHECKING:
    from types import FrameType, TracebackType

__all__ = ["OWN", "UserEnvironment", "own_directory"]

OWN = "hpml"
"""`hpml/torchrun.sh.j2` is always hpml's own template."""

MAX_STEPS = 1_000_000
MAX_NUMBER = 10_000_000
MAX_TEXT = 8 * 1024 * 1024
MAX_TEMPLATE_BYTES = 1024 * 1024
_MAX_GROWTH_KIB = 512 * 1024

_ESSENTIAL = {
    "setup": '"${hpml_python[@]}" claim "$hpml_submission"',
    "finish": "trap hpml_finish EXIT",
    "agent": '"${hpml_python[@]}" agent "$hpml_attempt"',
    "ready": '"${hpml_python[@]}" wait-ready "$hpml_attempt"',
}
"""What a script must hold, and the block that brings it."""


def own_directory() -> str:
    """Return where hpml's own templates are."""
    return str(assets.path("templates") / "sbatch")


class _TooMuch(Exception):  # noqa: N818 - becomes an InputError
    """A template does more than a script needs."""


class _Template(jinja2.Template):
    """A template whose rendering is bounded, and whose errors name file and line."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        """Render; see `jinja2.Template.render`.

        Raises:
            InputError: the template is at fault, or leaves out what every job needs.
        """
        environment = self.environment
        assert isinstance(environment, UserEnvironment)  # noqa: S101 - it alone makes these
        sources = chain(environment, str(self.name))
        check_blocks(sources)
        try:
            with _Bounded():
                text = super().render(*args, **kwargs)
        except InputError:
            raise
        except (Exception, _TooMuch) as error:
            raise environment.fault(error, str(self.filename or self.name or "")) from error
        if len(text) > MAX_TEXT:
            raise _fault(
                str(self.filename), f"makes {len(text)} characters; {MAX_TEXT} are allowed"
            )
        for block, words in _ESSENTIAL.items():
            if not any(
                words in line and not line.lstrip().startswith("#") for line in text.split("\n")
            ):
                raise InputError(
                    f"{self.filename}: the script lacks what every job needs of the block "
                    f"{block!r}: {words}",
                    field="templates",
                    hint=f"write {{{{ super() }}}} in the block {block!r}, or leave the block out",
                )
        if not starts_something(text):
            own = (f"{one.file}:{one.blocks['ranks']}" for one in sources if "ranks" in one.blocks)
            raise InputError(
                f"{next(own, self.filename)}: the block 'ranks' starts nothing in the background",
                field="templates",
                hint="the script waits for what the block starts: end the command with &, "
                "or leave the block out",
            )
        if not text.startswith("#!/"):
            raise _fault(str(self.filename), "does not begin with #!/bin/bash, as sbatch wants it")
        if "\0" in text:
            raise _fault(str(self.filename), "makes a NUL character, which no script may hold")
        return text


class _Directories(jinja2.FileSystemLoader):
    """A user's directories: what is there and cannot be read is an error, not passed over."""

    def get_source(
        self, environment: jinja2.Environment, template: str
    ) -> tuple[str, str, Callable[[], bool]]:
        """Read a template; see `jinja2.FileSystemLoader.get_source`."""
        for directory in self.searchpath:
            path = os.path.join(directory, template)
            inside = ".." not in template.split("/")
            if inside and os.path.lexists(path) and not os.path.exists(path):
                raise _fault(path, "is a link that leads nowhere, or cannot be read")
        try:
            text, file, fresh = super().get_source(environment, template)
            return with_line_ends(text), file, fresh
        except UnicodeDecodeError as error:
            where = ", ".join(os.path.join(one, template) for one in self.searchpath)
            raise _fault(where, f"is not UTF-8 text (byte {error.start})") from error


class UserEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox for templates of users, which are looked up before hpml's own."""

    template_class = _Template
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(
        self, directories: tuple[str, ...], raw: Callable[[str], str], **options: Any
    ) -> None:
        for directory in directories:
            if not os.path.isdir(directory) or not os.access(directory, os.R_OK | os.X_OK):
                raise InputError(
                    "there is no such directory, or it cannot be read",
                    field="templates",
                    value=directory,
                    hint="`hpml template eject` makes one; or leave templates out of the profile",
                )
        own = jinja2.FileSystemLoader(own_directory())
        super().__init__(
            loader=jinja2.ChoiceLoader(
                [jinja2.PrefixLoader({OWN: own}), _Directories(list(directories)), own]
            ),
            **options,
        )
        self.directories = directories
        self.globals[LINE_END] = raw("\n")
        # What super(), a macro or a set block returns is shell code: its values are quoted already.
        self.concat = lambda parts: raw("".join(parts))  # type: ignore[method-assign]
        self.filters = {name: _guarded(one) for name, one in self.filters.items()}

    def _load_template(
        self,
        name: str,
        globals: Any,  # noqa: A002 - as Jinja2 calls it
    ) -> jinja2.Template:
        try:
            return super()._load_template(name, globals)
        except RecursionError as error:
            raise self.fault(error, name) from error
        except jinja2.TemplateSyntaxError as error:
            raise _fault(
                f"{error.filename or error.name}:{error.lineno}", str(error.message)
            ) from error
        except jinja2.TemplateNotFound:
            raise  # is an OSError, and `ignore missing` waits for it
        except OSError as error:
            raise _fault(str(error.filename or name), error.strerror or str(error)) from error

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        self._check_size(source, filename or name)
        return super()._parse(source, name, filename)

    @staticmethod
    def _check_size(source: str, name: str | None) -> None:
        if len(source) > MAX_TEMPLATE_BYTES:
            raise _fault(
                str(name), f"has {len(source)} characters; {MAX_TEMPLATE_BYTES} are allowed"
            )

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Of a job only fields and properties: a model's methods read and unpickle files."""
        if isinstance(obj, BaseModel):
            kind = type(obj)
            return attr in kind.model_fields or (
                not attr.startswith(("_", "model_"))
                and isinstance(getattr(kind, attr, None), property)
            )
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Calculate, where the result is of a size that a script can need."""
        if operator == "**":
            _check(left)
            if not isinstance(right, (int, float)) or abs(right) > _MAX_POWER:
                raise _TooMuch(f"a power of {right!r}")
        elif operator == "*":
            for text, number in ((left, right), (right, left)):
                if isinstance(text, (str, bytes, list, tuple)) and isinstance(number, int):
                    _check(len(text) * number)
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return _checked(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method, with no huge number among its arguments."""
        _check_arguments(args, kwargs)
        text = getattr(obj, "__self__", None)
        if isinstance(text, str) and getattr(obj, "__name__", "").startswith("format"):
            _check_format(text)
        return _checked(super().call(context, obj, *args, **kwargs))

    def fault(self, error: BaseException, name: str) -> InputError:
        """Return what to tell of an error in a template: the line that it was at."""
        where = _where(error.__traceback__, (*self.directories, own_directory())) or name
        hint = "`hpml template list` says which templates count"
        if isinstance(error, jinja2.TemplateNotFound):
            looked = ", ".join(self.directories)
            return InputError(
                f"{where}: there is no template {error.name!r} in {looked}, nor among hpml's own",
                field="templates",
                hint=f"templates see their own directory only; hpml's are called {OWN}/NAME.sh.j2",
            )
        if isinstance(error, RecursionError):
            return InputError(
                f"{where}: the template includes or extends itself",
                field="templates",
                hint="a template that overrides hpml's own extends it as "
                f'{{% extends "{OWN}/NAME.sh.j2" %}}',
            )
        if isinstance(error, (_TooMuch, OverflowError, MemoryError)):
            words = str(error) or "out of memory"
            return InputError(
                f"{where}: does more than a script needs: {words}", field="templates", hint=hint
            )
        if isinstance(error, SecurityError):
            return InputError(
                f"{where}: is not allowed in a template: {error}", field="templates", hint=hint
            )
        if isinstance(error, jinja2.UndefinedError):
            return InputError(f"{where}: {error}", field="templates", hint=hint)
        return InputError(f"{where}: {type(error).__name__}: {error}", field="templates", hint=hint)


_MAX_POWER = 64
_FORMAT = jinja2.filters.FILTERS["format"]


def _fault(where: str, words: str) -> InputError:
    return InputError(f"{where}: {words}", field="templates")


def _where(traceback: TracebackType | None, directories: Iterable[str]) -> str:
    """The last line of a template that was at work, as `FILE:LINE`."""
    found = ""
    places = tuple(f"{os.path.normpath(directory)}{os.sep}" for directory in directories)
    while traceback is not None:
        name = os.path.normpath(traceback.tb_frame.f_code.co_filename)
        if name.startswith(places):
            found = f"{name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that takes no huge number and makes no huge text."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(args, kwargs)
        if function is _FORMAT:
            _check_format(str(args[0]))
        return _checked(function(*args, **kwargs))

    passed = getattr(function, "jinja_pass_arg", None)  # whether it wants context or environment
    if passed is not None:
        guarded.jinja_pass_arg = passed  # type: ignore[attr-defined]
    return guarded


def _check_arguments(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    for one in (*args, *kwargs.values()):
        _check(one)


def _check(value: Any) -> None:
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        raise _TooMuch(f"a number over {MAX_NUMBER}")


def _check_format(text: str) -> None:
    if re.search(r"[0-9]{6}|%[^a-zA-Z%]*\*", text):
        raise _TooMuch("a format as wide as that")


def _checked(value: Any) -> Any:
    if isinstance(value, (str, bytes, list, tuple)) and len(value) > MAX_TEXT:
        raise _TooMuch(f"a text or list longer than {MAX_TEXT}")
    return value


class _Bounded:
    """Counts the lines of Python that run in this thread, and ends what has no end."""

    def __init__(self) -> None:
        self._steps = 0
        self._before: Any = None
        self._memory_kib = 0

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        self._memory_kib = _peak_kib()
        sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, _frame: FrameType, _event: str, _arg: Any) -> Any:
        return self._line

    def _line(self, _frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "line":
            self._steps += 1
            if self._steps > MAX_STEPS:
                raise _TooMuch(f"more than {MAX_STEPS} steps; is there a loop without end?")
            if _peak_kib() - self._memory_kib > _MAX_GROWTH_KIB:
                raise _TooMuch(f"more than {_MAX_GROWTH_KIB // 1024} MiB of memory")
        return self._line


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
