"""XML that somebody else wrote, parsed without letting it fill the memory or the stack."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from hpml_orchestrator.errors import InputError

__all__ = ["BYTES_MAX", "parse_xml"]

BYTES_MAX = 64 * 1024 * 1024
_DEPTH_MAX = 200


class _Bounded(ET.TreeBuilder):
    """A tree that does not grow deeper than a machine is."""

    depth = 0

    def start(self, tag: str, attrs: dict[str, str]) -> ET.Element:
        self.depth += 1
        if self.depth > _DEPTH_MAX:
            raise InputError(f"the XML is nested more than {_DEPTH_MAX} levels deep")
        return super().start(tag, attrs)

    def end(self, tag: str) -> ET.Element:
        self.depth -= 1
        return super().end(tag)


def parse_xml(text: str) -> ET.Element:
    """Return the root of an XML document.

    Raises:
        InputError: it is no XML or is cut off, defines entities, or is too large or too deep.
    """
    if len(text) > BYTES_MAX:
        raise InputError(f"is larger than {BYTES_MAX // 1024**2} MiB")
    if "<!ENTITY" in text:
        raise InputError(
            "defines XML entities, which no topology file does",
            hint="export it again: `lstopo topology.xml`, or NCCL_TOPO_DUMP_FILE",
        )
    parser = ET.XMLParser(target=_Bounded())  # noqa: S314 - no entities, bounded size and depth
    try:
        parser.feed(text)
        root = parser.close()
    except ET.ParseError as error:
        line = error.position[0]
        if error.code in _CUT_OFF:
            raise InputError(
                f"the XML is cut off: it ends at line {line} with elements still open",
                hint="copy or export the file again",
            ) from None
        raise InputError(f"is no valid XML: {error}") from None
    except (ValueError, LookupError) as error:  # a declared encoding that Python does not know
        raise InputError(f"is no valid XML: {error}") from None
    if not isinstance(root, ET.Element):
        raise InputError("is no valid XML: it has no element")
    return root


_CUT_OFF = frozenset({3, 5, 6, 20, 29})
"""Expat's codes for an end too early: no element, and unclosed token, character or section."""
