"""Docstrings for the site: interactive examples become code blocks."""

import griffe


def fenced(text: str) -> str:
    """The text with its `>>>` examples in fences, output included."""
    lines, inside = [], False
    for line in text.splitlines():
        begins = line.lstrip().startswith(">>>")
        if begins and not inside:
            lines += ["", "```pycon"]
            inside = True
        if inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line)
    return "\n".join([*lines, "```"] if inside else lines)


class Doctests(griffe.Extension):
    """Applied to every object that has a docstring."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Called by griffe for each object it loads."""
        if obj.docstring and ">>>" in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)
