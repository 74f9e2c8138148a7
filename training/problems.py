"""Problems of an input that are found together are told together, in lines of 80 columns."""
import re
import textwrap

from ddp_setup import Ddp

WIDTH = 80              # columns
FIRM_BLANK = "\u00a0"   # textwrap does not break there
HEAD = r"([^:\n]+: )?error: "


def refuse(problems: list[str], heading: str = "", most: int = 10) -> None:
    """Raise one ValueError of these problems, a line each; return if there is none.

    Args:
        problems: texts.
        heading: a line before them.
        most: how many are listed; of others only their number is told.
    """
    if not problems:
        return
    lines = problems[:most]
    if len(problems) > most:
        lines.append(f"and {len(problems) - most:,} more")
    if heading:
        raise ValueError("\n  ".join([heading, *lines]))
    raise ValueError("\n".join(lines))


def in_columns(text: str, ddp: Ddp | None = None, hanging: str = "") -> str:
    """The text of a message with its lines filled to 80 columns.

    A line keeps its indentation. A word that is longer, such as a path, is not broken, nor is a
    command in `backquotes`. What stands up to "error:" keeps the word that follows, so that who
    searches a log for it finds more.

    Args:
        text: one or several lines.
        ddp: of the rank that prints it by `abort`, which among several puts the rank before it.
        hanging: blanks before what continues a line."""
    filled = []
    taken = 0    # columns of the first line
    if ddp is not None and ddp.world_size > 1:
        taken = len(f"[{ddp.place}] ")
    head = re.match(HEAD, text)
    if head:
        text = head[0].replace(" ", FIRM_BLANK) + text[head.end():]
    text = re.sub("`[^`\n]+`", lambda command: command[0].replace(" ", FIRM_BLANK), text)
    for line in text.split("\n"):
        words = line.lstrip(" ")
        indent = " " * (len(line) - len(words))
        wrapped = textwrap.fill(words, WIDTH, initial_indent=" " * taken + indent,
                                subsequent_indent=indent + hanging, expand_tabs=False,
                                replace_whitespace=False, break_long_words=False,
                                break_on_hyphens=False)
        filled.append(wrapped[taken:])
        taken = 0
    return "\n".join(filled).replace(FIRM_BLANK, " ")
