"""Templates of a user's own change the script, and do no harm: bounded, fenced in, told by line."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.script import Capabilities, render
from hpml_orchestrator.script.user_template import own_directory
from hpml_orchestrator.spec import load_job
from hpml_orchestrator.spec.site import Site
from hpml_orchestrator.spec.site_load import ResolvedSite

HERE = Capabilities(interpreter="/usr/bin/python3")
CHILD = '{% extends "hpml/torchrun.sh.j2" %}\n'


class Office:
    """A directory of templates, and a job that is rendered with them."""

    def __init__(self, root: Path) -> None:
        self.templates = root / "templates"
        self.templates.mkdir()
        self.job = root / "job.yaml"
        self.job.write_text(json.dumps({"name": "a", "script": "train.py", "args": ["$(x)"]}))

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.templates / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def render(self, text: str | bytes | None = None, **fields: Any) -> str:
        """The script, with that text as the template of torchrun."""
        if text is not None:
            self.write("torchrun.sh.j2", text)
        job = load_job(self.job, list(fields.items())).job
        return render(job, HERE, ResolvedSite(Site(templates=str(self.templates))))

    def refused(self, text: str | bytes, words: str) -> InputError:
        """The error of that template, which must say `words` and name the file."""
        with pytest.raises(InputError, match=words) as caught:
            self.render(text)
        assert str(self.templates) in str(caught.value)
        assert caught.value.field == "templates"
        return caught.value


@pytest.fixture
def office(tmp_path: Path) -> Office:
    return Office(tmp_path)


def test_a_block_is_overridden_and_the_rest_stays(office: Office) -> None:
    """One block of one's own; every other line is hpml's."""
    plain = render(load_job(office.job).job, HERE)
    own = office.render(CHILD + "{% block user %}export SITE={{ job.name }}\n{% endblock %}")
    assert set(own.splitlines()) - set(plain.splitlines()) == {"export SITE=a"}
    assert set(plain.splitlines()) <= set(own.splitlines())


@pytest.mark.parametrize(
    ("block", "words", "behind"),
    [
        ("directives", "{{ super() }}#SBATCH --licenses=a:1", "#SBATCH --licenses=a:1"),
        ("user", "export SITE=1", "export SITE=1"),
        ("user", "export SITE={{ job.name }}", "export SITE=a"),
        ("user", "{% if job.name %}export SITE=2{% endif %}", "export SITE=2"),
        ("user", "# fast\nexport SITE=1", "export SITE=1"),
        ("ranks", "srun x &", "srun x &"),
    ],
)
@pytest.mark.parametrize("end", ["{% endblock %}", "{%- endblock %}", "{% endblock %}  "])
def test_a_block_that_ends_in_the_middle_of_a_line_ends_that_line(
    office: Office, block: str, words: str, behind: str, end: str
) -> None:
    """Jinja2 takes the line end behind a tag: hpml's next line must not be glued to the block."""
    script = office.render(CHILD + f"{{% block {block} %}}{words}{end}\n")
    assert behind in script.split("\n")


def test_blocks_that_are_whole_lines_get_no_more_of_them(office: Office) -> None:
    """Empty blocks, blocks that hpml's text ends, and those that end a line stay as they are."""
    plain = render(load_job(office.job).job, HERE)
    for text in ("{% block user %}{% endblock %}", "{% block agent %}{{ super() }}{% endblock %}"):
        assert office.render(CHILD + text) == plain
    own = office.render(CHILD + "{% block user %}\nexport A=1\n  {% endblock %}\n")
    assert own == plain.replace("\n# Ranks start when", "export A=1\n\n# Ranks start when")


def test_a_block_in_one_line_that_starts_nothing_is_refused(office: Office) -> None:
    """As with line ends: the script would wait for nothing."""
    office.refused(CHILD + "{% block ranks %}srun x{% endblock %}", "starts nothing")


def test_without_a_template_for_a_launcher_hpmls_own_is_taken(office: Office) -> None:
    """A directory may hold one template, or none."""
    plain = load_job(office.job, [("launcher", "srun")]).job
    assert office.render(launcher="srun") == render(plain, HERE)
    office.write("torchrun.sh.j2", CHILD + "{% block user %}true\n{% endblock %}")
    assert office.render(launcher="srun") == render(plain, HERE)


