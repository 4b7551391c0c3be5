"""Commands about the place: doctor, schema."""

from __future__ import annotations

from typing import Annotated

import typer

from hpml_orchestrator.cli.common import JsonOption, chosen_site, print_json, print_table, store_of

__all__ = ["doctor", "schema"]


def doctor(context: typer.Context, as_json: JsonOption = False) -> None:
    """Check what hpml finds here; the exit status is 1 when something that it needs is missing."""
    from hpml_orchestrator.site.doctor import examine  # noqa: PLC0415

    findings = examine(store_of(context), site=chosen_site(context))
    if as_json:
        print_json([finding.to_json() for finding in findings])
    else:
        print_table(
            ("CHECK", "RESULT", "FOUND"),
            [(one.check, one.result, one.found) for one in findings],
        )
        for one in findings:
            if one.hint:
                typer.echo(f"hint: {one.check}: {one.hint}", err=True)
    if any(one.result == "missing" for one in findings):
        raise typer.Exit(1)


def schema(
    what: Annotated[str, typer.Argument(help="Which file: job or site.", metavar="WHAT")] = "job",
) -> None:
    """Print the JSON Schema of a job file or of a site profile, for editors."""
    from hpml_orchestrator.errors import InputError  # noqa: PLC0415
    from hpml_orchestrator.spec import job_schema, site_schema  # noqa: PLC0415

    schemas = {"job": job_schema, "site": site_schema}
    if what not in schemas:
        raise InputError("must be job or site", field="WHAT", value=what, hint="hpml schema job")
    print_json(schemas[what]())
