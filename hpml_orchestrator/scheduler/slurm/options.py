"""Read options as sbatch and srun do: the `#SBATCH` header, and their getopt tables.

    header    = line*            up to the first line that is neither blank nor a comment
    directive = "#SBATCH" word*  at the very start of a line
    word      = characters up to a blank; '...' and "..." keep blanks, a backslash keeps the next
                character (not a blank), an unquoted # ends the line

The rules are those of `_get_argument` and `_opt_batch_script` in Slurm's src/sbatch/opt.c. The
tables come from sbatch and srun of Slurm 22.05, 24.11 and 26.05: from their answers to `--=x`,
which
matches every option, and to each option with and without a value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_MAGIC = "#SBATCH"
_BLANKS = " \t\r\f\v"
_ESCAPED = re.compile(r"\\(.)")
_PIECE = re.compile(  # part of a word: quoted, escaped, or plain text
    rf"""(?P<quote>['"])(?P<quoted>(?:\\.|(?!(?P=quote))[^\\])*)(?P=quote)"""
    rf"""|\\(?P<kept>[^{_BLANKS}]?)|(?P<plain>[^{_BLANKS}\\'"#]+)"""
)


class HeaderError(ValueError):
    """sbatch would refuse the header.

    Attributes:
        line: line number in the script, from 1.
        hint: what would be valid.
    """

    def __init__(self, line: int, message: str, hint: str) -> None:
        super().__init__(message)
        self.line = line
        self.hint = hint


@dataclass(frozen=True)
class OptionWord:
    """A word of the header or of a command line, and its line in the script."""

    text: str
    line: int = 0


@dataclass(frozen=True)
class Option:
    """One option of a command line or header.

    Attributes:
        name: its long name if known, else its spelling without dashes.
        value: its value; may be empty.
        shown: as written, for messages.
        line: its line in the script.
        known: whether the program has this option; if not, its value is a guess.
    """

    name: str
    value: str
    shown: str
    line: int
    known: bool


@dataclass(frozen=True)
class OptionTable:
    """The options of a program's getopt.

    Attributes:
        short: letter -> long name.
        values: long names that take a value.
        optional: long names that take a value only after `=`.
        flags: long names without a value.
        aliases: other spelling -> long name.
        short_flags: letters that take no value here, even if the long name does.
    """

    short: Mapping[str, str]
    values: frozenset[str]
    optional: frozenset[str]
    flags: frozenset[str]
    aliases: Mapping[str, str]
    short_flags: frozenset[str]

    def resolve(self, name: str) -> str | None:
        """Return the long name of a spelling or an unambiguous prefix; None if there is none."""
        if name in self.aliases:
            return self.aliases[name]
        known = self.values | self.optional | self.flags
        if name in known:
            return name
        # getopt_long accepts any unambiguous prefix, so `--ntasks-per-n=4` in a user's script is
        # legal and must not be read as an unknown option.
        fits = {full for full in known if full.startswith(name)}
        fits |= {full for alias, full in self.aliases.items() if alias.startswith(name)}
        return fits.pop() if len(fits) == 1 else None


def header_words(script: str) -> Iterator[OptionWord]:
    """Yield the words of all directives, in order; sbatch reads them as one command line.

    Raises:
        HeaderError: a quote is not closed, or `#SBATCH` is followed by a colon.
    """
    for number, line in enumerate(script.split("\n"), start=1):
        if line.startswith(_MAGIC):
            yield from _split(line[len(_MAGIC) :], number)
        # sbatch stops at the first command. A directive below it is a comment to Slurm; reading it
        # here would promise resources that the job does not get.
        elif line.strip(_BLANKS) and not line.lstrip(_BLANKS).startswith("#"):
            return


def read_options(
    words: Sequence[OptionWord], table: OptionTable, *, stop: bool = False
) -> tuple[list[Option], list[OptionWord]]:
    """Return the options of a command line, and the words that are not options.

    Args:
        words: the command line without the program.
        table: options of the program.
        stop: stop at the first word that is not an option, where srun's command begins; otherwise
            collect such words.

    Raises:
        HeaderError: a value is missing.
    """
    rest = list(words)
    rest.reverse()  # pop() from the end is cheap even on a long command line
    options: list[Option] = []
    others: list[OptionWord] = []
    while rest:
        word = rest.pop()
        if word.text == "--":
            break
        if word.text.startswith("--"):
            options.append(_long(word, rest, table))
        elif word.text.startswith("-") and word.text != "-":
            options += _short(word, rest, table)
        elif stop:
            rest.append(word)
            break
        else:
            others.append(word)
    return options, [*others, *reversed(rest)]


def _long(word: OptionWord, rest: list[OptionWord], table: OptionTable) -> Option:
    spelling, equals, value = word.text[2:].partition("=")
    name = table.resolve(spelling)
    shown = word.text
    # An unknown option may come from a site's plug-in. Whether it takes the next word is a guess;
    # `known` is False, so that callers do not rely on it.
    if not equals and (name is None or name in table.values):
        value, shown = _take(rest, word.text, word.line, known=name is not None)
    return Option(name or spelling, value, shown, word.line, name is not None)


def _short(word: OptionWord, rest: list[OptionWord], table: OptionTable) -> Iterator[Option]:
    letters = word.text[1:]
    while letters:
        letter, letters = letters[0], letters[1:]
        name = table.short.get(letter)
        if letter in table.short_flags or name in table.flags:
            yield Option(name or letter, "", f"-{letter}", word.line, name is not None)
            continue
        if letters:
            value, shown = letters, f"-{letter} {letters}"
        else:
            value, shown = _take(rest, f"-{letter}", word.line, known=name is not None)
        yield Option(name or letter, value, shown, word.line, name is not None)
        return


def _take(rest: list[OptionWord], shown: str, line: int, *, known: bool) -> tuple[str, str]:
    if not rest or (not known and rest[-1].text.startswith("-")):
        if known:
            raise HeaderError(line, f"{shown}: a value is missing", "write it behind the option")
        return "", shown
    value = rest.pop().text
    return value, f"{shown} {value}"


def _split(text: str, number: int) -> Iterator[OptionWord]:
    position = 0
    while True:
        position += len(text[position:]) - len(text[position:].lstrip(_BLANKS))
        if text.startswith(":", position):
            raise HeaderError(
                number,
                f"unexpected ':' in {text.strip()!r}",
                "an #SBATCH option starts with - or --",
            )
        word = ""
        while piece := _PIECE.match(text, position):
            quoted = piece["quoted"] and _ESCAPED.sub(r"\1", piece["quoted"])
            word += quoted or piece["kept"] or piece["plain"] or ""
            position = piece.end()
        quote = text[position : position + 1]
        if quote in ("'", '"'):
            raise HeaderError(
                number,
                f"unmatched {quote} in {text.strip()!r}",
                "close the quote on the same #SBATCH line",
            )
        if not word:
            return  # sbatch stops at an empty word as it does at the end of the line
        yield OptionWord(word, number)


_COMMON_VALUES = """
    account acctg-freq array autocomplete batch bb bbf begin chdir cluster-constraint clusters
    comment constraint container container-id container-type context core-spec cores-per-socket
    cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude
    export extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket
    gpus-per-task gres gres-flags hint input job-name licenses mail-type mail-user mcs-label mem
    mem-bind mem-per-cpu mem-per-gpu mem-update mincpus network nodefile nodelist nodes ntasks
    ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket ntasks-per-tres open-mode
    output partition power prefer priority profile qos reservation resources segment signal
    sockets-per-node switches thread-spec threads-per-core time time-min tmp tres-bind
    tres-per-task uid wckey
"""
_COMMON_FLAGS = """
    consolidate-segments contiguous help hold overcommit oversubscribe quiet reboot spread-job
    spread-segments stepmgr test-only usage use-min-nodes verbose version
"""
_COMMON_SHORT = """
    A=account a=array B=extra-node-info b=begin C=constraint c=cpus-per-task D=chdir
    d=dependency e=error F=nodefile G=gpus H=hold h=help i=input J=job-name k=no-kill
    L=licenses M=clusters m=distribution N=nodes n=ntasks O=overcommit o=output p=partition
    Q=quiet q=qos S=core-spec s=oversubscribe t=time V=version v=verbose W=wait w=nodelist
    x=exclude
"""
_ALIASES = {"cluster": "clusters", "tasks-per-node": "ntasks-per-node"}


def _letters(table: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in table.split())


SBATCH = OptionTable(
    short=_letters(_COMMON_SHORT),
    values=frozenset(
        f"{_COMMON_VALUES} export-file kill-on-invalid-dep wait-all-nodes wrap".split()
    ),
    optional=frozenset(
        "exclusive get-user-env nice no-kill oom-kill-step propagate requeue resv-ports".split()
    ),
    flags=frozenset(
        f"{_COMMON_FLAGS} disable-stdout-job-summary external ignore-pbs immediate no-requeue "
        "parsable wait".split()
    ),
    aliases=_ALIASES,
    # immediate belongs to older releases; k has an optional value, which only its long form can
    # have
    short_flags=frozenset("HIOQhksvVW"),
)

SRUN = OptionTable(
    short={
        letter: name
        for letter, name in _letters(
            f"{_COMMON_SHORT} E=preserve-env I=immediate K=kill-on-bad-exit l=label r=relative "
            "T=threads u=unbuffered X=disable-status Z=no-allocate"
        ).items()
        if letter not in "aF"
    },
    values=frozenset(
        f"{_COMMON_VALUES} accel-bind bcast-exclude cpu-bind epilog het-group ignore-signals "
        "jobid mpi msg-timeout prolog relative slurmd-debug task-epilog task-prolog threads "
        "treewidth wait "
        # from the container plug-in pyxis
        "container-image container-mounts container-workdir container-name container-save "
        "container-env".split()
    ),
    optional=frozenset(
        "bcast compress exclusive external-launcher immediate kill-on-bad-exit nice no-kill "
        "oom-kill-step overlap propagate pty resv-ports send-libs x11".split()
    ),
    flags=frozenset(
        f"{_COMMON_FLAGS} async debugger-test disable-status exact interactive label multi-prog "
        "no-allocate preserve-env quit-on-interrupt unbuffered wait-for-children whole "
        "container-mount-home no-container-mount-home container-remap-root "
        "no-container-remap-root container-writable container-readonly "
        "no-container-entrypoint container-entrypoint".split()
    ),
    aliases={**_ALIASES, "cpu_bind": "cpu-bind", "pack-group": "het-group"},
    short_flags=frozenset("EHIKOQXZhklsuvV"),
)
