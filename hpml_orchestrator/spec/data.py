"""The job file's models of data: what is brought to the nodes, and what back from them."""

from __future__ import annotations

import posixpath
import re
from typing import Literal

from pydantic import StrictBool, field_validator, model_validator

from hpml_orchestrator.spec import text
from hpml_orchestrator.spec.text import Model


class Stage(Model):
    """Data that is brought to every node before the ranks start."""

    name: text.StageName
    """Its name: `{stage.NAME}` in arguments is its directory on the node."""
    source: text.PathText
    """File, directory or archive to bring."""
    kind: Literal["auto", "file", "tree", "tar", "zip", "pack"] = "auto"
    """What the source is; archives (`tar`, `zip`) and directories of tar shards (`pack`) are
    unpacked, others are copied as they are. `auto` looks at the source, and unpacks shards only if
    `hpml pack` wrote them."""
    target: text.PathText = "local"
    """Where to: `shm` (RAM), `local` (the node's disk), `auto` (RAM if there is enough, else the
    disk), or a directory's path."""
    size: text.Memory | None = None
    """Its size once staged, such as `40G`; default: measured."""
    keep: StrictBool = False
    """Whether it stays on the node for later jobs, which then copy nothing; removed when the room
    is needed."""
    trust_mtime: StrictBool = False
    """Whether kept data is found again without a look at each file: if the source's own
    modification time has not changed."""
    distribution: Literal["auto", "shared", "chain"] = "auto"
    """How several nodes get it: `shared` (each reads the source), `chain` (one reads and passes it
    on), or `auto` (whichever takes less time)."""
    outside_links: StrictBool = False
    """Whether to keep symbolic links that lead out of the source; else an error."""
    follow_links: StrictBool = False
    """Whether to copy what the symbolic links of a directory lead to, in their place."""
    hash: StrictBool = True
    """Whether to hash contents while copying, to detect damage."""

    @field_validator("target")
    @classmethod
    def _target(cls, value: str) -> str:
        if value not in ("shm", "local", "auto") and not value.startswith("/"):
            raise ValueError("must be shm, local, auto or an absolute path")
        return value

    @model_validator(mode="after")
    def _kept(self) -> Stage:
        if self.trust_mtime and not self.keep:
            raise ValueError("trust_mtime: is for data that is kept; add `keep: true`")
        return self


class Collect(Model):
    """Results that are brought from the nodes to the shared file system when the job ends."""

    source: text.PathText
    """File or directory on the nodes; `{local.dir}` is the job's own directory on their disk,
    `{shm.dir}` that in RAM."""
    target: text.PathText
    """Directory on the shared file system: results are in `TARGET/RUN/NODE`."""

    @field_validator("source")
    @classmethod
    def _source(cls, value: str) -> str:
        if not re.match(r"/|\{(local\.dir|shm\.dir|stage\.\w+|env\.\w+)\}(/|$)", value):
            raise ValueError(
                "must be a path on the nodes: begin it with {local.dir}, {shm.dir} or {stage.NAME}"
            )
        rest = value.partition("}")[2] if value.startswith("{") else value
        if re.search(r"[$*?]", rest) or ".." in rest.split("/"):
            raise ValueError("is taken as it is written: name a directory to bring all of it")
        if not value.strip("/"):
            raise ValueError("must be a file or directory below /")
        return value.rstrip("/")

    @property
    def name(self) -> str:
        """What it is called in its target."""
        return posixpath.basename(self.source).strip("{}")