def test_a_base_of_ones_own_counts_for_every_launcher(office: Office) -> None:
    """Hpml's launchers extend base.sh.j2, which the user may override in turn."""
    office.write(
        "base.sh.j2", '{% extends "hpml/base.sh.j2" %}{% block user %}echo both\n{% endblock %}'
    )
    for launcher in ("torchrun", "srun"):
        assert "\necho both\n" in office.render(launcher=launcher)


def test_hpmls_own_cannot_be_put_out_of_sight(office: Office) -> None:
    """A directory called hpml among the user's templates does not stand in for hpml's."""
    office.write("hpml/torchrun.sh.j2", "#!/bin/bash\necho mine\n")
    assert "echo mine" not in office.render(CHILD)


def test_values_are_quoted_in_templates_of_users_too(office: Office) -> None:
    """A value that looks like shell code is a word, whatever filter calls it safe."""
    block = "{% block user %}echo {{ job.args[0] }} {{ job.args[0] | safe }}\n{% endblock %}"
    assert "echo '$(x)' '$(x)'\n" in office.render(CHILD + block)


def test_what_a_block_or_macro_makes_is_quoted_once(office: Office) -> None:
    """super(), macros and set blocks return shell code whose values are quoted already."""
    block = (
        "{% macro say(x) %}echo {{ x }}\n{% endmacro %}{% set line %}printf {{ job.args[0] }}\n"
        "{% endset %}{% block user %}{{ super() }}{{ say(job.args[0]) }}{% endblock %}"
    )
    assert "\necho '$(x)'\n" in office.render(CHILD + block)
    block = "{% set line %}printf {{ job.args[0] }}{% endset %}{{ line }}\n{% endblock %}"
    block = "{% block user %}" + block
    assert "\nprintf '$(x)'\n" in office.render(CHILD + block)
    block = "{% block user %}echo {{ 'a' ~ job.args[0] }}\n{% endblock %}"
    assert "\necho 'a$(x)'\n" in office.render(CHILD + block)


def test_a_changed_template_counts_at_once(office: Office) -> None:
    """The environment is kept, not the text of a file that was edited since."""
    assert "\necho one\n" in office.render(CHILD + "{% block user %}echo one\n{% endblock %}")
    path = office.write("torchrun.sh.j2", CHILD + "{% block user %}echo two\n{% endblock %}")
    os.utime(path, (1, 1))
    assert "\necho two\n" in office.render()


MANY = "{% for i in range(99999) %}"
DOUBLED = "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = {} %}{% endfor %}"
LOOPS = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "nested": MANY + MANY + "{% endfor %}{% endfor %}",
    "nested output": MANY + MANY + "x{% endfor %}{% endfor %}",
    "lists": MANY + "{{ range(99999) | map('string') | join | length }}{% endfor %}",
    "power": "{{ 10 ** 10 ** 8 }}",
    "power tower": "{{ (9 ** 9) ** (9 ** 9) }}",
    "times": "{{ 'x' * 10 ** 12 }}",
    "list times": "{{ [0] * 10 ** 12 }}",
    "centre": "{{ 'x' | center(10 ** 12) }}",
    "justified": "{{ 'x'.ljust(10 ** 12) }}",
    "format": "{{ '{:1000000000000}'.format(1) }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "format operator": "{{ '%*d' % (10 ** 12, 1) }}",
    "doubling": DOUBLED.replace("{}", "n.s ~ n.s"),
    "doubling with plus": DOUBLED.replace("{}", "n.s + n.s"),
    "lipsum": "{{ lipsum(n=9999999) }}",
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_template_that_has_no_end_is_stopped(office: Office, loop: str) -> None:
    """Loops in loops, huge numbers and huge texts end with the file's name and line."""
    text = CHILD + "{% block user %}\n" + loop + "\n{% endblock %}"
    error = office.refused(text, "does more than a script needs")
    assert "torchrun.sh.j2:3: " in str(error)


