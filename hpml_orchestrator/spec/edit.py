"""Change single fields in the text of a YAML document; all other characters stay as they are."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode, SequenceNode

_WIDE = 1 << 30  # no value is broken over lines


class CannotEditError(Exception):
    """The document is written in a way that this module cannot change."""


def set_field(text: str, field: str, value: object, *, comment: str = "") -> str:
    """Return the text of a document with another value of one field.

    Unchanged entries of a list are not touched. The caller must read the result and compare it,
    because an alias may have changed more than this field.

    Args:
        text: a YAML document that holds a mapping.
        field: dotted; numbers are places in a list. Mappings on the way that are missing are made.
        value: of mappings, lists, texts, numbers and booleans; None removes the field.
        comment: put on a separate line above the field; empty for none.

    Raises:
        CannotEditError: it is not such a document, or not written in a form that can be changed.
    """
    plain = json.loads(json.dumps(value))  # numbers that keep their spelling become plain ones
    changed = _set(text, field.split("."), plain)
    if comment and changed != text:
        changed = _with_comment(changed, field.split("."), comment)
    return changed


def _is_flow(node: Node | None) -> bool:
    return isinstance(node, CollectionNode) and bool(node.flow_style)


def flow_text(value: object) -> str:
    """Return a value on one line: `{name: digits, target: shm}`."""
    if isinstance(value, str):  # in a list, since a text such as `a{b}` needs quotes there only
        text = _dumped([value], flow=True).strip()[1:-1]
    else:
        text = _dumped(value, flow=True).removesuffix("\n...").strip()
    try:  # the reader does not take each plain text that the writer leaves, such as `{a: :a}`
        is_same = YAML(typ="safe", pure=True).load(f"a: {{a: {text}}}\n") == {"a": {"a": value}}
    except YAMLError:
        is_same = False
    return text if is_same else json.dumps(value, ensure_ascii=False)


def _beside(value: object, around: Node | None) -> str:
    if isinstance(value, str) and "\n" not in value and not _is_flow(around):
        return _dumped(value, flow=False).removesuffix("...\n").strip()
    return flow_text(value)


def block_text(fields: dict[str, object]) -> str:
    """Return a mapping as a document, in its order."""
    return _dumped(fields, flow=False)


def _dumped(value: object, *, flow: bool) -> str:
    writer, stream = YAML(typ="safe", pure=True), io.StringIO()
    writer.default_flow_style = flow
    writer.width = _WIDE
    writer.allow_unicode = True
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    writer.dump(value, stream)
    text = stream.getvalue().rstrip("\n")
    return text if flow else f"{text}\n"


def _compose(text: str) -> Node:
    try:
        root = YAML(typ="safe", pure=True).compose(io.StringIO(text))
    except (YAMLError, ValueError) as error:
        raise CannotEditError(str(error)) from error
    if not isinstance(root, MappingNode):
        raise CannotEditError("holds no mapping")
    return root


def _find(text: str, path: Sequence[str]) -> list[Node]:
    """Return the nodes on the way to a field, the root first, as far as they exist."""
    nodes = [_compose(text)]
    for part in path:
        here, inner = nodes[-1], None
        if isinstance(here, MappingNode):
            inner = next((node for key, node in here.value if key.value == part), None)
        elif isinstance(here, SequenceNode) and part.isdecimal():
            inner = next(iter(here.value[int(part) :]), None)
        if inner is None:
            break
        nodes.append(inner)
    return nodes


def _set(text: str, path: Sequence[str], value: object) -> str:
    nodes = _find(text, path)
    missing = path[len(nodes) - 1 :]
    here = nodes[-1]
    if value is None:
        return text if missing else _without(text, nodes[-2], here)
    for part in reversed(missing[1:]):
        value = {part: value}
    if missing:
        if isinstance(here, MappingNode):
            return _inserted(text, here, f"{flow_text(missing[0])}: {_beside(value, here)}")
        if isinstance(here, SequenceNode) and missing[0] == str(len(here.value)):
            return _inserted(text, here, _beside(value, here))
        if not (isinstance(here, ScalarNode) and str(here.tag).endswith(":null")):
            raise CannotEditError(f"{'.'.join(path)} is not in a mapping")
        value = {missing[0]: value}
    if isinstance(here, ScalarNode) and here.start_mark.index == here.end_mark.index:
        return _filled(text, nodes[-2], here, value)
    around = nodes[-2] if len(nodes) > 1 else None
    return _replaced(text, path[: len(nodes) - 1], here, value, around)


def _filled(text: str, around: Node, node: Node, value: object) -> str:
    if not isinstance(around, MappingNode):
        raise CannotEditError("an entry of a list is empty")
    end = _colon(text, around, node)
    return f"{text[:end]} {_beside(value, around)}{text[end:]}"


def _colon(text: str, around: MappingNode, node: Node) -> int:
    key = next(key for key, inner in around.value if inner is node)
    return text.index(":", key.end_mark.index) + 1


def _replaced(
    text: str, path: Sequence[str], node: Node, value: object, around: Node | None
) -> str:
    if isinstance(node, MappingNode) and isinstance(value, dict) and value and node.value:
        for key in [str(key.value) for key, _ in node.value]:
            if key not in value:
                text = _set(text, [*path, key], None)
        # Field by field, so that comments between unchanged fields stay where they are.
        for key, inner in value.items():
            text = _set(text, [*path, key], inner)
        return text
    is_list = isinstance(node, SequenceNode) and isinstance(value, list)
    # Only if no entry has to go: entries can be changed and appended one by one, not removed.
    if is_list and isinstance(value, list) and len(value) >= len(node.value or ()) > 0:
        for index, inner in enumerate(value):
            text = _set(text, [*path, str(index)], inner)
        return text
    if isinstance(node, ScalarNode) and _value_of(text, node) == (value, type(value)):
        return text
    return _over(text, node, value, around)


def _over(text: str, node: Node, value: object, around: Node | None) -> str:
    start, end = node.start_mark.index, _end(text, node)
    if isinstance(around, MappingNode):
        colon = _colon(text, around, node)
        line, _, rest = text[colon:start].partition("\n")
        if not rest.strip():  # a block below its key: the value goes behind the colon
            return f"{text[:colon]} {_beside(value, around)}{line.rstrip()}{text[end:]}"
    return text[:start] + _beside(value, around) + text[end:]


def _value_of(text: str, node: Node) -> tuple[object, type]:
    """Return the value of a scalar and its type: `1` is neither `true` nor `1.0`."""
    written = text[node.start_mark.index : node.end_mark.index]
    try:
        value = YAML(typ="safe", pure=True).load(written)
    except (YAMLError, ValueError):
        return None, type(None)
    return value, type(value)


def _inserted(text: str, around: Node, entry: str) -> str:
    is_list = isinstance(around, SequenceNode)
    if not around.value:
        start, end = around.start_mark.index, around.end_mark.index  # of `[]` or `{}`
        return text[:start] + (f"[{entry}]" if is_list else f"{{{entry}}}") + text[end:]
    last = around.value[-1]
    end = _end(text, last if is_list else last[1])
    if _is_flow(around):
        return f"{text[:end]}, {entry}{text[end:]}"
    line_end = text.find("\n", end)
    line_end = len(text) if line_end < 0 else line_end
    lead = " " * around.start_mark.column + "- " * is_list
    return f"{text[:line_end]}\n{lead}{entry}{text[line_end:]}"


def _without(text: str, around: Node, node: Node) -> str:
    if not isinstance(around, MappingNode):
        raise CannotEditError("an entry of a list cannot be removed")
    place = next(index for index, (_, value) in enumerate(around.value) if value is node)
    key, end = around.value[place][0], _end(text, node)
    start = key.start_mark.index
    if len(around.value) == 1:
        whole = around.start_mark.index, _end(text, around)
        return f"{text[: whole[0]]}{{}}{text[whole[1] :]}"
    if _is_flow(around):
        if place:
            return text[: _end(text, around.value[place - 1][1])] + text[end:]
        return text[:start] + text[around.value[1][0].start_mark.index :]
    line = text.rfind("\n", 0, start) + 1
    if text[line:start].strip():  # the first entry of a mapping in a list: `- name: x`
        return text[:start] + text[around.value[1][0].start_mark.index :]
    line_end = text.find("\n", end)
    return text[:line] + (text[line_end + 1 :] if line_end >= 0 else "")


def _end(text: str, node: Node) -> int:
    if isinstance(node, ScalarNode):
        # The end mark of a block scalar is after the blank lines that follow it. Those belong to
        # the document, not to the value.
        end = int(node.end_mark.index)
        is_block = node.style in ("|", ">") or end == node.start_mark.index
        return len(text[:end].rstrip()) if is_block else end
    if _is_flow(node) or not node.value:
        return int(node.end_mark.index)
    last = node.value[-1]
    return _end(text, last if isinstance(node, SequenceNode) else last[1])


def _with_comment(text: str, path: Sequence[str], comment: str) -> str:
    nodes = _find(text, path)
    for depth in range(len(nodes) - 1, 0, -1):
        around, node = nodes[depth - 1], nodes[depth]
        if isinstance(around, MappingNode):
            node = next(key for key, value in around.value if value is node)
        line = text.rfind("\n", 0, node.start_mark.index) + 1
        before = text[line : node.start_mark.index]
        if not before.strip(" -"):
            # in front of the dash of a list's entry, if there is one
            lead = " " * (len(before) - len(before.lstrip()))
            return f"{text[:line]}{lead}# {comment}\n{text[line:]}"
    line = text.rfind("\n", 0, nodes[0].start_mark.index) + 1
    return f"{text[:line]}# {comment}\n{text[line:]}"
