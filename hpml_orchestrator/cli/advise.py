"""The command `hpml advise`: will the model fit into memory, and what makes it fit?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.check.memory import advise as advise_job
from hpml_orchestrator.check.memory import extension_notes, gpu_memory, needs_of
from hpml_orchestrator.check.memory_run import command_of, measure, name_of
from hpml_orchestrator.cli.common import (
    JobFile,
    JsonOption,
    SetOption,
    appended_arguments,
    chosen_site,
    print_json,
    refuse_empty,
)
from hpml_orchestrator.cli.process import notice
from hpml_orchestrator.diagnosis.memory import GIB, RESERVE, read_model
from hpml_orchestrator.errors import InputError, counted
from hpml_orchestrator.jobfile.load import parse_setting
from hpml_orchestrator.records.texts import human_bytes, seconds_text
from hpml_orchestrator.records.units import MIB, parse_size_mib
from hpml_orchestrator.runs.backend import choose
from hpml_orchestrator.runs.load import load_job
from hpml_orchestrator.runs.prepare import resolve_stage_targets, room_of_site
from hpml_orchestrator.scheduler.local.processes import memory_mb
from hpml_orchestrator.sweeps.plan import ProgramArguments, batch_argument

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpml_orchestrator.check.memory import Advice
    from hpml_orchestrator.check.memory_run import Measured
    from hpml_orchestrator.records.job import Job

_MOST_SECONDS = 3600


def advise(
    context: typer.Context,
    job_file: JobFile,
    settings: SetOption = [],
    device_memory: Annotated[
        str | None,
        typer.Option(
            "--device-memory",
            metavar="SIZE",
            help="Memory of one GPU, such as 80G; default: by the type of the job's GPUs.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="SIZE|NAME=VALUE,...",
            help="Use formulas for transformers instead of running the program: 7B, or "
            "parameters=7B,layers=32,hidden=4096,sequence=2048, with more names such as "
            "heads=32,vocabulary=32000,batch=1,optimizer=adamw,precision=mixed.",
        ),
    ] = None,
    time_limit: Annotated[
        int,
        typer.Option("--time-limit", metavar="SECONDS", help="Limit for all short runs together."),
    ] = 300,
    as_json: JsonOption = False,
) -> None:
    """Estimate whether a job fits into GPU and node memory.

    Words after `--` are appended to `args` of the job file.

    Runs the program of the job file on this machine for a few steps, in its working directory; with
    --model it uses formulas instead. Exit status: 0 if the job fits or the limit is unknown, 1 if
    it does not fit, 2 if the program cannot be measured, 6 if it fails.
    """
    refuse_empty({"--device-memory": device_memory, "--model": model})
    if not 1 <= time_limit <= _MOST_SECONDS:
        message = f"must be between 1 and {_MOST_SECONDS} seconds"
        raise InputError(message, field="--time-limit", value=time_limit)
    given = None
    if device_memory is not None:
        try:
            given = float(parse_size_mib(device_memory) * MIB), "--device-memory"
        except ValueError as error:
            raise InputError(str(error), field="--device-memory", value=device_memory) from None
    backend = choose("auto", job_file, chosen_site(context))
    resolved = load_job(
        job_file,
        [parse_setting(setting) for setting in settings],
        chosen_site(context),
        backend=backend,
        arguments=appended_arguments(context),
    )
    resolved, _ = resolve_stage_targets(resolved)
    job, site = resolved.job, resolved.site
    if given and not job.resources.gpu_count:
        hint = "--set resources.gpus=1, or leave it out"
        message = "the job asks for no GPU"
        raise InputError(message, field="--device-memory", value=device_memory, hint=hint)
    profile = site.site if site else None
    mebibytes = memory_mb() if backend == "local" else room_of_site(job, profile).memory_mib
    host_limit = float(mebibytes * MIB) if mebibytes else None
    device = given or gpu_memory(job, profile)
    if model is not None:
        need, batch = read_model(model)
        example = f"--model {model},layers=L,hidden=H,sequence=S,vocabulary=V,batch=B"
        lacking = (
            f"activations are not counted: give the model's shape, {example}; FSDP assumes "
            f"{counted(need.layers, 'layer')}; a network that is no transformer needs a measured "
            "run, without --model"
        )
        advice = advise_job(
            job,
            how="formula",
            batch=batch,
            host=None,
            device=need,
            device_memory=device,
            host_limit=host_limit,
            notes=() if need.activations.per_sample else (lacking,),
        )
        source = f"formulas, for {model}"
    else:
        command = command_of(job)
        batch, measured = _measured(job, command, time_limit)
        last = measured.last
        if given is None and "device_bytes" in last:
            device = float(last["device_bytes"]), str(last["device"])
        host, need = needs_of(measured, job)
        notes = [*measured.notes, *extension_notes(measured, host, need, batch)]
        advice = advise_job(
            job, how="measured", batch=batch, host=host, device=need, device_memory=device,
            host_limit=host_limit, notes=notes,
        )  # fmt: skip
        source = _source(name_of(command), measured)
    staged = (job.memory_mib - job.resources.node_memory) * MIB
    if as_json:
        print_json({"name": job.name, "source": source, "staged_bytes": staged, **advice.to_json()})
    else:
        for line in _lines(job, advice, source, staged):
            typer.echo(line)
    if advice.fits is False:
        raise typer.Exit(1)


def _measured(job: Job, command: Sequence[str], time_limit: int) -> tuple[int | None, Measured]:
    """Return the batch size of a rank, None if no argument sets it, and what the program used."""
    found, commands, size = batch_argument(ProgramArguments(command)), {0: command}, None
    if found is not None:
        name, size, shared = found
        if shared:
            size = max(1, size // (job.resources.ranks * job.resources.nodes))
        commands = {}
        for batch in filter(None, (size // 2, size, size // 4) if size > 1 else (1, 2)):
            words = ProgramArguments(command)
            words.set(name, str(batch))
            commands[batch] = words.words
    notice(f"running {name_of(command)} for a few steps in {job.workdir}")
    return size, measure(job, commands, time_limit)


def _source(name: str, measured: Measured) -> str:
    sizes = [str(size) for size in sorted(measured.figures) if size]
    text = f"{name} ran here {measured.last['steps']} steps"
    if sizes:
        text += f" at batch {' and '.join(sizes)}"
    where = "its GPU" if "cuda_bytes" in measured.last else "the CPU"
    return f"{text} on {where}, in {seconds_text(measured.seconds)}"


def _lines(job: Job, advice: Advice, source: str, staged: float) -> Iterator[str]:
    resources = job.resources
    gpus = "no GPU"
    if resources.gpu_count:
        gpus = f"{resources.gpus} {'GPU' if resources.gpu_count == 1 else 'GPUs'}"
    ranks = f"{counted(resources.nodes, 'node')}, {counted(resources.ranks, 'rank')} each"
    batch = f", batch {advice.batch} per rank" if advice.batch else ""
    yield f"job       {job.name}: {ranks}, {gpus}{batch}"
    yield f"{'measured' if advice.how == 'measured' else 'computed':<9} {source}"
    yield from (f"note      {note}" for note in advice.notes)
    if advice.device is not None:
        yield ""
        yield from _device_lines(advice)
    yield ""
    yield from _host_lines(advice, staged)
    yield ""
    verdict = _verdict if advice.counts_activations else _without_activations
    yield f"verdict   {verdict(job, advice)}"


def _row(label: str, size: float | None, text: str = "") -> str:
    shown = "unknown" if size is None else human_bytes(size)
    return f"  {label:<56}{shown:>11}  {text}".rstrip()


def _device_lines(advice: Advice) -> Iterator[str]:
    need, batch = advice.device, advice.batch
    if need is None:
        return
    yield "memory of one GPU"
    yield _row("weights", need.weights)
    yield _row("gradients", need.gradients)
    yield _row("optimizer states", need.optimizer)
    slope = need.activations.per_sample
    growth = f"{human_bytes(slope)} per sample" if slope else ""
    known = need.activations.at(batch) or None
    yield _row("activations", known, growth)
    if advice.how == "measured":
        yield _row("gradients of activations, buffers, workspaces", need.other.at(batch))
    elif need.other.per_sample:
        growth = f"{human_bytes(need.other.per_sample)} per sample"
        yield _row("logits, their softmax and gradients", need.other.at(batch), growth)
    if advice.device_bytes is None:
        yield "  the GPU's memory is not known: give --device-memory 80G"
    else:
        yield _row("one GPU", advice.device_bytes, advice.device_why)
        yield _row(f"  without {100 * RESERVE:.0f} % for CUDA, NCCL, fragmentation", advice.room)
    yield from _options(advice)


def _options(advice: Advice) -> Iterator[str]:
    what = "GPU" if advice.device is not None else "rank"
    counted = advice.counts_activations
    yield f"ways to train, and what one {what} needs{'' if counted else ' without activations'}"
    for option in advice.options:
        fits = advice.room is None or option.need <= advice.room
        possible = "fits" if counted else "not known"
        mark = "" if advice.room is None else possible if fits else "too large"
        yield _row(option.name, option.need, mark)


def _host_lines(advice: Advice, staged: float) -> Iterator[str]:
    host, batch = advice.host, advice.batch
    yield "memory of one node"
    if host is None:
        if advice.device is not None:
            yield "  unknown by formulas: run hpml advise without --model"
            return
        yield _row("all ranks, by formulas", advice.host_bytes)
    else:
        each = f"{host.ranks} x " if host.ranks > 1 else ""
        slope = host.process.per_sample
        growth = f"{human_bytes(slope)} per sample" if slope else ""
        yield _row(f"{each}process of a rank", host.process.at(batch), growth)
        if host.workers.at(batch):
            yield _row(f"{each}loader workers", host.workers.at(batch))
        if host.pinned.at(batch):
            yield _row(f"{each}pinned batches", host.pinned.at(batch), "formula")
        if host.cuda:
            yield _row(f"{each}CUDA's libraries and context", host.cuda, "estimate")
        yield _row("libraries, shared by all processes", host.shared)
    limit = "" if advice.host_limit is None else f"of {human_bytes(advice.host_limit)}"
    yield _row("together", advice.host_bytes, limit)
    if staged:
        yield _row("staged into RAM", staged, "hpml adds it to resources.memory")
    if advice.device is None and advice.host_fits is False:
        yield from _options(advice)


def _verdict(job: Job, advice: Advice) -> str:
    parts = []
    first = advice.options[0]
    if advice.device is not None:
        if advice.room is None:
            parts.append(f"each GPU needs {human_bytes(first.need)}")
        elif advice.way is None:
            parts.append("no way listed fits: more GPUs, GPUs with more memory, or a smaller model")
        elif advice.way is first:
            parts.append(f"fits one GPU{_headroom(advice)}")
        else:
            name, what = advice.way.name, advice.way.what
            parts.append(f"does not fit as {first.name}; fits with {name}: {what}")
    need, limit = advice.host_bytes, advice.host_limit
    asked = "resources.memory" if job.resources.node_memory else "the node's memory"
    if need is not None and limit is not None:
        if advice.host_fits:
            parts.append(f"the node's memory suffices: {100 * need / limit:.0f} % of {asked}")
        else:
            text = f"{asked} is too small: ask for {_memory(need)}"
            if advice.device is None and advice.largest_batch:
                text += f", or use a batch of {advice.largest_batch}"
            if advice.device is None and advice.way is not None and advice.way is not first:
                text += f", or {advice.way.name}: {advice.way.what}"
            parts.append(text)
    elif need is not None:
        parts.append(f"resources.memory: {_memory(need)} suffices")
    return "; ".join(parts) or "not known"


def _without_activations(job: Job, advice: Advice) -> str:
    """Return the verdict on weights, gradients and optimizer states; activations are unknown."""
    first, way = advice.options[0], advice.way
    if advice.device is None:
        need, limit = advice.host_bytes or 0.0, advice.host_limit
        room = "resources.memory" if job.resources.node_memory else "the node's memory"
    else:
        need, limit, room = first.need, advice.room, "each GPU's room"
    counted = f"weights, gradients and optimizer states alone need {human_bytes(need)}"
    if limit is not None:
        counted += f", {100 * need / limit:.0f} % of {room}"
    if limit is None or need <= limit:
        return f"not known: {counted}; activations are not counted"
    if way is None or way is first:
        return f"does not fit: {counted}"
    return f"does not fit: {counted}; {way.name} may fit: {way.what}"


def _headroom(advice: Advice) -> str:
    batch, most = advice.batch, advice.largest_batch
    text = ""
    if most and batch and most > batch:
        step = 10 ** max(len(str(most)) - 2, 0)  # more than two digits would be false precision
        text = f", with a batch up to about {most // step * step:,}"
    if advice.replicas > 1:
        text += f", or {advice.replicas} such trainings side by side"
    return text


def _memory(need: float) -> str:
    """Return a value for `resources.memory`, a tenth above the need."""
    gibibytes = 1.1 * need / GIB
    return f"{gibibytes:.0f}G" if gibibytes > 16 else f"{-(-1.1 * need // MIB):.0f}M"  # noqa: PLR2004
