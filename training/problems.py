"""Problems of an input that are found together are told together."""


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