def test_it_is_stopped_in_any_thread_and_tracing_is_as_before(office: Office) -> None:
    """The bound needs no signal; a debugger or coverage is given back what it had."""
    found: list[object] = []

    def work() -> None:
        before = sys.gettrace()
        try:
            office.render(CHILD + "{% block user %}" + LOOPS["nested"] + "{% endblock %}")
        except InputError as error:
            found.extend([error, sys.gettrace() is before])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(600)
    assert isinstance(found[0], InputError)
    assert found[1] is True


TRICKS = [
    "''.__class__",
    "''.__class__.__mro__",
    "job.__init__.__globals__",
    "job.__class__",
    "job.resources.__dict__",
    "''|attr('__class__')",
    "[job]|map(attribute='__class__')|first",
    "'{0.__class__}'.format(job)",
    "job.parse_file('/etc/passwd')",
    "job.model_construct()",
    "job.model_config",
    "self.__init__.__globals__",
    "cycler.__init__.__globals__",
    "lipsum.__globals__",
    "job.args.append('x')",
    "directives.clear()",
]


@pytest.mark.parametrize("trick", TRICKS)
def test_attribute_tricks_are_refused(office: Office, trick: str) -> None:
    """Nothing leads from a value to Python's inside, and no value is changed."""
    text = CHILD + "{% block user %}\n{{ " + trick + " }}\n{% endblock %}"
    assert "torchrun.sh.j2:3: " in str(office.refused(text, "unsafe|not allowed|has no attribute"))


@pytest.mark.parametrize(
    ("text", "words", "line"),
    [
        ("\n{% block user %}{{ nme }}{% endblock %}", "'nme' is undefined", 2),
        ("\n\n{% block user %}{{ job.nme }}{% endblock %}", "has no attribute 'nme'", 3),
        ("\n{% block user %}", "[Uu]nexpected end", 2),
        ("{% blok user %}", "unknown tag 'blok'", 1),
        ("\n{% block user %}{{ 'x' | nofilter }}{% endblock %}", "No filter named 'nofilter'", 2),
        ("\n{% block user %}{{ 1 / 0 }}{% endblock %}", "ZeroDivisionError", 2),
        ("\n{% block user %}{{ 'a;b' | directive }}{% endblock %}", "must not stand unquoted", 2),
    ],
)
def test_faults_name_file_and_line(office: Office, text: str, words: str, line: int) -> None:
    """What is misspelt is told with the place where it stands."""
    start = '{% extends "hpml/torchrun.sh.j2" %}'
    assert f"torchrun.sh.j2:{line}: " in str(office.refused(start + text, words))


@pytest.mark.parametrize("name", ["../secret.j2", "/etc/passwd", "sub/../../secret.j2", "none.j2"])
def test_includes_stay_in_the_directory(office: Office, name: str) -> None:
    """A file outside is not there for a template."""
    (office.templates.parent / "secret.j2").write_text("secret")
    text = CHILD + '{% block user %}{% include "' + name + '" %}{% endblock %}'
    assert "hpml/NAME.sh.j2" in office.refused(text, "there is no template").hint


def test_includes_within_the_directory_work(office: Office) -> None:
    """A template may be divided into files."""
    office.write("proxy.sh", "export PROXY=1\n")
    block = (
        '{% block user %}{% include "proxy.sh" %}{% include "no" ignore missing %}{% endblock %}'
    )
    assert "export PROXY=1\n" in office.render(CHILD + block)


def test_a_template_that_extends_itself_is_told_how_to_extend_hpmls(office: Office) -> None:
    """The mistake that is made first."""
    error = office.refused('{% extends "torchrun.sh.j2" %}', "extends itself")
    assert '{% extends "hpml/NAME.sh.j2" %}' in error.hint


@pytest.mark.parametrize("block", ["setup", "finish", "agent", "ready"])
def test_a_script_without_the_claim_or_its_like_is_refused(office: Office, block: str) -> None:
    """A block that every job needs may be added to, not dropped; a comment does not stand in."""
    empty = CHILD + "{% block " + block + " %}\n# claim finish agent\n{% endblock %}"
    error = office.refused(empty, f"needs of the block '{block}'")
    assert "super()" in error.hint
    added = CHILD + "{% block " + block + " %}{{ super() }}echo more\n{% endblock %}"
    assert "\necho more\n" in office.render(added)


