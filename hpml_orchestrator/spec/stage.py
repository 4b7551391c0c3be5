"""One entry of `stage`: data that a job brings to its nodes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    field_validator,
    model_validator,
)

from hpml_orchestrator.spec import text, values

__all__ = ["Stage"]

_TARGETS = ("shm", "local", "auto")
_ONE_FILE = ("file", "tar", "zip", "squashfs")


class Stage(BaseModel):
    """Data that is brought to every node before the ranks start."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    name: text.StageName = Field(
        description="Its name: arguments say {stage.NAME} for where it lies on the node."
    )
    source: text.PathText = Field(description="File, directory or archive to bring.")
    kind: Literal["auto", "file", "tree", "tar", "zip", "squashfs", "pack"] = Field(
        default="auto",
        description="What the source is; archives (tar, zip, squashfs) and what `hpml pack` made "
        "are unpacked, files are copied as they are. auto: by what is found.",
    )
    target: text.PathText = Field(
        default="local",
        description="Where to: shm (RAM), local (the node's disk), auto (RAM where it fits well, "
        "else the disk), or a directory's path.",
    )
    size: str | None = Field(
        default=None,
        description="Its size once staged, such as 40G; measured when left out and needed.",
    )
    keep: StrictBool = Field(
        default=False,
        description="Whether it stays on the node for later jobs, which then copy nothing; it is "
        "removed when room is needed.",
    )
    distribution: Literal["auto", "shared", "chain", "sbcast", "partition"] = Field(
        default="auto",
        description="How it comes to several nodes: shared (each reads the source), chain (one "
        "reads and passes on), sbcast (Slurm's own copy of one file), partition (each has a part "
        "of the files), or auto (whichever takes least time).",
    )
    outside_links: StrictBool = Field(
        default=False,
        description="Whether symbolic links that lead out of the source are kept as they are; "
        "else they are refused.",
    )
    hash: StrictBool = Field(
        default=True,
        description="Whether contents are hashed while they are copied, so that damage is found.",
    )
    epochs: Annotated[StrictInt, Field(ge=1, le=1_000_000_000)] | None = Field(
        default=None,
        description="How often the training reads the data; told beside the number of epochs "
        "after which staging pays.",
    )

    @field_validator("target")
    @classmethod
    def _target(cls, value: str) -> str:
        if value not in _TARGETS and not value.startswith("/"):
            raise ValueError("must be shm, local, auto or an absolute path")
        return value

    @field_validator("size", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        return None if value is None else values.memory_text(value)

    @model_validator(mode="after")
    def _distributable(self) -> Stage:
        if self.distribution == "sbcast" and self.kind in ("tree", "pack"):
            raise ValueError(
                f"distribution: sbcast brings one file, and kind is {self.kind}: use "
                "`distribution: chain`, or make one archive of it"
            )
        if self.distribution == "partition" and self.kind in _ONE_FILE:
            raise ValueError(
                f"distribution: partition shares out the files of a directory, and kind is "
                f"{self.kind}: use `kind: tree` or `kind: pack`"
            )
        return self