def test_what_is_no_template_is_refused(office: Office) -> None:
    """Bytes that are no text, a script without its first line, a huge file."""
    office.refused(b"\xff\xfe", "not UTF-8")
    office.refused("hello", "lacks what every job needs")
    office.refused("x" * 2_000_000, "2000000 characters")
    with pytest.raises(InputError, match="no such directory") as caught:
        render(load_job(office.job).job, HERE, ResolvedSite(Site(templates="/nowhere")))
    assert caught.value.field == "templates"


def test_an_unreadable_template_is_told(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be opened is an error, not a reason to take hpml's own in silence."""
    path = office.templates / "torchrun.sh.j2"
    path.symlink_to(path.name)  # a loop of links: no user, root included, can open it
    with pytest.raises(InputError, match="torchrun.sh.j2"):
        office.render()


def test_a_block_that_hpml_has_not_is_refused(office: Office) -> None:
    """Jinja2 would leave it out without a word: file, line, and the nearest name."""
    error = office.refused(CHILD + "\n{% block usr %}ulimit -n 9\n{% endblock %}", "no block 'usr'")
    assert "torchrun.sh.j2:3: " in str(error)
    assert "did you mean 'user'?" in error.hint
    error = office.refused(CHILD + "{% block zzzzz %}true\n{% endblock %}", "no block 'zzzzz'")
    assert "activate" in error.hint
    conditional = "{% if true %}{% block usre %}true\n{% endblock %}{% endif %}"
    assert "did you mean 'user'?" in office.refused(CHILD + conditional, "no block 'usre'").hint


def test_a_block_of_a_base_of_ones_own_may_be_filled(office: Office) -> None:
    """New blocks within a block are there for the children; only what nobody has is refused."""
    new = "{% block user %}{% block site_limits %}{% endblock %}{% endblock %}"
    office.write("base.sh.j2", '{% extends "hpml/base.sh.j2" %}' + new)
    own = '{% extends "base.sh.j2" %}{% block site_limits %}ulimit -n 9\n{% endblock %}'
    office.write("srun.sh.j2", own + "{% block ranks %}sleep 1 &\n{% endblock %}")
    assert "ulimit -n 9\n" in office.render(launcher="srun")


def test_a_base_without_the_block_of_the_ranks_is_refused(office: Office) -> None:
    """Hpml's launcher fills a block that a whole base of the user's own has renamed."""
    whole = (Path(own_directory()) / "base.sh.j2").read_text()
    base = office.write("base.sh.j2", whole.replace("block ranks", "block start"))
    with pytest.raises(InputError, match="no block 'ranks'") as caught:
        office.render()
    assert str(base) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("ulimit -n 9\n", 2),
        ("\n\n{{ job.name }}\n", 4),
        ("{% block user %}true\n{% endblock %}\n\nulimit", 5),
        ("{% include 'proxy.sh' %}", 2),
    ],
)
def test_text_outside_of_blocks_is_refused(office: Office, text: str, line: int) -> None:
    """It would be left out without a word."""
    office.write("proxy.sh", "export PROXY=1\n")
    error = office.refused(CHILD + text, "text outside of the blocks")
    assert f"torchrun.sh.j2:{line}: " in str(error)


@pytest.mark.parametrize(
    "ranks",
    ["", "\n# srun --x &\n", "\nsrun true\n", "\necho 'a & b' \"c & d\" >&2 && srun true 2>&1\n"],
)
def test_ranks_that_are_not_started_in_the_background_are_refused(
    office: Office, ranks: str
) -> None:
    """The script would wait for the agent, and so until the time limit."""
    block = "\n{% block ranks %}" + ranks + "{% endblock %}"
    error = office.refused(CHILD + block, "starts nothing in the background")
    assert "torchrun.sh.j2:3: " in str(error)
    assert "end the command with &" in error.hint


@pytest.mark.parametrize("ranks", ["\nsrun true &\n", "{{ super() }}", "\ncoproc srun true\n"])
def test_ranks_in_the_background_are_taken(office: Office, ranks: str) -> None:
    """However they get there."""
    office.render(CHILD + "{% block ranks %}" + ranks + "{% endblock %}")
